"""Two stages of two tensor-parallel ranks each share chunks with one rank. Four ranks run on two cores.

`make test-models` runs it; `test_pipeline_parallel.py` has two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.llm import LlmFleet, Nursery

pytestmark = [pytest.mark.engine, pytest.mark.more_models]

REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """Both engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("whole")
        fleet.add(
            "quarters",
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"},
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            worker_extension_cls="tests.engines.stage_warm_up.StageWarmUp",
        )
        fleet.start()
        yield fleet


@pytest.mark.parametrize(("writer", "reader"), [("quarters", "whole"), ("whole", "quarters")])
def test_stages_of_several_ranks_share_with_one_rank(
    fleet: LlmFleet, prompt: list[int], writer: str, reader: str
) -> None:
    first = fleet.engines[writer].ask(prompt)
    assert (first.cached_tokens, first.stored_tokens) == (0, 768)
    fleet.coordinator.wait_for_holder(prompt, writer, 768, REPORT_TIMEOUT_SECONDS)
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (first.token_ids, 768, 768)
    again = fleet.engines[writer].ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (first.token_ids, 768, 0)
    assert again.grown["lmkv:loaded_bytes_total"] == 3 << 20, "all ranks together load each byte once"
