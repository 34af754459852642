"""Every transfer channel against its limit: `python -m benchmarks.channels`, docs/performance/channels.md."""

from __future__ import annotations

import argparse
import sys

from benchmarks.node import fetches, host_fetches, host_ttft
from benchmarks.node.bare_ends import LIMITS
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun

HOSTS = "hosts"
"""The part that compares the channels, and `auto`, between hosts."""
TTFT = "ttft"
"""The part that compares hits and handoffs between hosts with those on one host."""
PARTS = (*LIMITS, HOSTS, TTFT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """One channel after the other, each with processes of its own at both ends; then all of them between two hosts."""
    dtype = engines.choose_dtype(run)
    for part in run.args.only or PARTS:
        if part == HOSTS:
            run.say("fetches between hosts")
            host_fetches.measure(run, dtype)
        elif part == TTFT:
            host_ttft.measure(run, dtype)
        else:
            run.say(f"fetches by {part}")
            fetches.measure(run, dtype, [part], closely=True)


BENCHMARK = Benchmark(
    name="channels",
    description="Measures how fast bytes travel between nodes by each channel, and what that costs.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
