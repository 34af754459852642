"""vLLM's KV events for what is stored, out of vLLM's real scheduler with a scripted node."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from lmkv_client.connector.scheduler.events import BlockEvents
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK

MakeEngine = Callable[..., SimulatedEngine]

PROMPT = list(range(3, 203))
"""200 tokens: three chunks and 8 tokens."""


def stored(events: list[KVCacheEvent]) -> list[BlockStored]:
    """The events, all of which report stores."""
    assert all(isinstance(event, BlockStored) for event in events)
    return [event for event in events if isinstance(event, BlockStored)]


def hashes(request: Request, start: int, stop: int) -> list[ExternalBlockHash]:
    """vLLM's own names of a request's blocks."""
    return [maybe_convert_block_hash(hash_) for hash_ in request.block_hashes[start:stop]]


def test_each_committed_chunk_is_reported_as_vllms_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("a", PROMPT, salt="tenant")
    engine.run()
    events = stored(engine.events)
    assert [hash_ for event in events for hash_ in event.block_hashes] == hashes(request, 0, 3 * CHUNK // BLOCK)
    assert [token for event in events for token in event.token_ids] == PROMPT[: 3 * CHUNK]
    assert {(event.block_size, event.medium, event.lora_name) for event in events} == {(BLOCK, "CPU", None)}
    assert events[0].parent_block_hash is None
    for before, event in pairwise(events):
        assert event.parent_block_hash == before.block_hashes[-1]
    assert [event.extra_keys for event in events] == [[("tenant",), None], [None, None], [None, None]]


def test_chunks_filled_by_decoding_are_reported_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT, output=60)
    assert len(stored(engine.events)) == 4


def test_chunks_that_the_node_holds_are_not_reported_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    engine.serve("b", PROMPT)
    assert len(stored(engine.events)) == 3


def test_a_skipped_store_is_reported_once_it_is_repeated(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.workers[0].skips_stores = True
    engine.add("a", PROMPT, output=3)
    engine.step()
    assert not engine.events
    engine.workers[0].skips_stores = False
    engine.run()
    assert len(stored(engine.events)) == 3


def test_blocks_are_reported_with_the_chunk_in_which_they_end(
    make_engine: MakeEngine,
) -> None:
    """Blocks of 32 tokens in chunks of 80: the chunks end blocks 0 and 1, 2 to 4, and 5."""
    request = make_engine().add("a", PROMPT)
    events = BlockEvents(block_size=BLOCK, chunk_size=80)
    events.follow(request)
    reported = [events.of_chunk("a", index) for index in (0, 1)]
    assert [event and event.block_hashes for event in reported] == [hashes(request, 0, 2), hashes(request, 2, 5)]
    assert [event and event.token_ids for event in reported] == [PROMPT[:64], PROMPT[64:160]]


def test_chunks_without_a_block_end_and_untracked_requests_have_no_event(make_engine: MakeEngine) -> None:
    request = make_engine().add("a", PROMPT)
    events = BlockEvents(block_size=BLOCK, chunk_size=16)
    assert events.of_chunk("a", 1) is None
    events.follow(request)
    assert events.of_chunk("a", 0) is None
    assert events.of_chunk("a", 1)
    events.forget("a")
    assert events.of_chunk("a", 1) is None
