"""Coding agents whose sessions do not fit into the caches: `python -m benchmarks.agents`, docs/performance/agents.md.

Requests of all sessions come in the order of their times, one at a time: between two requests of a session, other
sessions take its pages out of the engine's own cache. The memory behind it holds a third of all sessions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.multi_turn import start
from benchmarks.replay.sessions import SYSTEM_TOKENS, AgentRequest, made_sessions, prompt_lengths, traced_sessions
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.support.timing import percentile
from benchmarks.systems import chats, routes
from benchmarks.systems.chats import ALONE, ChatPlan
from lmkv_client.demo.endpoint import Completion, Endpoint

PROMPTS_IN_CACHE = 2
"""The number of prompts of full length that fit into the engine's own cache."""
POOL_SHARE = 1 / 3
"""Memory for chunks, of what all sessions take."""
MAX_TOKENS = 3072
"""Longest prompt of a scaled trace."""
RETAIN_SECONDS = 3600
"""Longer than the benchmark takes."""
HINTED = "lmkv_hints"
"""lmkv, with requests that say whether their sessions wait for a tool or have ended."""
DISK = "lmkv_disk"
"""lmkv, with a disk behind the memory."""
DISK_HINTED = "lmkv_disk_hints"
"""The same, with requests that also have the next session prefetched."""
HINTED_SYSTEMS = (HINTED, DISK_HINTED)
OWN_SYSTEMS = ("lmkv", HINTED, DISK, DISK_HINTED)
POLICIES = ("round_robin", "kv_aware")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The requests of all sessions, the same for every system."""

    requests: Sequence[AgentRequest]
    shared_tokens: int
    """Tokens that every session begins with."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return prompt_lengths(self.requests, self.shared_tokens)

    @property
    def context_tokens(self) -> int:
        """Length of context that the longest prompt needs."""
        return engines.context_for(max(self.lengths), max(request.answer_tokens for request in self.requests))

    @property
    def session_tokens(self) -> int:
        """Tokens of all sessions at their end."""
        last = {request.session: length for request, length in zip(self.requests, self.lengths, strict=True)}
        return sum(last.values())

    @property
    def last_requests(self) -> frozenset[int]:
        """The index of the last request of each session."""
        return frozenset({request.session: at for at, request in enumerate(self.requests)}.values())

    def parts(self) -> tuple[list[int], list[list[int]]]:
        """What every session begins with, and the new tokens of each request."""
        prompts = Prompts(seed=8)
        return prompts.make(self.shared_tokens), [prompts.make(request.new_tokens) for request in self.requests]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="sessions of this trace, as JSON lines, instead of made ones"
    )
    parser.add_argument("--sessions", type=int, metavar="N", help="sessions (24; 4 with --quick)")
    parser.add_argument("--turns", type=int, metavar="N", help="most requests of a session (6; 4 with --quick)")
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")


def measure(run: BenchmarkRun) -> None:
    """One engine with every system that is there, then two engines behind the proxy."""
    args = run.args
    dtype = engines.choose_dtype(run, compares_answers=True)
    counts = args.sessions or (4 if run.quick else 24), args.turns or (4 if run.quick else 6)
    workload = (
        Workload(requests=traced_sessions(args.trace, *counts, MAX_TOKENS), shared_tokens=0)
        if args.trace
        else Workload(requests=made_sessions(*counts), shared_tokens=SYSTEM_TOKENS)
    )
    plan = ChatPlan(
        run=run,
        model=engines.model_of(run),
        dtype=dtype,
        context_tokens=workload.context_tokens,
        chats_in_cache=PROMPTS_IN_CACHE,
        pool_bytes=max(round(POOL_SHARE * workload.session_tokens), 2 * workload.context_tokens)
        * engines.token_bytes(dtype),
    )
    run.report.settings |= {
        "requests": len(workload.requests),
        "sessions": len({request.session for request in workload.requests}),
        "trace": args.trace.name if args.trace else "made",
        "mean_prompt_tokens": round(sum(workload.lengths) / len(workload.requests)),
        "session_tokens": workload.session_tokens,
        "prompts_in_cache": PROMPTS_IN_CACHE,
    }
    cache_bytes = PROMPTS_IN_CACHE * workload.context_tokens * engines.token_bytes(dtype)
    described = chats.systems(run, plan, args.lmcache_python)
    described[HINTED] = partial(chats.lmkv, plan, HINTED)
    disk_bytes = workload.session_tokens * engines.token_bytes(dtype)
    for name in (DISK, DISK_HINTED):
        described[name] = partial(chats.lmkv, plan, name, disk_bytes=disk_bytes)
    count = len(described)
    engines.check_memory(count * (engines.ENGINE_BYTES + cache_bytes) + (count - 1) * plan.pool_bytes)
    with ExitStack() as stack:
        answered = play(run, start(run, stack, described), workload)
        run.add(*rows_of(answered))
    for name in OWN_SYSTEMS:
        engines.check_identical(run, f"{name} and the engine alone", *identical(answered[name], answered[ALONE]))
    if run.quick:
        run.note("two engines behind the proxy were not measured: --quick leaves them out")
        return
    routed = play_routed(run, plan, workload)
    run.add(*rows_of(routed, POLICIES[0]))
    for name, completions in routed.items():
        engines.check_identical(run, f"{name} and the engine alone", *identical(completions, answered[ALONE]))


def play(run: BenchmarkRun, systems: Mapping[str, Endpoint], workload: Workload) -> dict[str, list[Completion]]:
    """All requests, each with every system in turn, in changing order: what else the machine does meets all of them.

    Those to `HINTED_SYSTEMS` have hints.
    """
    last = workload.last_requests
    beginning, parts = workload.parts()
    histories: dict[str, dict[int, list[int]]] = {name: {} for name in systems}
    completions: dict[str, list[Completion]] = {name: [] for name in systems}
    order = list(systems)
    for number, (request, new) in enumerate(zip(workload.requests, parts, strict=True), 1):
        for name in order:
            history = histories[name].setdefault(request.session, list(beginning))
            del history[len(history) if request.kept_tokens is None else request.kept_tokens :]
            history += new
            extra = None
            if name in HINTED_SYSTEMS:
                after = workload.requests[number : number + 1]
                is_other = name == DISK_HINTED and after and after[0].session != request.session
                soon = histories[name].get(after[0].session) if is_other else None
                extra = hints(ends=number - 1 in last, soon=soon)
            completion = systems[name].complete(history, request.answer_tokens, extra=extra)
            history += completion.token_ids
            completions[name].append(completion)
        order.append(order.pop(0))
        if number % 8 == 0 or number == len(parts):
            hits = ", ".join(f"{name} {hit_rate(own):.0f} %" for name, own in completions.items())
            run.say(f"{number} of {len(parts)} requests, hit rates: {hits}")
    return completions


def hints(*, ends: bool, soon: Sequence[int] | None = None) -> dict[str, object]:
    """What a request says of its session, which ends with it or waits for a tool; and that another one, whose tokens so
    far are `soon`, will continue next."""
    actions = [_action("evict") if ends else _action("retain", ttl=RETAIN_SECONDS)]
    if soon:
        actions.append(_action("prefetch", tokens=list(soon)))
    envelope = {"protocol_version": "1.0", "message_id": "", "actions": actions}
    return {"kv_transfer_params": {"lmkv": {"kv_hints": envelope}}}


def _action(kind: str, **payload: object) -> dict[str, object]:
    return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}


def play_routed(run: BenchmarkRun, plan: ChatPlan, workload: Workload) -> dict[str, list[Completion]]:
    """All requests by way of a proxy, with one policy after the other."""
    run.say("starting two engines with a coordinator; half a minute or more")
    found: dict[str, list[Completion]] = {}
    with routes.fleet(plan) as cluster:
        for policy in POLICIES:
            with routes.routed(plan, cluster, policy) as proxy:
                found |= play(run, {policy: proxy}, workload)
    return found


def rows_of(answered: Mapping[str, Sequence[Completion]], baseline: str = ALONE) -> Iterator[Row]:
    """TTFT, hit rate and throughput of each system, beside the baseline, which comes first."""
    others = answered[baseline]
    words = "the engine alone" if baseline == ALONE else baseline
    for name, completions in answered.items():
        for what, unit, value in METRICS:
            own, other = value(completions), value(others)
            if completions is others or not other:
                yield Row(name=f"{name}_{what}", value=own, unit=unit)
            else:
                yield compare(f"{name}_{what}", own, unit, words, other)
        if completions is not others and baseline == ALONE:
            same, count = identical(completions, others)
            yield Row(name=f"{name}_identical", value=100 * same / count, unit="% of answers")


def ttft_ms(percent: float) -> Callable[[Sequence[Completion]], float]:
    """A percentile of the time to the first token."""
    return lambda completions: 1e3 * percentile([completion.ttft_seconds for completion in completions], percent)


def hit_rate(completions: Sequence[Completion]) -> float:
    """Percent of all prompts' tokens that were not computed."""
    cached = sum(completion.cached_tokens for completion in completions)
    return 100 * cached / sum(completion.prompt_tokens for completion in completions)


def tokens_per_second(completions: Sequence[Completion]) -> float:
    """Tokens of prompts and answers, in the time of all requests."""
    tokens = sum(completion.prompt_tokens + len(completion.token_ids) for completion in completions)
    return tokens / sum(completion.total_seconds for completion in completions)


METRICS: Sequence[tuple[str, str, Callable[[Sequence[Completion]], float]]] = (
    ("ttft_p50_ms", "ms", ttft_ms(50)),
    ("ttft_p99_ms", "ms", ttft_ms(99)),
    ("hit_rate", "% of tokens", hit_rate),
    ("tokens_per_s", "tokens/s", tokens_per_second),
)


def identical(completions: Sequence[Completion], others: Sequence[Completion]) -> tuple[int, int]:
    """The number of answers that are the same in both, and the number of all."""
    pairs = zip(completions, others, strict=True)
    return sum(own.token_ids == other.token_ids for own, other in pairs), len(completions)


BENCHMARK = Benchmark(
    name="agents",
    description="Measures sessions of coding agents that neither the engine's cache nor the memory behind it can hold.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
