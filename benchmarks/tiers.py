"""The disk tier, the remote tier, and warm restarts: `python -m benchmarks.tiers`, docs/performance/tiers.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.tier import disk, folder, remote, starts

PARTS = {"disk": disk.measure, "remote": remote.measure, "folder": folder.measure, "starts": starts.measure}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")


def measure(run: BenchmarkRun) -> None:
    """One part after the other."""
    rounds = 1 if run.quick else 5
    run.report.settings["rounds"] = rounds
    for part in run.args.only or PARTS:
        PARTS[part](run, rounds)


BENCHMARK = Benchmark(
    name="tiers",
    description="Measures how fast the disk tier and the remote tier write and read, and how soon a node with chunks "
    "starts.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
