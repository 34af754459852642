"""The benchmark of engines on a GPU, without a GPU: it reports the missing GPU, and its rows have meanings."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import engines_gpu
from benchmarks.node.steps import Steps
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report
from benchmarks.systems import device_handoffs
from benchmarks.systems.prefill_decode import TimedResponse

STEPS = Steps(lookup=1e-3, fetch=0.0, load=2e-2, compute=5e-2, rest=1e-3)


@pytest.fixture
def run(tmp_path: Path) -> BenchmarkRun:
    report = Report(benchmark="engines_gpu", command="", quick=True, machine={})
    return BenchmarkRun(args=Namespace(), report=report, folder=tmp_path, logs=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_one_line_and_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert engines_gpu.main(["--quick"]) == engines_gpu.NO_DEVICE
    said = capsys.readouterr()
    assert said.err == "engines_gpu: no CUDA device\n"
    assert said.out == ""


def test_every_row_is_explained(run: BenchmarkRun) -> None:
    names = ("cold", "prefix", "own", "peer", engines_gpu.OFFLOADING)
    hits = engines_gpu.Hits(seconds={name: [0.1] for name in names}, identical=[True])
    hits.steps = {"own": [STEPS], "peer": [STEPS]}
    engines_gpu.add_hits(run, 513, hits)
    engines_gpu.add_offloading(run, 513, hits)
    answer = TimedResponse(token_ids=(1, 2, 3), seconds=(0.1, 0.2, 0.3))
    device_handoffs.add_rows(run, 513, {buffer: [answer] for buffer in device_handoffs.BUFFERS})
    assert not run.failures
    for row in run.report.rows:
        assert meaning_of(row.name, "engines_gpu")


def test_a_miss_of_the_offloading_is_not_compared(run: BenchmarkRun) -> None:
    hits = engines_gpu.Hits(seconds={"own": [0.1], engines_gpu.OFFLOADING: [0.5]}, computed={engines_gpu.OFFLOADING: 1})
    engines_gpu.add_offloading(run, 513, hits)
    assert not run.report.rows


def test_answers_that_depend_on_the_buffer_fail_the_run(run: BenchmarkRun) -> None:
    answers = {
        buffer: [TimedResponse(token_ids=(number, 2), seconds=(0.1, 0.2))]
        for number, buffer in enumerate(device_handoffs.BUFFERS)
    }
    device_handoffs.add_rows(run, 513, answers)
    assert run.failures == ["P/D, 513 tokens: answers to 1 of 1 prompts depend on the buffer"]
