"""Benchmarks that compare answers fail when these differ, and fleets join whatever the coordinator's pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks.coordinator import fleets
from benchmarks.node import ttft
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row
from lmkv import rpc
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_server.coordinator.core.instances import MAX_JOINING_OF_TENANT
from tests.benchmarks.test_rows import BENCHMARKS, make_round


def run_benchmark(tmp_path: Path, measure: Callable[[BenchmarkRun], None], *arguments: str) -> tuple[int, bool]:
    """The exit code of a benchmark that measures so, and whether it wrote its JSON."""
    file = tmp_path / "rows.json"
    benchmark = Benchmark(name="answers", description="", measure=measure, add_arguments=engines.add_dtype_argument)
    code = benchmark.main([*arguments, "--json", str(file)])
    return code, file.exists()


def compare(same_count: int) -> Callable[[BenchmarkRun], None]:
    def measure(run: BenchmarkRun) -> None:
        engines.choose_dtype(run, compares_answers=True)
        run.add(Row(name="doc_qa_identical", value=25.0 * same_count, unit="%"))
        engines.check_identical(run, "documents", same_count, 4)

    return measure


def test_answers_that_differ_in_float32_fail_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark(tmp_path, compare(3)) == (1, False)
    printed = capsys.readouterr().out
    assert "failed: documents: 1 of 4 answers differ" in printed
    assert "doc_qa_identical" in printed, "the table is printed all the same"
    assert run_benchmark(tmp_path, compare(4)) == (0, True)


def test_answers_that_differ_in_bfloat16_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark(tmp_path, compare(3), "--dtype", "bfloat16") == (0, True)
    assert "compare in float32" in capsys.readouterr().out


@pytest.mark.parametrize(("hits_identical", "code"), [(True, 0), (False, 1)])
def test_hits_that_differ_from_each_other_fail_in_every_type(tmp_path: Path, hits_identical: bool, code: int) -> None:
    def measure(run: BenchmarkRun) -> None:
        engines.choose_dtype(run)
        odd = replace(make_round(), identical=False, hits_identical=hits_identical)
        ttft.check_answers(run, [make_round(), odd], 4000)

    end, _ = run_benchmark(tmp_path, measure, "--dtype", "bfloat16")
    assert end == code


def test_benchmarks_that_compare_answers_choose_float32(tmp_path: Path) -> None:
    chosen = []

    def measure(run: BenchmarkRun) -> None:
        chosen.append(engines.choose_dtype(run, compares_answers=True))

    assert run_benchmark(tmp_path, measure) == (0, True)
    assert chosen == ["float32"]


async def test_more_instances_join_than_the_coordinator_admits_at_a_time(tmp_path: Path) -> None:
    fleet = fleets.make_fleet(MAX_JOINING_OF_TENANT + 8, 10_000)
    with CoordinatorProcess(tmp_path, arguments=fleets.LONG_LEASE) as coordinator:
        async with rpc.open_channel(coordinator.address) as channel:
            await fleets.join_all(fleet, channel)
        assert len(coordinator.instances()) == len(fleet)


def test_every_benchmark_is_run_by_make() -> None:
    assert set(BENCHMARKS) == set(every.names())
