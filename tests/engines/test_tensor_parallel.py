"""Chunks do not depend on the number of ranks: engines of different tensor-parallel sizes share them.

`halves` runs on two ranks; `whole`, its peer, and `guest`, on the node of `halves`, on one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.llm import LlmFleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("halves", tensor_parallel_size=2, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
        fleet.add("whole")
        fleet.start()
        fleet.add("guest", {"node_address": str(fleet.runtime_dir / "halves" / "engine.sock")})
        fleet.start()
        for engine in fleet.engines.values():  # ranks map the pool in their first step, which waits only for a while
            engine.ask(make_prompt(0, 16))
        yield fleet


def test_two_ranks_store_and_load_through_one_node(fleet: LlmFleet, prompt: list[int]) -> None:
    engine = fleet.engines["halves"]
    expected = fleet.engines["whole"].compute(prompt)
    first = engine.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (expected, 768, 0)
    assert again.grown["lmkv:loaded_bytes_total"] == 3 << 20, "both ranks together load each byte once"


@pytest.mark.parametrize(("writer", "reader"), [("halves", "guest"), ("guest", "halves")])
def test_engines_on_one_node_share_whatever_their_ranks(
    fleet: LlmFleet, prompt: list[int], writer: str, reader: str
) -> None:
    expected = fleet.engines[writer].ask(prompt).token_ids
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 0)


@pytest.mark.parametrize(("writer", "reader"), [("halves", "whole"), ("whole", "halves")])
def test_peers_share_whatever_their_ranks(fleet: LlmFleet, prompt: list[int], writer: str, reader: str) -> None:
    expected = fleet.engines[writer].ask(prompt).token_ids
    fleet.coordinator.wait_for_holder(prompt, writer, 768, REPORT_TIMEOUT_SECONDS)
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 768)
