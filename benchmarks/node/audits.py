"""Measures what audits cost: the same hits at engines that audit none of them, one in a thousand, and each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.node.misses import IN_FLIGHT, OUTPUT_TOKENS, Meter
from benchmarks.support import machine
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import compare
from lmkv_client.demo.cluster import Cluster
from tests.waiting import wait_until

DEFAULT, NONE, ALL = "audits-default", "audits-none", "audits-all"
"""Names of the engines."""
SETTINGS = {DEFAULT: {}, NONE: {"LMKV_AUDIT_RATE": "0"}, ALL: {"LMKV_AUDIT_RATE": "1"}}
PROMPT_TOKENS = 3072
QUICK_PROMPT_TOKENS = 1024
PROMPTS = 4


@dataclass(kw_only=True, slots=True)
class Samples:
    """Measurements of one engine."""

    ttft_seconds: list[float] = field(default_factory=list)
    burst_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of the engine and its node for each burst."""


def measure(run: BenchmarkRun, cluster: Cluster) -> None:
    """Adds the rows. The engines are idle but for what is measured, one of them at a time."""
    token_count, rounds = (QUICK_PROMPT_TOKENS, 4) if run.quick else (PROMPT_TOKENS, 40)
    make = Prompts(seed=4)
    prompts = [make.make(token_count) for _ in range(PROMPTS)]
    meters = {name: Meter(cluster.engines[name], lambda name=name: cluster.node_pids(name)) for name in SETTINGS}  # type: ignore[misc]
    for meter in meters.values():
        _store(meter, prompts)
    samples = {name: Samples() for name in SETTINGS}
    order = list(SETTINGS)
    for number in range(rounds + 1):
        order = [*order[1:], order[0]]
        for name in order:
            found = _hits(meters[name], prompts, number)
            if number:  # the first warms up
                samples[name].ttft_seconds.append(found[0])
                samples[name].burst_seconds.append(found[1])
                samples[name].cpu_seconds.append(found[2])
    tokens = PROMPTS * token_count
    none = samples[NONE]
    for name, rate in ((DEFAULT, "default"), (ALL, "all")):
        one, factor = samples[name], 1e6 / tokens
        run.add(
            compare(f"audit_{rate}_hit_ttft_ms", *_pair(one.ttft_seconds, none.ttft_seconds, 1e3, "ms")),
            compare(f"audit_{rate}_hit_tokens_per_s", *_rates(one.burst_seconds, none.burst_seconds, tokens)),
            compare(f"audit_{rate}_hit_cpu_us_per_token", *_pair(one.cpu_seconds, none.cpu_seconds, factor, "us")),
        )
    audited = meters[DEFAULT].engine.metrics().get("lmkv:audited_tokens_total", 0.0)
    run.note(f"with the default rate {audited:.0f} tokens of {rounds * 2 * tokens:,} were audited")


def _store(meter: Meter, prompts: Sequence[list[int]]) -> None:
    """Has an engine compute prompts, and waits until they are stored."""
    for prompt in prompts:
        meter.engine.complete(prompt, OUTPUT_TOKENS)

    def is_hit(prompt: list[int]) -> bool:
        meter.engine.reset_prefix_cache()
        return meter.engine.complete(prompt, 1).cached_tokens > 0

    for prompt in prompts:
        wait_until(lambda prompt=prompt: is_hit(prompt), "the prompts are stored")  # type: ignore[misc]


def _hits(meter: Meter, prompts: Sequence[list[int]], number: int) -> tuple[float, float, float]:
    """The TTFT of one hit alone; the time of hits of all prompts, some at a time, and its processor time."""
    meter.engine.reset_prefix_cache()
    ttft_seconds = meter.engine.complete(prompts[number % len(prompts)], 1).ttft_seconds
    meter.engine.reset_prefix_cache()
    cpu_before, started = machine.cpu_seconds(meter.pids), time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as clients:
        list(clients.map(lambda prompt: meter.engine.complete(prompt, 1), prompts))
    seconds = time.perf_counter() - started
    return ttft_seconds, seconds, machine.cpu_seconds(meter.pids) - cpu_before


def _pair(ours: list[float], others: list[float], factor: float, unit: str) -> tuple[float, str, str, float]:
    return factor * statistics.median(ours), unit, "audit_rate 0", factor * statistics.median(others)


def _rates(ours: list[float], others: list[float], tokens: int) -> tuple[float, str, str, float]:
    return tokens / statistics.median(ours), "tokens/s", "audit_rate 0", tokens / statistics.median(others)
