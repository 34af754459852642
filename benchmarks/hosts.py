"""Fetches, hits and handoffs between hosts: `python -m benchmarks.hosts`, docs/performance/channels.md."""

from __future__ import annotations

import argparse
import sys

from benchmarks.node import host_fetches, host_ttft
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun

PARTS = {"fetches": host_fetches.measure, "ttft": host_ttft.measure}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """Every channel, and the choice of `auto`; then engines."""
    dtype = engines.choose_dtype(run)
    for part in run.args.only or PARTS:
        run.say(f"{part} between hosts")
        PARTS[part](run, dtype)


BENCHMARK = Benchmark(
    name="hosts",
    description="Measures transfers between hosts that share no memory, made of network namespaces; needs root.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
