"""Hints about prompts of real engines: what is kept, brought and dropped, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.v1.cache_service_pb2 import HintResponse
from lmkv.v1.chunk_pb2 import HINT_OUTCOME_ACCEPTED
from lmkv_client.sync import Coordinator
from tests.engines.faults import eventually
from tests.engines.llm import Answers, LlmFleet, LlmProcess, Nursery
from tests.engines.parts import NodeParts

pytestmark = pytest.mark.engine

HELD_TOKENS = 768
HELD_CHUNKS = 3
POOL_CHUNKS = 32
REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """`first`, which has a disk, and `second`; each with a small pool."""
    pool = {"max_local_cpu_size": f"{POOL_CHUNKS}MiB", "eviction_policy": "lru"}
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("first", pool | {"local_disk": str(fleet.runtime_dir / "disk"), "max_local_disk_size": "1GB"})
        fleet.add("second", pool)
        fleet.start()
        yield fleet


@pytest.fixture
def coordinator(fleet: LlmFleet) -> Iterator[Coordinator]:
    """A client of the fleet's coordinator."""
    with Coordinator(fleet.coordinator.address) as client:
        yield client


def ask(engine: LlmProcess, prompt: Sequence[int], action: str, **payload: object) -> tuple[Answers, dict[str, Any]]:
    """The answer to a prompt with a hint about it, and how the hint ended by then."""
    one = {"action_id": "a", "action_type": action, "action_version": "1.0", "payload": payload}
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": [one]}
    answers = engine.ask(prompt, extra_args={"kv_transfer_params": {"lmkv": {"kv_hints": envelope}}})
    (outcome,) = answers.answers[0].transfer_params["lmkv"]["kv_hints"]
    return answers, outcome


def disk_tokens(answers: Answers) -> int:
    return int(answers.grown.get('lmkv:tier_tokens_total{tier="disk"}', 0))


def flood(engine: LlmProcess, prompt: Sequence[int]) -> None:
    """Fills the pool with other, new prompts; never are all chunks of the pool in use."""
    for number in range(POOL_CHUNKS // HELD_CHUNKS + 1):
        engine.ask([2 + number, *prompt[1:]], max_tokens=1)


@pytest.mark.parametrize("action", ["pin", "retain"])
def test_a_kept_prompt_is_loaded_from_the_pool_where_another_one_is_not(
    fleet: LlmFleet, prompt: list[int], action: str
) -> None:
    engine = fleet.engines["first"]
    other = prompt[::-1]
    engine.ask(other)
    wait_on_disk(fleet, other)  # what is evicted before is not written
    answers, outcome = ask(engine, prompt, action, ttl=600)
    assert (outcome["action"], outcome["outcome"], outcome["ttl"]) == (action, "deferred", 600.0)
    flood(engine, prompt)
    kept = engine.ask_again(prompt)
    assert (kept.token_ids, kept.loaded_tokens, disk_tokens(kept)) == (answers.token_ids, HELD_TOKENS, 0)
    assert disk_tokens(engine.ask_again(other)) == HELD_TOKENS


def test_an_evicted_prompt_is_computed_again(fleet: LlmFleet, prompt: list[int]) -> None:
    engine = fleet.engines["second"]
    answers, outcome = ask(engine, prompt, "evict")
    assert outcome["outcome"] == "deferred"
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.cached_tokens) == (answers.token_ids, 0)
    assert engine.ask_again(prompt).cached_tokens == HELD_TOKENS


def in_pool(coordinator: Coordinator, prompt: Sequence[int], instance_id: str) -> int:
    """The number of a prompt's chunks in an instance's pool: all that a hint which only uses them covers."""
    return coordinator.hint("share", prompt[:HELD_TOKENS], instance=instance_id).result.chunk_count


def prefetch(coordinator: Coordinator, prompt: Sequence[int], instance_id: str) -> HintResponse:
    """Has a prompt prefetched; returns once it is in the pool."""
    assert in_pool(coordinator, prompt, instance_id) == 0
    response = coordinator.hint("prefetch", prompt[:HELD_TOKENS], instance=instance_id)
    eventually(lambda: in_pool(coordinator, prompt, instance_id) == HELD_CHUNKS, "the prompt is in the pool")
    return response


def test_a_prefetch_brings_a_prompt_from_a_peer_before_its_request(
    fleet: LlmFleet, coordinator: Coordinator, prompt: list[int]
) -> None:
    expected = fleet.engines["first"].ask(prompt).token_ids
    fleet.coordinator.wait_for_holder(prompt, "first", HELD_TOKENS, REPORT_TIMEOUT_SECONDS)
    result = prefetch(coordinator, prompt, "second").result
    assert (result.outcome, result.chunk_count) == (HINT_OUTCOME_ACCEPTED, HELD_CHUNKS)
    answers = fleet.engines["second"].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, HELD_TOKENS, 0)


def test_a_prefetch_brings_a_prompt_from_disk_before_its_request(
    fleet: LlmFleet, coordinator: Coordinator, prompt: list[int]
) -> None:
    engine = fleet.engines["first"]
    expected = engine.ask(prompt).token_ids
    wait_on_disk(fleet, prompt)
    evicted = coordinator.hint("evict", prompt[:HELD_TOKENS], instance="first").result
    assert (evicted.outcome, evicted.chunk_count) == (HINT_OUTCOME_ACCEPTED, HELD_CHUNKS)
    result = prefetch(coordinator, prompt, "first").result
    assert (result.outcome, result.chunk_count) == (HINT_OUTCOME_ACCEPTED, HELD_CHUNKS)
    answers = engine.ask_again(prompt)
    assert (answers.token_ids, answers.loaded_tokens, disk_tokens(answers)) == (expected, HELD_TOKENS, 0)


def wait_on_disk(fleet: LlmFleet, prompt: Sequence[int]) -> None:
    NodeParts(fleet, "first").wait_on_disk(prompt, fleet.runtime_dir / "disk", HELD_CHUNKS)
