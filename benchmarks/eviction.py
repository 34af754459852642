"""What each policy of eviction keeps, by the tokens that requests find: `python -m benchmarks.eviction`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.replay.policies import S3Fifo, Sieve, TwoQueues
from benchmarks.replay.traces import CHUNK_TOKENS, TRACES, Request
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import POLICIES, EvictionPolicy, EvictionQueue

BASELINE = "lru"
CANDIDATES: Mapping[str, Callable[[], EvictionPolicy]] = {
    **POLICIES,
    "s3_fifo": S3Fifo,
    "sieve": Sieve,
    "two_queues": TwoQueues,
}
POOLS = {"500k": 500_000, "2m": 2_000_000, "8m": 8_000_000}
"""Tokens that a pool holds. 2 million are 256 GB of a model with 128 KiB a token."""
QUICK_SCALE = 0.1


def measure(run: BenchmarkRun) -> None:
    """Replays each trace with each policy in pools of several sizes."""
    scale = QUICK_SCALE if run.quick else 1.0
    for name, make in TRACES.items():
        trace = make(scale)
        token_count = sum(request.token_count for request in trace)
        distinct = len({key for request in trace for key in request.stored}) * CHUNK_TOKENS
        run.add(Row(name=f"{name}_unbounded", value=replay(trace, BASELINE, distinct), unit="%"))
        run.say(f"{name}: {len(trace)} requests of {token_count / len(trace):.0f} tokens")
        for size, tokens in POOLS.items():
            if tokens >= distinct:
                continue
            found = {policy: replay(trace, policy, tokens) for policy in CANDIDATES}
            for policy in list(CANDIDATES)[1:]:
                run.add(_row(f"{name}_{size}_{policy}", found[policy], found[BASELINE]))
            run.say(f"{name}, {size}: " + ", ".join(f"{policy} {value:.1f} %" for policy, value in found.items()))


def _row(name: str, found: float, baseline: float) -> Row:
    if baseline:
        return compare(name, found, "%", BASELINE, baseline)
    return Row(name=name, value=found, unit="%", baseline=BASELINE, baseline_value=0.0)


def replay(trace: Iterable[Request], policy: str, pool_tokens: int) -> float:
    """The percentage of all prompts' tokens that was found in a pool of this size."""
    queue = EvictionQueue(CANDIDATES[policy]())
    capacity = pool_tokens // CHUNK_TOKENS
    found = asked = 0
    for request in trace:
        held = list(itertools.takewhile(queue.__contains__, request.keys))
        queue.use(held)
        found += len(held) * CHUNK_TOKENS
        asked += request.token_count
        _store(queue, request.stored, capacity)
    return 100 * found / asked


def _store(queue: EvictionQueue, keys: Sequence[ChunkKey], capacity: int) -> None:
    for parent, key in itertools.pairwise((None, *keys)):
        assert key is not None
        if key not in queue:
            if len(queue) == capacity:
                queue.pop()
            queue.add(key, parent)


BENCHMARK = Benchmark(
    name="eviction",
    description="Replays traces of prompts with each policy of eviction, in pools of several sizes.",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
