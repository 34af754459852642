"""lmkv beside other systems that share prompts: `python -m benchmarks.rivals`, docs/performance/rivals.md.

The systems run one after the other, with the same engines, prompts and chunk size, and are compared with what lmkv did
in the same run. What each costs where it saves nothing shows in its cold runs and in what it burns while idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks.support import engines, machine
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems.pairs import (
    EnginePair,
    PairPlan,
    lmcache_pair,
    lmcache_problem,
    lmkv_pair,
    nixl_problem,
    offloading_pair,
)
from lmkv.errors import LmkvError
from lmkv_client.demo.process import session_pids

OUTPUT_TOKENS = 4
LENGTHS = (2049, 4097)
"""One token behind the last whole chunk: lmkv's partial chunks save nothing that others would compute."""
SETTLE_SECONDS = 1.0
IDLE_SECONDS = 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--rounds", type=int, metavar="N", help="prompts of each length (5; 2 with --quick)")
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")


def measure(run: BenchmarkRun) -> None:
    """Every system that is there."""
    dtype = engines.choose_dtype(run)
    lengths = LENGTHS[:1] if run.quick else LENGTHS
    plan = PairPlan(run=run, model=engines.model_of(run), context_tokens=engines.context_for(lengths[-1]), dtype=dtype)
    engines.check_memory(2 * (engines.ENGINE_BYTES + plan.pool_bytes + 3 * plan.pool_bytes // 5))
    for name, open_pair in systems(run, plan).items():
        run.say(f"{name}: starting two engines, {dtype}; half a minute or more")
        try:
            with open_pair() as pair:
                measure_pair(run, name, pair, lengths)
        except LmkvError as error:
            if name == "lmkv":
                raise
            run.note(f"{name} could not be measured: {error}")


def systems(run: BenchmarkRun, plan: PairPlan) -> dict[str, Callable[[], AbstractContextManager[EnginePair]]]:
    """The systems that can be measured, by the name that their rows begin with."""
    found: dict[str, Callable[[], AbstractContextManager[EnginePair]]] = {"lmkv": partial(lmkv_pair, plan)}
    if problem := nixl_problem():
        run.note(problem)
    else:
        found["vllm_offloading"] = partial(offloading_pair, plan)
    python: Path | None = run.args.lmcache_python
    if problem := lmcache_problem(python):
        run.note(problem)
    elif python:
        found["lmcache"] = partial(lmcache_pair, plan, python.absolute())
    if run.quick and len(found) > 2:  # three pairs of engines do not start in three minutes
        run.note("vLLM's p2p tier was not measured: --quick leaves it out where there is LMCache")
        del found["vllm_offloading"]
    return found


def measure_pair(run: BenchmarkRun, name: str, pair: EnginePair, lengths: Sequence[int]) -> None:
    """Adds rows for one system. The first one measured is lmkv, with which the others are compared."""
    prompts = Prompts(seed=4)
    ask(pair, prompts.make(2 * engines.CHUNK_SIZE + engines.BLOCK_SIZE))  # warms up
    for token_count in lengths:
        rounds = []
        for number in range(run.args.rounds or (2 if run.quick else 5)):
            rounds.append(ask(pair, prompts.make(token_count)))
            words = ", ".join(f"{1e3 * seconds:.0f} ms {what}" for what, seconds in rounds[-1].items())
            run.say(f"{name}, {token_count} tokens, {number + 1}: {words}")
        for what in rounds[0]:
            median_ms = 1e3 * statistics.median(round_[what] for round_ in rounds)
            add_row(run, name, f"{what}_ms_{token_count}", median_ms, "ms")
    add_row(run, name, "idle_cpu_percent", idle_cpu_percent(pair), "% of a core")


def add_row(run: BenchmarkRun, name: str, what: str, value: float, unit: str) -> None:
    """Adds a row of one system, beside lmkv's if that is another."""
    lmkv = next((row.value for row in run.report.rows if row.name == f"lmkv_{what}"), None)
    if lmkv is None:
        run.add(Row(name=f"{name}_{what}", value=value, unit=unit))
    else:
        run.add(compare(f"{name}_{what}", value, unit, "lmkv", lmkv))


def idle_cpu_percent(pair: EnginePair) -> float:
    """Processor time of all processes of both engines without requests."""
    pids = [*session_pids(pair.first.pid), *session_pids(pair.second.pid), *pair.other_pids()]
    time.sleep(SETTLE_SECONDS)
    before, started = machine.cpu_seconds(pids), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    return 100 * (machine.cpu_seconds(pids) - before) / (time.perf_counter() - started)


def ask(pair: EnginePair, prompt: Sequence[int]) -> dict[str, float]:
    """TTFT in seconds of one prompt: cold, from the peer, from the own pool. Raises `LmkvError` if a hit is none."""
    held = engines.full_chunks(len(prompt))
    cold = pair.first.complete(prompt, OUTPUT_TOKENS)
    pair.wait_until_stored(prompt)
    peer = pair.second.complete(prompt, OUTPUT_TOKENS, extra=pair.direction())
    engines.check_hit("from the peer", peer, held - 1)
    pair.first.reset_prefix_cache()
    own = pair.first.complete(prompt, OUTPUT_TOKENS)
    engines.check_hit("from the own pool", own, held - 1)
    if not cold.token_ids == own.token_ids == peer.token_ids and "float32" in pair.first.command:
        raise LmkvError("the completions of one prompt differ")
    return {"cold": cold.ttft_seconds, "own": own.ttft_seconds, "peer": peer.ttft_seconds}


BENCHMARK = Benchmark(
    name="rivals",
    description="Measures lmkv beside vLLM's own offloading and, if it is there, LMCache.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
