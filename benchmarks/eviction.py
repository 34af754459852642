"""What each policy of eviction keeps, by the tokens that requests find: `python -m benchmarks.eviction`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.replay.files import TRACE_HELP, read_trace, trace_name
from benchmarks.replay.optimal import optimal
from benchmarks.replay.policies import Gdsf, S3Fifo, Sieve, TwoQueues
from benchmarks.replay.traces import CHUNK_TOKENS, TRACES, Trace, found_tokens
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import POLICIES, EvictionPolicy, EvictionQueue

BASELINE = "lru"
OPTIMAL = "opt"
CANDIDATES: Mapping[str, Callable[[], EvictionPolicy]] = {
    **POLICIES,
    "s3_fifo": S3Fifo,
    "two_queues": TwoQueues,
    "sieve": Sieve,
    "gdsf": Gdsf,
}
POOLS = (500_000, 2_000_000, 8_000_000)
"""Tokens that a pool holds. 2 million are 256 GB of a model with 128 KiB a token."""
QUICK_SCALE = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help=TRACE_HELP + ", instead of the synthetic ones; may be repeated",
    )
    parser.add_argument(
        "--pool-tokens", type=int, nargs="+", default=POOLS, metavar="N", help="sizes of the pool, in tokens"
    )


def measure(run: BenchmarkRun) -> None:
    """Replays each trace with each policy in pools of several sizes."""
    seconds, chunk_count = dict.fromkeys(CANDIDATES, 0.0), 0
    for name, trace in _traces(run):
        requests = trace.requests
        token_count = sum(request.token_count for request in requests)
        distinct = len({key for request in requests for key in request.stored}) * trace.chunk_tokens
        run.add(Row(name=f"{name}_unbounded", value=optimal(trace, distinct), unit="%"))
        run.say(
            f"{name}: {len(requests)} requests of {token_count / len(requests):.0f} tokens, "
            f"chunks of {trace.chunk_tokens}"
        )
        for tokens in run.args.pool_tokens:
            if tokens >= distinct:
                continue
            found = {}
            chunk_count += sum(len(request.stored) for request in requests)
            for policy in CANDIDATES:
                started = time.process_time()
                found[policy] = replay(trace, policy, tokens)
                seconds[policy] += time.process_time() - started
            found[OPTIMAL] = optimal(trace, tokens)
            for policy, value in found.items():
                if policy != BASELINE:
                    run.add(_row(f"{name}_{size_name(tokens)}_{policy}", value, found[BASELINE]))
            values = ", ".join(f"{policy} {value:.1f} %" for policy, value in found.items())
            run.say(f"{name}, {size_name(tokens)}: {values}")
    for policy in CANDIDATES if chunk_count else ():
        each, baseline = (1e6 * seconds[one] / chunk_count for one in (policy, BASELINE))
        if policy != BASELINE:
            run.add(compare(f"replay_cpu_us_{policy}", each, "µs", BASELINE, baseline))


def _traces(run: BenchmarkRun) -> Iterator[tuple[str, Trace]]:
    if run.args.trace:
        for file in run.args.trace:
            yield trace_name(file), read_trace(file)
        return
    for name, make in TRACES.items():
        yield name, Trace(requests=make(QUICK_SCALE if run.quick else 1.0), chunk_tokens=CHUNK_TOKENS)


def size_name(token_count: int) -> str:
    """A number of tokens in the name of a row: 500k, 2m, 1500k."""
    for divisor, suffix in ((1_000_000, "m"), (1_000, "k")):
        if token_count % divisor == 0:
            return f"{token_count // divisor}{suffix}"
    return str(token_count)


def _row(name: str, found: float, baseline: float) -> Row:
    if baseline:
        return compare(name, found, "%", BASELINE, baseline)
    return Row(name=name, value=found, unit="%", baseline=BASELINE, baseline_value=0.0)


def replay(trace: Trace, policy: str, pool_tokens: int) -> float:
    """The percentage of all prompts' tokens that was found in a pool of this size."""
    queue = EvictionQueue(CANDIDATES[policy]())
    capacity = pool_tokens // trace.chunk_tokens
    found = asked = 0
    for request in trace.requests:
        held = list(itertools.takewhile(queue.__contains__, request.keys))
        queue.use(held, request.keys[len(held) :])
        found += found_tokens(trace, request, len(held))
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
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
