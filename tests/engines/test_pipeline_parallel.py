"""Chunks do not depend on how layers are spread: engines of different pipeline and tensor-parallel sizes share them.

`stages` has two stages of two layers each; `whole` has all layers on one rank, `halves` on two ranks with half of the
heads each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llm import LlmFleet, Nursery

pytestmark = pytest.mark.engine

REPORT_TIMEOUT_SECONDS = 60.0
TWO_RANKS: dict[str, Any] = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add(
            "stages",
            pipeline_parallel_size=2,
            worker_extension_cls="tests.engines.stage_warm_up.StageWarmUp",
            **TWO_RANKS,
        )
        fleet.add("whole")
        fleet.start()
        fleet.add("halves", tensor_parallel_size=2, **TWO_RANKS)
        fleet.start()
        yield fleet


def test_two_stages_store_and_load_through_one_node(fleet: LlmFleet, prompt: list[int]) -> None:
    engine = fleet.engines["stages"]
    expected = fleet.engines["whole"].compute(prompt)
    first = engine.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (expected, 768, 0)
    assert again.grown["lmkv:loaded_bytes_total"] == 3 << 20, "both stages together load each byte once"


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("stages", "whole"), ("whole", "stages"), ("stages", "halves"), ("halves", "stages")],
)
def test_peers_share_whatever_their_stages_and_ranks(
    fleet: LlmFleet, prompt: list[int], writer: str, reader: str
) -> None:
    expected = fleet.engines[writer].ask(prompt).token_ids
    fleet.coordinator.wait_for_holder(prompt, writer, 768, REPORT_TIMEOUT_SECONDS)
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 768)
