"""What a prefetch saves before a session's next turn: `python -m benchmarks.prefetch`, docs/performance/prefetch.md.

A prompt's chunks have left the engine's pool, as they do while an agent's tool runs: they are on disk, in a remote
store, or in a peer's pool. The next request comes without a prefetch, and once more after one. The baseline is a hit in
the pool. Prompts are whole chunks and one token, so that every case computes the same single token.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import valkey

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.redis import RedisProcess
from benchmarks.support.rows import Row, compare
from lmkv.errors import LmkvError
from lmkv.v1.chunk_pb2 import TIER_DISK
from lmkv_client.demo.cluster import Cluster, CoordinatorProcess
from lmkv_client.demo.completion import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.sync import Coordinator

HELD_CHUNKS = 16
HELD_TOKENS = HELD_CHUNKS * engines.CHUNK_SIZE
OUTPUT_TOKENS = 4
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.002
"""Between two looks at an instance: the resolution of `prefetch_..._ms`."""


@dataclass(kw_only=True)
class Times:
    """TTFT in seconds of the prompts that one kind of source held."""

    own: list[float] = field(default_factory=list)
    """The pool held them."""
    without: list[float] = field(default_factory=list)
    """Only the source did."""
    after: list[float] = field(default_factory=list)
    """Only the source did, before a prefetch."""
    prefetch: list[float] = field(default_factory=list)
    """From the hint until the pool held them: no TTFT."""
    different_count: int = 0
    """Prompts whose completions were not all equal."""


class Pause:
    """An engine whose pool gives a prompt's chunks away, and gets them back."""

    def __init__(self, engine: EngineProcess, coordinator: Coordinator) -> None:
        self.engine = engine
        self._coordinator = coordinator

    def ask(self, prompt: Sequence[int]) -> Completion:
        """The completion of a prompt, of which the engine's own cache holds nothing. Raises `LmkvError` if lmkv did
        not hold it either."""
        self.engine.reset_prefix_cache()
        completion = self.engine.complete(prompt, OUTPUT_TOKENS)
        engines.check_hit(self.engine.name, completion, HELD_TOKENS)
        return completion

    def evict(self, prompt: Sequence[int]) -> None:
        """Removes a prompt from the pool."""
        self._hint("evict", prompt)
        wait_until(lambda: self._hint("share", prompt) == 0, f"{self.engine.name} has evicted a prompt")

    def prefetch(self, prompt: Sequence[int]) -> float:
        """Brings a prompt into the pool; the seconds it took."""
        start = time.perf_counter()
        self._hint("prefetch", prompt)
        wait_until(lambda: self._hint("share", prompt) == HELD_CHUNKS, f"{self.engine.name} has prefetched a prompt")
        return time.perf_counter() - start

    def _hint(self, action: str, prompt: Sequence[int]) -> int:
        """The number of chunks that a hint covers; `share` covers what the pool holds, and changes little."""
        hinted = self._coordinator.hint(action, prompt[:HELD_TOKENS], instance=self.engine.name)
        return int(hinted.result.chunk_count)

    def measure(self, prompt: Sequence[int], first: Completion, times: Times) -> None:
        """Measures one prompt, whose chunks the source holds; `first` is its completion without a hit."""
        completions = [first]
        for seconds, prepare in (
            (times.without, self.evict),
            (times.own, lambda _: None),
            (times.after, lambda prompt: times.prefetch.append(self._after_pause(prompt))),
        ):
            prepare(prompt)
            completions.append(self.ask(prompt))
            seconds.append(completions[-1].ttft_seconds)
        times.different_count += len({one.token_ids for one in completions}) > 1

    def _after_pause(self, prompt: Sequence[int]) -> float:
        self.evict(prompt)
        return self.prefetch(prompt)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Waits until something holds. Raises `LmkvError` on timeout."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise LmkvError(f"after {WAIT_SECONDS:.0f} s it is still not so that {what}")
        time.sleep(POLL_SECONDS)


def measure(run: BenchmarkRun) -> None:
    """Every source, one after the other: disk, remote store, peer."""
    dtype = engines.choose_dtype(run, compares_answers=True)
    count = 3 if run.quick else 9
    run.report.settings |= {"prompt_tokens": HELD_TOKENS + 1, "prompts": count}
    context_tokens = engines.context_for(HELD_TOKENS + 1)
    pool_bytes = (count + 3) * context_tokens * engines.token_bytes(dtype)
    engines.check_memory(3 * (engines.ENGINE_BYTES + pool_bytes))
    stored: dict[str, Callable[[], int]] = {}
    with ExitStack() as stack:
        settings = engines.PATIENCE | engines.pool_setting(pool_bytes) | {"LMKV_SAVE_PARTIAL_CHUNKS": "false"}
        own: dict[str, dict[str, str]] = {
            "disk": {"LMKV_LOCAL_DISK": str(run.folder / "disk"), "LMKV_MAX_LOCAL_DISK_SIZE": f"{pool_bytes >> 20}MiB"},
            "peer": {},
        }
        if shutil.which("redis-server"):
            redis = stack.enter_context(RedisProcess(run.logs))
            own["remote"] = {"LMKV_REMOTE_URL": redis.url}
            stored["remote"] = stack.enter_context(valkey.Valkey.from_url(redis.url)).dbsize
        else:
            run.note("no remote store was measured: redis-server is not installed")
        cluster = stack.enter_context(Cluster(run.folder, engines.model_of(run), logs=run.logs, settings=settings))
        for name, more in own.items():
            cluster.add_engine(name, more, **engines.options(dtype, context_tokens))
        run.say(f"starting {len(own)} engines, {dtype}; half a minute or more")
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        coordinator = cluster.coordinator
        assert coordinator is not None
        stored["disk"] = lambda: disk_chunks(coordinator, "disk")
        client = stack.enter_context(Coordinator(coordinator.address))
        pauses = {name: Pause(cluster.engines[name], client) for name in own}
        prompts = Prompts(seed=3)
        measure_source(coordinator, pauses, "disk", stored, [prompts.make(HELD_TOKENS + 1)])  # warms up
        for source in own:
            run.say(f"{source}: {count} prompts of {HELD_TOKENS + 1} tokens")
            sent = [prompts.make(HELD_TOKENS + 1) for _ in range(count)]
            times = measure_source(coordinator, pauses, source, stored, sent)
            run.add(*rows_of(source, times))
            engines.check_identical(run, source, count - times.different_count, count)


def measure_source(
    coordinator: CoordinatorProcess,
    pauses: Mapping[str, Pause],
    source: str,
    stored: Mapping[str, Callable[[], int]],
    prompts: Sequence[Sequence[int]],
) -> Times:
    """Has an engine compute each prompt, and measures it when the source holds it.

    `stored` counts the chunks of the sources other than a peer.
    """
    times = Times()
    computes = "disk" if source == "peer" else source
    count = stored.get(source, int)
    for prompt in prompts:
        before = count()
        first = pauses[computes].engine.complete(prompt, OUTPUT_TOKENS)
        engines.check_miss(source, first)
        coordinator.wait_for_holder(prompt, computes, HELD_TOKENS, WAIT_SECONDS)
        if source in stored:
            wait_until(lambda before=before: count() >= before + HELD_CHUNKS, f"{source} holds a prompt")  # type: ignore[misc]
        pauses[source].measure(prompt, first, times)
    return times


def disk_chunks(coordinator: CoordinatorProcess, instance_id: str) -> int:
    """The number of chunks on an instance's disk, as it has reported."""
    usages = coordinator.instances()[instance_id].tiers
    return sum(usage.chunk_count for usage in usages if usage.tier == TIER_DISK)


def rows_of(source: str, times: Times) -> Iterator[Row]:
    """TTFT with and without a prefetch, against a hit in the pool; and how long a prefetch takes."""
    own, without, after, prefetch = (
        1e3 * statistics.median(values) for values in (times.own, times.without, times.after, times.prefetch)
    )
    yield compare(f"no_prefetch_{source}_ttft_ms", without, "ms", "hit in the pool", own)
    yield compare(f"prefetched_{source}_ttft_ms", after, "ms", "hit in the pool", own)
    yield Row(name=f"prefetch_{source}_ms", value=prefetch, unit="ms")


BENCHMARK = Benchmark(
    name="prefetch",
    description="Measures the TTFT of a prompt that left the pool, with and without a prefetch from disk, a remote "
    "store and a peer.",
    measure=measure,
    add_arguments=engines.add_dtype_argument,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
