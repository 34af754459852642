"""Every transfer channel against its limit: `python -m benchmarks.channels`, docs/performance/channels.md."""

from __future__ import annotations

import argparse
import sys

from benchmarks.node import fetches
from benchmarks.node.bare_ends import LIMITS
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=LIMITS, help="measure this channel alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """One channel after the other, each with processes of its own at both ends."""
    dtype = engines.choose_dtype(run)
    for channel in run.args.only or LIMITS:
        run.say(f"fetches by {channel}")
        fetches.measure(run, dtype, [channel], closely=True)


BENCHMARK = Benchmark(
    name="channels",
    description="Measures how fast bytes travel between nodes by each channel, and what that costs.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
