"""The GPU benchmark, without a GPU: its code runs, and it reports the missing GPU."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import kernels_gpu
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report
from tests.kernels.emulation import emulated_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_one_line_and_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_gpu.main(["--quick"]) == kernels_gpu.NO_DEVICE
    said = capsys.readouterr()
    assert said.err.startswith("kernels_gpu: no CUDA ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_every_row_is_measured_and_explained(tmp_path: Path) -> None:
    report = Report(benchmark="kernels_gpu", command="", quick=True, machine={})
    run = BenchmarkRun(args=Namespace(), report=report, folder=tmp_path, logs=tmp_path)
    layouts = [dataclasses.replace(layout, layer_count=1, content=16) for layout in kernels_gpu.LAYOUTS]
    with emulated_device() as (device, program), device.current():
        gpu = kernels_gpu.MeasuredGpu(device=device, program=program, memory="cpu")
        kernels_gpu.measure_on(run, gpu, kernels_gpu.CHUNK_SIZE, layouts)
    assert len(report.rows) == 3 * len(layouts) + 6
    for row in report.rows:
        assert row.ratio is not None
        assert meaning_of(row.name, "kernels_gpu")
