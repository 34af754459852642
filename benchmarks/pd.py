"""Prefill and decode in two engines, by lmkv and by others: `python -m benchmarks.pd`, docs/performance/pd.md.

All systems are up at once and take each prompt in turns. Engines that poll for as long as they live are frozen while
they have nothing to do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.support import clients, engines, timing
from benchmarks.support.clients import Measured
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems.pairs import PairPlan, lmcache_problem, nixl_problem
from benchmarks.systems.prefill_decode import (
    PROMPTS_IN_CACHE,
    STEP_TOKENS,
    Ask,
    System,
    TimedResponse,
    lmcache_system,
    lmkv_fan_in,
    lmkv_system,
    nixl_fan_in,
    nixl_system,
    one_engine,
    thawed,
)
from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion

NAMED_TOKENS = 2048
"""The prompt length of rows without a length in their name: computed in one step, then transferred."""
LENGTHS = (NAMED_TOKENS, 2 * STEP_TOKENS)
"""The longer prompt takes two steps: the first half is transferred while the second is computed."""
WARM_UP_TOKENS = (512, 1024)
TIMES = ("ttft", "second_token", "itl", "total")
STEP_ROUNDS = 3
ABORTED_REQUESTS = 100
ABORTED_PROMPT_TOKENS = 512
LMKV, ONE, NIXL = "lmkv", "one_engine", "nixlconnector"
NAMES = {ONE: "one engine", NIXL: "NixlConnector", "lmcache": "LMCache"}
"""What lmkv is compared with, in the order of rows."""

PREFILLS, CLIENTS, FAN_IN_PROMPTS = 2, 16, 48
FAN_IN_TOKENS, FAN_IN_ANSWER = 1024, 16
"""Prompts that some prefill engines compute for one decode engine."""
PARTS = ("pair", "fan_in")

Round = Mapping[str, TimedResponse]
"""What each system answered to one prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--rounds", type=int, metavar="N", help="prompts of each length (4; 1 with --quick)")
    parser.add_argument("--only", choices=PARTS, help="one client and pairs of engines, or 16 clients and two prefills")
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")


def measure(run: BenchmarkRun) -> None:
    """Every system that is there."""
    dtype = engines.choose_dtype(run, compares_answers=True)
    if run.args.only != "fan_in":
        measure_pairs(run, dtype)
    if run.args.only == "fan_in" or not (run.args.only or run.quick):
        measure_fan_in(run, dtype)


def measure_fan_in(run: BenchmarkRun, dtype: str) -> None:
    """Adds rows for several clients of two prefill engines and one decode engine, by lmkv and by `NixlConnector`."""
    prompts = Prompts(seed=12)
    plan = PairPlan(
        run=run,
        model=engines.model_of(run),
        context_tokens=engines.context_for(FAN_IN_TOKENS, FAN_IN_ANSWER),
        dtype=dtype,
        prompts_in_pool=2 * CLIENTS,
        prompts_in_cache=CLIENTS,
    )
    engines.check_memory((PREFILLS + 1) * (engines.ENGINE_BYTES + 3 * plan.pool_bytes // 2))
    warm = [prompts.make(WARM_UP_TOKENS[0]) for _ in range(2 * PREFILLS)]
    asked = [prompts.make(FAN_IN_TOKENS) for _ in range(CLIENTS if run.quick else FAN_IN_PROMPTS)]
    systems = {NIXL: nixl_fan_in, LMKV: lmkv_fan_in}
    if problem := nixl_problem():
        run.note(problem)
        del systems[NIXL]
    found: dict[str, Measured] = {}
    for name, start in systems.items():
        run.say(f"starting {PREFILLS + 1} engines for {CLIENTS} clients, {name}, {dtype}; a minute or more")
        with start(plan, PREFILLS) as ask:
            complete = partial(_complete, ask)
            clients.closed_loop(complete, warm, PREFILLS)
            found[name] = clients.closed_loop(complete, asked, CLIENTS)
        other = found.get(NIXL) if name == LMKV else None
        run.add(*found[name].rows(f"pd_fan_in_{name}_c{CLIENTS}", NAMES[NIXL], other))
    if NIXL in found:
        same = round(found[LMKV].identical_to(found[NIXL]) * len(asked) / 100)
        engines.check_identical(run, f"{CLIENTS} clients, both systems", same, len(asked))


def _complete(ask: Ask, prompt: Sequence[int]) -> Completion:
    return ask(prompt, FAN_IN_ANSWER)


def measure_pairs(run: BenchmarkRun, dtype: str) -> None:
    """Adds rows for one client of a prefill and a decode engine, by every system that is there."""
    lengths = LENGTHS[:1] if run.quick else LENGTHS
    token_count = 8 if run.quick else 32
    plan = PairPlan(run=run, model=engines.model_of(run), context_tokens=engines.context_for(max(lengths)), dtype=dtype)
    with ExitStack() as stack:
        systems = {name: stack.enter_context(start()) for name, start in starts(run, plan).items()}
        prompts = Prompts(seed=5)
        for length in WARM_UP_TOKENS[: 1 if run.quick else None]:
            ask_all(systems, prompts.make(length), token_count)
        for length in lengths:
            measure_length(run, systems, [prompts.make(length) for _ in range(round_count(run))], token_count)
        run.say("stopping everything")
    if not run.quick:
        measure_small_buffer(run, plan, prompts, token_count)


def starts(run: BenchmarkRun, plan: PairPlan) -> dict[str, Callable[[], AbstractContextManager[System]]]:
    """The systems that can be measured, by the name that rows have for them, lmkv and one engine first."""
    prompt_bytes = plan.context_tokens * engines.token_bytes(plan.dtype)
    pair_bytes = 2 * (engines.ENGINE_BYTES + PROMPTS_IN_CACHE * prompt_bytes)
    needed_bytes = pair_bytes // 2 + pair_bytes + 2 * plan.pool_bytes
    found: dict[str, Callable[[], AbstractContextManager[System]]] = {
        ONE: partial(one_engine, plan),
        LMKV: partial(lmkv_system, plan),
    }
    if problem := nixl_problem():
        run.note(problem)
    else:
        found[NIXL] = partial(nixl_system, plan)
        needed_bytes += pair_bytes
    python: Path | None = run.args.lmcache_python
    if run.quick:  # not even five engines start in three minutes
        del found[ONE]
        run.note("one engine and LMCache were not measured: --quick leaves them out")
    elif problem := lmcache_problem(python):
        run.note(problem)
    elif python:
        found["lmcache"] = partial(lmcache_system, plan, python.absolute())
        needed_bytes += pair_bytes + 2 * PROMPTS_IN_CACHE * prompt_bytes
    engines.check_memory(needed_bytes)
    run.say(f"starting {', '.join(found)}, {plan.dtype}; a minute or more")
    return found


def round_count(run: BenchmarkRun) -> int:
    """Prompts of each length."""
    rounds: int | None = run.args.rounds
    return rounds or (1 if run.quick else 4)


def measure_length(
    run: BenchmarkRun, systems: Mapping[str, System], prompts: Sequence[Sequence[int]], token_count: int
) -> None:
    """Adds rows for prompts of one length."""
    length = len(prompts[0])
    suffix = "" if length == NAMED_TOKENS else f"_{length}"
    calls = systems[LMKV].calls
    assert calls
    before = calls.counts()
    rounds = []
    for number, prompt in enumerate(prompts):
        order = list(systems.items())
        rounds.append(ask_all(dict(order if number % 2 else reversed(order)), prompt, token_count))
        words = ", ".join(in_words(name, rounds[-1][name]) for name in systems)
        run.say(f"{length} tokens, {number + 1} of {len(prompts)}: {words}")
    counts = calls.counts() - before
    run.add(*rows_of(rounds, suffix), *counts.rows(len(rounds), suffix))
    engines.check_identical(run, f"{length} tokens, all systems", identical_count(rounds), len(rounds))
    run.note(f"RPCs between the nodes for each prompt of {length} tokens: {counts.in_words(len(rounds))}")


def measure_small_buffer(run: BenchmarkRun, plan: PairPlan, prompts: Prompts, token_count: int) -> None:
    """Adds rows for prompts that follow clients who left before their handoff was loaded.

    The buffer holds two prompts; handoffs that stayed in it would leave no room for the prompts that follow.
    """
    buffer_bytes = 2 * NAMED_TOKENS * engines.token_bytes(plan.dtype)
    with one_engine(plan) as one, lmkv_system(plan, buffer_bytes) as lmkv:
        systems = {ONE: one, LMKV: lmkv}
        ask_all(systems, prompts.make(WARM_UP_TOKENS[0]), token_count)
        assert lmkv.abort
        for number in range(ABORTED_REQUESTS):
            lmkv.abort(prompts.make(ABORTED_PROMPT_TOKENS))
            if number % 20 == 19:
                run.say(f"{number + 1} of {ABORTED_REQUESTS} clients left after their first token")
        rounds = [ask_all(systems, prompts.make(NAMED_TOKENS), token_count) for _ in range(round_count(run))]
    engines.check_identical(run, "after clients that left, small buffer", identical_count(rounds), len(rounds))
    for what in ("ttft", "total"):
        mine, theirs = values(rounds, LMKV, what), values(rounds, ONE, what)
        row = compare(f"pd_{what}_after_aborts", median_ms(mine), "ms", NAMES[ONE], median_ms(theirs))
        run.add(replace(row, ratio=timing.median_ratio(mine, theirs)))


def ask_all(systems: Mapping[str, System], prompt: Sequence[int], token_count: int) -> dict[str, TimedResponse]:
    """What each system answers, in this order. Raises `LmkvError` if an answer is not complete."""
    answers = {}
    for name, system in systems.items():
        answer = system.ask(prompt, token_count)
        if len(answer.token_ids) != token_count:
            raise LmkvError(f"{name} answered with {len(answer.token_ids)} tokens instead of {token_count}")
        answers[name] = (
            replace(answer, step=step_seconds(system, prompt, answer, token_count)) if answer.seam else answer
        )
    return answers


def step_seconds(system: System, prompt: Sequence[int], answer: TimedResponse, token_count: int) -> float:
    """TTFT at the decode engine of prompt and first token, when it has the whole prompt in its pages.

    The engine continues as it did: where processors are few, its next step delays a token on the way to the client.
    """
    seconds = []
    with thawed([system.decode] if system.is_frozen else []):
        for _ in range(STEP_ROUNDS):
            again = system.decode.complete([*prompt, answer.token_ids[0]], token_count - 1)
            engines.check_hit("from the decode's prefix cache", again, len(prompt))
            seconds.append(again.ttft_seconds)
    return statistics.median(seconds)


def rows_of(rounds: Sequence[Round], suffix: str) -> Iterator[Row]:
    """What the rounds of one length say."""
    others = [name for name in NAMES if name in rounds[0]]
    for what in TIMES:
        mine = values(rounds, LMKV, what)
        for other in others:
            theirs = values(rounds, other, what)
            yield replace(
                compare(f"pd_{what}_vs_{other}{suffix}", median_ms(mine), "ms", NAMES[other], median_ms(theirs)),
                ratio=timing.median_ratio(mine, theirs),
            )
    transfer = values(rounds, LMKV, "transfer")
    shares = [100 * one / ttft for one, ttft in zip(transfer, values(rounds, LMKV, "ttft"), strict=True)]
    yield Row(name=f"pd_transfer_share_of_ttft{suffix}", value=statistics.median(shares), unit="%")
    for other in (name for name in others if name != ONE):  # a difference of times may be nothing: no ratio
        yield Row(
            name=f"pd_transfer_vs_{other}{suffix}",
            value=median_ms(transfer),
            unit="ms",
            baseline=NAMES[other],
            baseline_value=median_ms(values(rounds, other, "transfer")),
        )
    seam, step = values(rounds, LMKV, "seam"), values(rounds, LMKV, "step")
    yield replace(
        compare(f"pd_seam_ms{suffix}", median_ms(seam), "ms", "the same at the decode engine again", median_ms(step)),
        ratio=timing.median_ratio(seam, step),
    )
    yield Row(name=f"pd_identical{suffix}", value=100 * identical_count(rounds) / len(rounds), unit="%")


def identical_count(rounds: Sequence[Round]) -> int:
    """The number of prompts that all systems completed alike."""
    return sum(len({answer.token_ids for answer in round_.values()}) == 1 for round_ in rounds)


def values(rounds: Sequence[Round], system: str, what: str) -> list[float]:
    """One of an answer's times, in seconds, of each round."""
    return [getattr(round_[system], what) for round_ in rounds]


def median_ms(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(seconds)


def in_words(name: str, answer: TimedResponse) -> str:
    """An answer's times, for the progress."""
    words = f"{name} {1e3 * answer.ttft:.0f} + {1e3 * (answer.second_token - answer.ttft):.0f} ms"
    return f"{words} (transfer {1e3 * answer.transfer:.0f})" if answer.seam else words


BENCHMARK = Benchmark(
    name="pd",
    description="Measures disaggregated prefill, compared with one engine and other systems' P/D.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
