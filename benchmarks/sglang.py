"""Hits of SGLang in lmkv, in its own file backend and in Mooncake's store: `python -m benchmarks.sglang`.

Needs an environment with SGLang (`make setup-sglang`): `.venv-sglang/bin/python -m benchmarks.sglang`. The systems run
one after the other, and of each one server at a time where its storage allows it: SGLang's scheduler polls. Every
answer must be the same. docs/performance/sglang.md
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from benchmarks.systems.sglang_servers import (
    PAGE_TOKENS,
    Prompts,
    ServerPair,
    ServerPlan,
    file_servers,
    lmkv_servers,
    mooncake_folder,
    mooncake_servers,
    plain_servers,
)
from lmkv.errors import LmkvError
from tests.sglang.engine import SglangProcess, install_shims

PROMPT_TOKENS = 16 * PAGE_TOKENS + 1
"""One token behind the last page: a hit computes nothing but that."""
OUTPUT_TOKENS = 4
COPIES, LMKV = "copies", "lmkv"
LINKER, FILE, MOONCAKE, PLAIN = OTHERS = ("linker", "file", "mooncake", "plain")
QUICK = (COPIES, LMKV, FILE)
HITS = ("device", "own", "peer")
"""Hits: in SGLang's own KV cache, in the system's storage, and there by another server."""


@dataclass(kw_only=True, slots=True)
class HitTimes:
    """Times to the first token of one system, in seconds, by case and prompt."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median_ms(self, case: str) -> float:
        """The median, in milliseconds."""
        return 1e3 * statistics.median(self.seconds[case])

    def added_ms(self, case: str) -> float:
        """What a hit in the storage takes beyond one in SGLang's own KV cache: median of differences."""
        pairs = zip(self.seconds[case], self.seconds["device"], strict=True)
        return 1e3 * statistics.median(hit - device for hit, device in pairs)


@dataclass(kw_only=True, slots=True)
class Answers:
    """Answers of all systems to each prompt, compared with the first one's."""

    first: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    same_count: int = 0
    count: int = 0

    def add(self, prompt: Sequence[int], answer: tuple[int, ...]) -> None:
        """Counts an answer."""
        self.count += 1
        self.same_count += self.first.setdefault(tuple(prompt), answer) == answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--rounds", type=int, metavar="N", help="prompts (6; 2 with --quick)")
    parser.add_argument(
        "--only",
        action="append",
        choices=(COPIES, LMKV, *OTHERS),
        help=f"measure this; may be repeated. {COPIES} needs no SGLang; beside servers of others, {LMKV}'s run, too",
    )


def measure(run: BenchmarkRun) -> None:
    """The copies, then every system, one after the other."""
    wanted = set(run.args.only or (QUICK if run.quick else (COPIES, LMKV, *OTHERS)))
    if left_out := {LMKV, *OTHERS} - wanted:
        run.note(f"not measured: {', '.join(sorted(left_out))}")
    run.report.settings |= {
        "prompt_tokens": PROMPT_TOKENS,
        "page_tokens": PAGE_TOKENS,
        "dtype": engines.EXACT_DTYPE,
    }
    if COPIES in wanted:
        if importlib.util.find_spec("sglang") is not None:
            install_shims()
        from benchmarks.systems import sglang_copies  # imports SGLang, if it is installed

        sglang_copies.measure(run, PROMPT_TOKENS, PAGE_TOKENS)
    if wanted != {COPIES}:
        measure_servers(run, wanted)


def measure_servers(run: BenchmarkRun, wanted: Collection[str]) -> None:
    """The TTFT of each of these systems. Raises `LmkvError` if there is no SGLang, or lmkv cannot be measured."""
    if importlib.util.find_spec("sglang") is None:
        raise LmkvError("SGLang is not installed: run `make setup-sglang`, then .venv-sglang/bin/python")
    run.report.settings["sglang"] = metadata.version("sglang")
    source = engines.Prompts(seed=21)
    warm_up = source.make(2 * PAGE_TOKENS)
    prompts = [source.make(PROMPT_TOKENS) for _ in range(run.args.rounds or (2 if run.quick else 6))]
    plan = ServerPlan(
        run=run,
        model=engines.model_of(run),
        prompt_count=len(prompts),
        prompt_tokens=PROMPT_TOKENS,
        warm_up_tokens=len(warm_up),
    )
    answers = Answers()
    found: dict[str, HitTimes] = {}
    for name, open_pair in systems(run, wanted).items():
        try:
            with open_pair(plan) as pair:
                others = pair.others if LINKER in wanted else {}
                found |= measure_pair(run, name, replace(pair, others=others), warm_up, prompts, answers)
        except LmkvError as error:
            if name == LMKV:
                raise
            run.note(f"{name} could not be measured: {error}")
    run.add(*rows_of(found))
    run.add(Row(name="sglang_identical", value=100 * answers.same_count / answers.count, unit="% of answers"))
    engines.check_identical(run, "misses and hits of all systems", answers.same_count, answers.count)


def systems(
    run: BenchmarkRun, wanted: Collection[str]
) -> dict[str, Callable[[ServerPlan], AbstractContextManager[ServerPair]]]:
    """The systems that can be measured, by the name of their rows; lmkv first."""
    found: dict[str, Callable[[ServerPlan], AbstractContextManager[ServerPair]]] = {
        LMKV: lmkv_servers,
        FILE: file_servers,
        MOONCAKE: mooncake_servers,
        PLAIN: plain_servers,
    }
    if mooncake_folder() is None:
        run.note("Mooncake's store was not measured: mooncake-transfer-engine-non-cuda is not installed")
        del found[MOONCAKE]
    return {name: system for name, system in found.items() if name == LMKV or name in wanted}


def measure_pair(
    run: BenchmarkRun, name: str, pair: ServerPair, warm_up: Sequence[int], prompts: Prompts, answers: Answers
) -> dict[str, HitTimes]:
    """Times of one system, and of its other ways to load."""
    times = HitTimes()
    found = {name: times}
    has_storage = pair.second is not None
    with ExitStack() as running:

        def ask(server: SglangProcess, case: str, into: HitTimes) -> None:
            into.seconds[case] = [ask_one(server, prompt, answers, is_hit=case != "cold") for prompt in prompts]
            run.say(f"{server.name}, {case}: {into.median_ms(case):.0f} ms")

        def start(server: SglangProcess) -> SglangProcess:
            run.say(f"{server.name}: starting; half a minute or more")
            running.enter_context(server)
            server.stream(warm_up, OUTPUT_TOKENS)
            return server

        first = start(pair.first)
        ask(first, "cold", times)
        ask(first, "device", times)
        if has_storage:
            pair.wait_until_stored(prompts)
            first.flush()
            ask(first, "own", times)
        if pair.second is not None and (name == LMKV or not run.quick):
            if not pair.first_serves_second:
                running.close()
            ask(start(pair.second), "peer", times)
        running.close()
        for other, server in pair.others.items():
            found[other] = HitTimes()
            start(server)
            ask(server, "own", found[other])
            ask(server, "device", found[other])
            running.close()
    return found


def ask_one(server: SglangProcess, prompt: Sequence[int], answers: Answers, *, is_hit: bool) -> float:
    """The TTFT of one prompt. Raises `LmkvError` if a hit is none, or a miss is one."""
    answer = server.stream(prompt, OUTPUT_TOKENS)
    expected = len(prompt) // PAGE_TOKENS * PAGE_TOKENS if is_hit else 0
    if answer.cached_tokens != expected:
        raise LmkvError(f"{server.name}: {answer.cached_tokens} of {len(prompt)} tokens were cached, not {expected}")
    answers.add(prompt, answer.token_ids)
    return answer.seconds


def rows_of(found: Mapping[str, HitTimes]) -> list[Row]:
    """The medians of each system: of lmkv beside its misses, of the others beside lmkv."""
    lmkv = found[LMKV]
    rows = [Row(name="sglang_lmkv_cold_ms", value=lmkv.median_ms("cold"), unit="ms")]
    rows += [
        compare(f"sglang_lmkv_{case}_ms", lmkv.median_ms(case), "ms", "a miss", lmkv.median_ms("cold"))
        for case in HITS
        if case in lmkv.seconds
    ]
    rows += [Row(name=f"sglang_lmkv_{case}_added_ms", value=lmkv.added_ms(case), unit="ms") for case in HITS[1:]]
    for name, times in found.items():
        if name == LMKV:
            continue
        for case in times.seconds:
            rows.append(compare(f"sglang_{name}_{case}_ms", times.median_ms(case), "ms", LMKV, lmkv.median_ms(case)))
        for case in HITS[1:]:
            if case in times.seconds:
                rows.append(
                    compare(f"sglang_{name}_{case}_added_ms", times.added_ms(case), "ms", LMKV, lmkv.added_ms(case))
                )
    return rows


BENCHMARK = Benchmark(
    name="sglang",
    description="Measures hits of SGLang in lmkv, beside its own file backend and Mooncake's store.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
