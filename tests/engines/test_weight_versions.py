"""Engines whose weights change in place, while pool, disk and a peer hold KV of the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.tiers import DISK, HOST
from tests.engines.faults import eventually
from tests.engines.llm import LlmFleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

PROMPT = make_prompt(1, 1000)
HELD_TOKENS = 768
HELD_CHUNKS = 3
REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture
def fleet(nursery: Nursery, tiny_model: Path, tmp_path: Path) -> Iterator[LlmFleet]:
    """Two engines that share KV: `updated`, which has a disk, and `peer`."""
    with LlmFleet(nursery, tiny_model, tmp_path, coordinator=True) as fleet:
        fleet.add("updated", {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": "64MiB"})
        fleet.add("peer")
        fleet.start()
        yield fleet


@pytest.fixture
def new_answer(nursery: Nursery, other_tiny_model: Path, tmp_path: Path) -> tuple[int, ...]:
    """What a fresh engine without a cache says that has the new weights from the start."""
    logs = tmp_path / "fresh"
    logs.mkdir()
    with LlmFleet(nursery, other_tiny_model, logs) as fleet:
        fresh = fleet.add("fresh", transfer_config=None)
        fleet.start()
        (answer,) = fresh.compute(PROMPT)
        return answer


def fill_all_places(fleet: LlmFleet) -> tuple[int, ...]:
    """The answer of the old weights, whose KV is in the pool and on the disk of `updated` and in the pool of `peer`."""
    answer = fleet.engines["updated"].ask(PROMPT).token_ids[0]
    fleet.coordinator.wait_for_holder(PROMPT, "updated", HELD_TOKENS, REPORT_TIMEOUT_SECONDS)
    loaded = fleet.engines["peer"].ask(PROMPT)
    assert (loaded.token_ids[0], loaded.peer_tokens) == (answer, HELD_TOKENS)
    fleet.coordinator.wait_for_holder(PROMPT, "peer", HELD_TOKENS, REPORT_TIMEOUT_SECONDS)
    eventually(lambda: chunks(fleet, "updated", DISK) == HELD_CHUNKS, "the prompt is on disk")
    return answer


def chunks(fleet: LlmFleet, name: str, tier: str) -> int:
    usages = fleet.coordinator.instances()[name].tiers
    return sum(usage.chunk_count for usage in usages if usage.tier == tier)


def test_an_update_makes_old_kv_useless_everywhere_and_named_weights_are_shared_again(
    fleet: LlmFleet, new_answer: tuple[int, ...], tiny_model: Path, other_tiny_model: Path
) -> None:
    updated, peer = fleet.engines["updated"], fleet.engines["peer"]
    old_answer = fill_all_places(fleet)
    assert new_answer != old_answer, "the weights make no difference"

    updated.load_weights(other_tiny_model)
    answer = updated.ask_again(PROMPT)
    assert (answer.token_ids[0], answer.cached_tokens) == (new_answer, 0)
    again = updated.ask_again(PROMPT)
    assert (again.token_ids[0], again.loaded_tokens) == (new_answer, HELD_TOKENS), "its own KV is of use"
    assert peer.ask_again(PROMPT).token_ids[0] == old_answer, "the peer still has the old weights"

    for engine in (peer, updated):
        engine.load_weights(other_tiny_model, "2")
    computed = peer.ask_again(PROMPT)
    assert (computed.token_ids[0], computed.cached_tokens) == (new_answer, 0)
    eventually(lambda: chunks(fleet, "peer", HOST) == 2 * HELD_CHUNKS, "the fleet knows the KV of both versions")
    shared = updated.ask_again(PROMPT)
    assert (shared.token_ids[0], shared.peer_tokens) == (new_answer, HELD_TOKENS)

    updated.load_weights(tiny_model, "1")
    back = updated.ask_again(PROMPT)
    assert (back.token_ids[0], back.cached_tokens) == (old_answer, 0)


def test_an_update_that_lmkv_cannot_see_is_a_wrong_hit_until_a_reset(
    fleet: LlmFleet, new_answer: tuple[int, ...], other_tiny_model: Path
) -> None:
    """Shows that the test above would notice old KV."""
    updated = fleet.engines["updated"]
    fill_all_places(fleet)
    updated.load_weights(other_tiny_model, seen=False)
    wrong = updated.ask_again(PROMPT)
    assert wrong.loaded_tokens == HELD_TOKENS
    assert wrong.token_ids[0] != new_answer
    updated.forget(external=True)
    answer = updated.ask(PROMPT)
    assert (answer.token_ids[0], answer.cached_tokens) == (new_answer, 0), "the peer holds old KV"
