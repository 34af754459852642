"""vLLM's KV events for what the node holds, out of vLLM's real scheduler with a scripted node."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from lmkv.keys import ChunkKey, KeyChain, as_tokens, part_key, root_key
from lmkv.spec import TOKEN_MAJOR
from lmkv.tiers import DISK, HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.scheduler.events import BlockEvents
from tests.client.connector.simulated_engine import SPEC, SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK, MODELS

MakeEngine = Callable[..., SimulatedEngine]
Index = set[tuple[str | None, int | None, ExternalBlockHash]]
"""What a subscriber believes to be held: medium, group and hash of each block."""

PROMPT = list(range(3, 203))
"""200 tokens: three chunks and 8 tokens."""
GROUPS = (LayerGroup(part=0, block_size=BLOCK, layer_names=("layer",)),)


def stored(events: list[KVCacheEvent]) -> list[BlockStored]:
    """The events, all of which report stores."""
    assert all(isinstance(event, BlockStored) for event in events)
    return [event for event in events if isinstance(event, BlockStored)]


def hashes(request: Request, start: int, stop: int) -> list[ExternalBlockHash]:
    """vLLM's own names of a request's blocks."""
    return [maybe_convert_block_hash(hash_) for hash_ in request.block_hashes[start:stop]]


def index_of(events: Iterable[KVCacheEvent]) -> Index:
    """What a subscriber makes of events. No block may be stored twice, or removed without having been stored."""
    index: Index = set()
    for event in events:
        assert isinstance(event, BlockStored | BlockRemoved)
        blocks = {(event.medium, event.group_idx, hash_) for hash_ in event.block_hashes}
        assert len(blocks) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not blocks & index
            index |= blocks
        else:
            assert blocks <= index
            index -= blocks
    return index


def in_pool(engine: SimulatedEngine) -> Index:
    """The blocks of this engine's requests in the node's pool, by another way: from the keys of their chunks."""
    index: Index = set()
    spec, unit = engine.kv.spec, engine.kv.hash_block_size or BLOCK
    for request in engine.requests.values():
        chain = KeyChain(root_key(spec.fingerprint, cache_salt=request.cache_salt or ""), CHUNK)
        chain.extend(as_tokens(list(request.all_token_ids)))
        for at, chunk_key in enumerate(chain.keys):
            for group, layers in enumerate(engine.kv.groups):
                rule = spec.parts[layers.part]
                if rule.rule == PART_RULE_END or part_key(chunk_key, layers.part) not in engine.node.chunks:
                    continue
                end, size = (at + 1) * CHUNK, layers.block_size
                begin = end - rule.kept_tokens(CHUNK)
                ends = [block + size for block in range(0, end, size) if block >= begin]
                named = [request.block_hashes[last // unit - 1] for last in ends]
                index |= {("CPU", group, maybe_convert_block_hash(hash_)) for hash_ in named}
    return index


def test_each_committed_chunk_is_reported_as_vllms_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("a", PROMPT, salt="tenant")
    engine.run()
    events = stored(engine.events)
    assert [hash_ for event in events for hash_ in event.block_hashes] == hashes(request, 0, 3 * CHUNK // BLOCK)
    assert [token for event in events for token in event.token_ids] == PROMPT[: 3 * CHUNK]
    assert {(event.block_size, event.medium, event.lora_name) for event in events} == {(BLOCK, "CPU", None)}
    assert {event.group_idx for event in events} == {0}
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


def test_evictions_are_reported_under_the_names_of_the_stores(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("a", PROMPT)
    engine.run()
    engine.node.evict()
    engine.serve("b", PROMPT[:20])
    removed = [event for event in engine.events if isinstance(event, BlockRemoved)]
    assert [hash_ for event in removed for hash_ in event.block_hashes] == hashes(request, 0, 3 * CHUNK // BLOCK)
    assert {(event.medium, event.group_idx) for event in removed} == {("CPU", 0)}
    assert not index_of(engine.events)


def test_a_lost_node_holds_nothing_and_one_that_is_found_again_what_it_held(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    held = index_of(engine.events)
    engine.node.lose()
    engine.serve("b", PROMPT[:20])
    assert not index_of(engine.events)
    engine.node.attach(restarted=False)
    engine.serve("c", PROMPT[:20])
    assert index_of(engine.events) == held == in_pool(engine)


def test_chunks_that_others_have_stored_are_reported_once_their_tokens_are_known(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    other = make_engine()
    for key, chunk in engine.node.chunks.items():
        other.node.peer_chunks[key] = chunk
    assert other.serve("b", PROMPT) < CHUNK, "nothing was loaded"
    assert index_of(other.events) == in_pool(other) == index_of(engine.events)


def test_a_refused_commit_is_taken_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    before = index_of(engine.events)
    engine.node.refuses_commits = True
    engine.serve("b", [token + 1 for token in PROMPT])
    engine.serve("c", PROMPT[:20])
    assert index_of(engine.events) == before


@pytest.mark.parametrize("model", ["", "full and a window that ends inside a chunk", "states and a window"])
def test_an_index_built_from_events_equals_the_pool_after_evictions_and_restarts(
    make_engine: MakeEngine, model: str
) -> None:
    draw = random.Random(1)
    engine = make_engine(model=MODELS[model]) if model else make_engine()
    prompts = [[draw.randrange(3, 250) for _ in range(CHUNK * 3)] for _ in range(3)]
    for number in range(30):
        prompt = [*draw.choice(prompts)[: draw.randrange(20, 3 * CHUNK)], draw.randrange(3, 250)]
        engine.serve(str(number), prompt, output=draw.choice((1, 2, CHUNK)))
        act = draw.random()
        if act < 0.3:
            engine.settle()
            for key in draw.sample(list(engine.node.chunks), len(engine.node.chunks) // 2):
                if not engine.node.chunks[key].holds:
                    engine.node.drop(key)
        elif act < 0.4:
            engine.settle()
            engine.node.lose()
            engine.node.attach(restarted=draw.random() < 0.5)
    engine.settle()
    events = engine.events + engine.side.take_events()
    assert any(isinstance(event, BlockRemoved) for event in events)
    assert index_of(events) == in_pool(engine) != set()


def test_blocks_are_reported_with_the_chunk_in_which_they_end(make_engine: MakeEngine) -> None:
    """Blocks of 32 tokens in chunks of 80: the chunks end blocks 0 and 1, 2 to 4, and 5."""
    request = make_engine().add("a", PROMPT)
    events = block_events(80)
    events.follow(request, ())
    for index, (start, stop) in enumerate([(0, 2), (2, 5)]):
        (blocks,) = events.of_chunk("a", 0, index)
        event = blocks.stored("CPU")
        assert event.block_hashes == hashes(request, start, stop)
        assert event.token_ids == PROMPT[start * BLOCK : stop * BLOCK]


def test_chunks_without_a_block_end_and_untracked_requests_have_no_event(make_engine: MakeEngine) -> None:
    request = make_engine().add("a", PROMPT)
    events = block_events(16)
    assert not events.of_chunk("a", 0, 1)
    events.follow(request, ())
    assert not events.of_chunk("a", 0, 0)
    assert events.of_chunk("a", 0, 1)
    events.forget("a")
    assert not events.of_chunk("a", 0, 1)


def test_tiers_are_media_and_a_restart_of_the_changes_removes_what_is_not_named_again(make_engine: MakeEngine) -> None:
    request = make_engine().add("a", PROMPT)
    one, two = (ChunkKey(bytes([number]) * 16) for number in (1, 2))
    events = block_events(CHUNK)
    events.follow(request, [one, two])
    events.apply([pb.TierChange(tier=HOST, stored_keys=[one, two]), pb.TierChange(tier=DISK, stored_keys=[one])])
    first, second = hashes(request, 0, 2), hashes(request, 2, 4)
    taken = events.take()
    assert index_of(taken) == {(medium, 0, hash_) for medium in ("CPU", "STORAGE") for hash_ in first} | {
        ("CPU", 0, hash_) for hash_ in second
    }
    events.apply([pb.TierChange(restarted=True), pb.TierChange(tier=DISK, stored_keys=[one])])
    assert index_of(taken + events.take()) == {("STORAGE", 0, hash_) for hash_ in first}


def test_tokens_are_known_for_a_bounded_number_of_chunks(make_engine: MakeEngine) -> None:
    request = make_engine().add("a", PROMPT)
    keys = [ChunkKey(bytes([number]) * 16) for number in range(3)]
    events = block_events(CHUNK, max_known=2)
    events.follow(request, keys)
    held = pb.TierChange(tier=HOST, stored_keys=keys)
    events.apply([held])
    events.forget("a")
    assert len(index_of(taken := events.take())) == 6
    events.apply([pb.TierChange(tier=HOST, removed_keys=keys)])
    assert not index_of(taken + (later := events.take())), "removals need no tokens"
    events.apply([held])
    assert len(index_of(taken + later + events.take())) == 4


def block_events(chunk_size: int, max_known: int = 100) -> BlockEvents:
    """Events of a model with one group."""
    spec = replace(SPEC, chunk_size=chunk_size, format=TOKEN_MAJOR, tile_backend="", block_size=0)
    return BlockEvents(spec=spec, groups=GROUPS, hash_block_size=BLOCK, max_known=max_known)
