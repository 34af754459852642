"""What the coordinator can do: `python -m benchmarks.control_plane`, docs/performance/control-plane.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.coordinator import departures, fairness, fleets, layouts, lookups
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.systems import controllers
from benchmarks.systems.pairs import lmcache_problem

PARTS = ("map", "lookups", "fairness", "rebuild", "death")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """All parts."""
    parts: Sequence[str] = run.args.only or PARTS
    run.report.settings["parts"] = list(parts)
    if "map" in parts:
        run.say("the layout map by itself")
        layouts.measure(run)
    if "lookups" in parts:
        run.say("lookups at a coordinator that knows a million chunks")
        uvloop.run(lookups.measure(run))
    if "fairness" in parts:
        run.say("a tenant beyond its quota")
        uvloop.run(fairness.measure(run))
    if "rebuild" in parts:
        run.say("a coordinator that starts again")
        uvloop.run(fleets.measure_rebuild(run))
    if "death" in parts:
        run.say("an instance that dies")
        uvloop.run(departures.measure(run))
    python: Path | None = run.args.lmcache_python
    if problem := lmcache_problem(python):
        run.note(problem)
    elif python:
        run.say("LMCache's controller")
        controllers.measure(run, python.absolute())


BENCHMARK = Benchmark(
    name="control_plane",
    description="Measures what the coordinator can do: lookups, reports, memory, restarts, departures.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
