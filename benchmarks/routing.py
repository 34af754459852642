"""How much of the prompts hits when the picker places them, and what a choice costs: docs/performance/routing.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks.replay.files import read_trace
from benchmarks.replay.fleet import (
    ANSWER_RATE,
    ORACLE,
    OTHER,
    PICKER,
    PLACEMENTS,
    PREFILL_RATE,
    REPORT_SECONDS,
    Fleet,
    OtherRouter,
    Outcome,
    Pace,
    sessions_of,
)
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from benchmarks.systems import picks
from benchmarks.systems.dynamo_selector import DynamoSelector, dynamo_problem, dynamo_version

EXCERPT = Path(__file__).parent / "replay" / "data" / "conversation_excerpt.jsonl.gz"
ENGINE_COUNTS = (8, 16, 64)
ENGINE_TOKENS = 1_000_000
"""Tokens of one engine's cache: 128 GB of a model with 128 KiB a token."""
LRU, LEARNED = "lru", "learned"
DYNAMO = "dynamo"
PARTS = ("placement", "picks")
TWICE_THE_RATE, TWO_SPEEDS, STALL = "twice", "two_speeds", "stall"
TWICE = 2
STALL_AT, STALL_SECONDS = 240.0, 60.0
SCENES: Mapping[str, Callable[[int], Mapping[int, Pace]]] = {
    "": lambda _: {},
    TWICE_THE_RATE: lambda _: {},
    TWO_SPEEDS: lambda count: {at: Pace(tokens_per_second=PREFILL_RATE / 2) for at in range(count // 2, count)},
    STALL: lambda _: {0: Pace(stalls_at=STALL_AT, stall_seconds=STALL_SECONDS)},
}
"""The paces of engines by their number: all equal, also at twice the rate of requests; half of them with half the rate;
and one that stalls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recorded trace: JSON lines with timestamp, input_length, output_length and hash_ids, or a .gz of it "
        "(default: ten minutes of conversations)",
    )
    parser.add_argument(
        "--engine-tokens", type=int, default=ENGINE_TOKENS, metavar="N", help="size of one engine's cache, in tokens"
    )
    parser.add_argument("--dynamo-python", type=Path, metavar="PATH", help="Python of an environment with Dynamo 1.6")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """All parts."""
    parts: Sequence[str] = run.args.only or PARTS
    if "placement" in parts:
        _measure_placements(run)
    if "picks" in parts:
        run.say("choices of the picker")
        uvloop.run(picks.measure(run))


def _measure_placements(run: BenchmarkRun) -> None:
    trace = read_trace(run.args.trace or EXCERPT)
    sessions = sessions_of(trace)
    engine_tokens: int = run.args.engine_tokens
    run.report.settings |= {
        "engine_tokens": engine_tokens,
        "prefill_tokens_per_s": PREFILL_RATE,
        "answer_tokens_per_s": ANSWER_RATE,
        "report_seconds": REPORT_SECONDS,
        "requests": len(trace.requests),
        "sessions": len(set(sessions)),
    }
    run.say(f"{len(trace.requests)} requests of {len(set(sessions))} sessions, caches of {engine_tokens} tokens each")

    def replay(
        placement: str, engine_count: int, policy: str, scene: str = "", other: OtherRouter | None = None
    ) -> Outcome:
        kind = OTHER if other else placement
        paces = SCENES[scene](engine_count)
        fleet = Fleet(trace, kind, engine_count, engine_tokens, policy=policy, paces=paces, other=other)
        rate = TWICE if scene == TWICE_THE_RATE else 1
        outcome = fleet.replay(sessions, speed=rate * engine_count / ENGINE_COUNTS[0])
        words = f"{engine_count} engines{' ' * bool(scene)}{scene}, {policy}, {placement}"
        run.say(f"{words}: {outcome.hit_rate:.2f} %, TTFT {statistics.mean(outcome.waits):.3f} s")
        return outcome

    dynamo: Path | None = run.args.dynamo_python
    if problem := dynamo_problem(dynamo):
        run.note(problem)
        dynamo = None
    if dynamo:
        run.report.settings["dynamo"] = dynamo_version(dynamo)
    for engine_count in ENGINE_COUNTS:
        bound = 0.0
        for scene in SCENES:
            placements = PLACEMENTS if not scene else (PICKER,)
            outcomes = {placement: replay(placement, engine_count, LRU, scene) for placement in placements}
            if dynamo:
                with DynamoSelector(dynamo, run.logs, trace, [str(number) for number in range(engine_count)]) as other:
                    outcomes[DYNAMO] = replay(DYNAMO, engine_count, LRU, scene, other)
            if ORACLE in outcomes:  # its hits depend neither on speeds nor on load
                bound = outcomes[ORACLE].hit_rate
                run.add(Row(name=f"{ORACLE}_{engine_count}_hit_rate", value=bound, unit="%"))
            for placement, outcome in outcomes.items():
                name = "_".join(filter(None, (placement, str(engine_count), scene)))
                if placement != ORACLE:
                    run.add(compare(f"{name}_hit_rate", outcome.hit_rate, "%", "oracle", bound))
                run.add(Row(name=f"{name}_prefill_s", value=statistics.mean(outcome.waits), unit="s"))
        learned = {placement: replay(placement, engine_count, LEARNED).hit_rate for placement in (PICKER, ORACLE)}
        name = f"{PICKER}_{engine_count}_learned_hit_rate"
        run.add(compare(name, learned[PICKER], "%", "oracle", learned[ORACLE]))


BENCHMARK = Benchmark(
    name="routing",
    description="Replays a recorded trace over simulated engines, placed by the endpoint picker and by others; and "
    "measures the time of a choice.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
