"""What lmkv costs where it saves nothing: misses and idleness, against the same engine without a connector."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.support import engines, machine, timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import session_pids

PROMPT_TOKENS = 1024
QUICK_PROMPT_TOKENS = 512
OUTPUT_TOKENS = 16
IN_FLIGHT = 2
SHORT_PROMPT_TOKENS = 272
"""One chunk and a little: looked up and stored, and computed as fast as anything that is."""
SETTLE_SECONDS = 0.15
"""Pause after a request whose time is measured: storing its chunks would delay the next one, which may be the other
engine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Some prompts, answered."""

    seconds: float
    cpu_seconds: float
    """Processor time of the engine and its node."""


class Meter:
    """One engine, the processes that belong to it, and their processor time."""

    def __init__(self, engine: EngineProcess, node_pids: Callable[[], list[int]] = list) -> None:
        self.engine = engine
        self.pids = [*session_pids(engine.pid), *node_pids()]

    def burst(self, prompts: list[list[int]]) -> Burst:
        """Has new prompts answered, `IN_FLIGHT` at a time."""
        cpu_before = machine.cpu_seconds(self.pids)
        started = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT) as clients:
            for completion in clients.map(lambda prompt: self.engine.complete(prompt, OUTPUT_TOKENS), prompts):
                engines.check_miss(self.engine.name, completion)
        seconds = time.perf_counter() - started
        return Burst(seconds=seconds, cpu_seconds=machine.cpu_seconds(self.pids) - cpu_before)

    def ttft_seconds(self, prompt: list[int]) -> float:
        """Time to the first token of a new prompt."""
        completion = self.engine.complete(prompt, 1)
        engines.check_miss(self.engine.name, completion)
        time.sleep(SETTLE_SECONDS)
        return completion.ttft_seconds


def measure(run: BenchmarkRun, cluster: Cluster, with_lmkv: EngineProcess, without: EngineProcess) -> None:
    """Adds the rows. Both engines are alive and idle but for what is measured, one of them at a time."""
    ours = Meter(with_lmkv, lambda: cluster.node_pids(with_lmkv.name))
    plain = Meter(without)
    prompts = Prompts(seed=2)
    _measure_misses(run, ours, plain, prompts)
    _measure_ttft(run, ours, plain, prompts)
    _measure_idle(run, ours, plain)


def _measure_misses(run: BenchmarkRun, ours: Meter, plain: Meter, prompts: Prompts) -> None:
    pair_count, prompt_tokens = (5, QUICK_PROMPT_TOKENS) if run.quick else (40, PROMPT_TOKENS)
    bursts: tuple[list[Burst], list[Burst]] = ([], [])
    for number in range(pair_count + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            burst = (ours, plain)[side].burst([prompts.make(prompt_tokens) for _ in range(IN_FLIGHT)])
            if number:  # the first warms up
                bursts[side].append(burst)
    tokens = IN_FLIGHT * (prompt_tokens + OUTPUT_TOKENS)
    seconds = [[burst.seconds for burst in side] for side in bursts]
    rates = [tokens / statistics.median(side) for side in seconds]
    slowdown = timing.median_ratio(*seconds)
    run.say(f"{pair_count} pairs of {IN_FLIGHT} new prompts: {100 * (slowdown - 1):+.2f} % time with lmkv")
    run.add(
        Row(
            name="miss_overhead",
            value=100 * (1 - 1 / slowdown),
            unit="% of throughput",
            baseline="no connector, tokens/s",
            baseline_value=rates[1],
            ratio=1 / slowdown,
        ),
        compare("miss_tokens_per_s", rates[0], "tokens/s", "no connector", rates[1]),
        _cpu_row(bursts, tokens),
    )


def _cpu_row(bursts: Sequence[list[Burst]], tokens: int) -> Row:
    ours, plain = ([1e6 * burst.cpu_seconds / tokens for burst in side] for side in bursts)
    return Row(
        name="miss_cpu_us_per_token",
        value=statistics.median(ours),
        unit="us",
        baseline="no connector",
        baseline_value=statistics.median(plain),
        ratio=timing.median_ratio(ours, plain),
    )


def _measure_ttft(run: BenchmarkRun, ours: Meter, plain: Meter, prompts: Prompts) -> None:
    sides: tuple[list[float], list[float]] = ([], [])
    for number in range(30 if run.quick else 120):
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            sides[side].append((ours, plain)[side].ttft_seconds(prompts.make(SHORT_PROMPT_TOKENS)))
    added = [one - other for one, other in zip(*sides, strict=True)]
    baseline_ms = 1e3 * statistics.median(sides[1])
    run.add(
        Row(
            name="miss_ttft_overhead_ms",
            value=1e3 * statistics.median(added),
            unit="ms",
            baseline="no connector: TTFT",
            baseline_value=baseline_ms,
            ratio=timing.median_ratio(*sides),
        )
    )


def _measure_idle(run: BenchmarkRun, ours: Meter, plain: Meter) -> None:
    seconds = 4.0 if run.quick else 30.0
    time.sleep(1.0)  # what the last requests left to do
    before = [machine.cpu_seconds(meter.pids) for meter in (ours, plain)]
    started = time.perf_counter()
    time.sleep(seconds)
    after = [machine.cpu_seconds(meter.pids) for meter in (ours, plain)]
    passed = time.perf_counter() - started
    our_percent, plain_percent = (100 * (one - other) / passed for one, other in zip(after, before, strict=True))
    run.add(
        Row(
            name="idle_cpu_percent",
            value=our_percent - plain_percent,
            unit="% of a core",
            baseline="idle engine without a connector",
            baseline_value=plain_percent,
        )
    )
