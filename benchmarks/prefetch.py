"""What a prefetch saves before a session's next turn: `python -m benchmarks.prefetch`, docs/performance/prefetch.md.

A prompt's chunks have left the engine's pool, as they do while an agent's tool runs: they are on disk, in a remote
store, or in a peer's pool. The next request comes without a prefetch, and once more after one. The baseline is a hit in
the pool. Prompts are whole chunks and one token, so that every case computes the same single token.

KVCR gets the same prompts, then, in engines of its own: what it reads is a hint that comes with the request.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import valkey

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.redis import RedisProcess
from benchmarks.support.rows import Row, compare
from benchmarks.systems.kvcr import KvcrPair, kvcr_pair, kvcr_problem, kvcr_version
from benchmarks.systems.pairs import PairPlan
from lmkv.errors import LmkvError
from lmkv.tiers import DISK
from lmkv_client.demo.cluster import Cluster, CoordinatorProcess
from lmkv_client.demo.endpoint import Completion
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
    answers: list[Sequence[int]] = field(default_factory=list)
    """What each prompt was answered without a hit."""
    different_count: int = 0
    """Prompts whose completions were not all equal."""

    def compare(self, completions: Sequence[Completion], *others: Sequence[int]) -> None:
        """Notes the completions of one prompt, the first without a hit; `others` are answers that must be equal."""
        answers = [completion.token_ids for completion in completions]
        self.answers.append(answers[0])
        self.different_count += any(tuple(answer) != tuple(answers[0]) for answer in (*answers, *others))


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
        times.compare(completions)

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of each source (9; 3 with --quick)")
    parser.add_argument("--kvcr-python", type=Path, metavar="PATH", help="Python of an environment with KVCR 0.1")


def measure(run: BenchmarkRun) -> None:
    """Every source, one after the other: disk, remote store, peer. Then the disk and the peer with KVCR."""
    dtype = engines.choose_dtype(run, compares_answers=True)
    count = run.args.prompts or (3 if run.quick else 9)
    run.report.settings |= {"prompt_tokens": HELD_TOKENS + 1, "prompts": count}
    context_tokens = engines.context_for(HELD_TOKENS + 1)
    pool_bytes = (count + 3) * context_tokens * engines.token_bytes(dtype)
    engines.check_memory(3 * (engines.ENGINE_BYTES + pool_bytes))
    prompts = Prompts(seed=3)
    warm_up = prompts.make(HELD_TOKENS + 1)
    sent = {source: [prompts.make(HELD_TOKENS + 1) for _ in range(count)] for source in ("disk", "peer", "remote")}
    found = measure_lmkv(run, dtype, context_tokens, pool_bytes, warm_up, sent)
    kvcr: Path | None = run.args.kvcr_python
    if problem := kvcr_problem(kvcr):
        run.note(problem)
    elif kvcr:
        run.report.settings["kvcr"] = kvcr_version(kvcr)
        plan = PairPlan(run=run, model=engines.model_of(run), context_tokens=context_tokens, dtype=dtype)
        run.say(f"starting two engines with KVCR, {dtype}; half a minute or more")
        chunks = {"chunk_count": HELD_CHUNKS, "disk_chunk_count": (count + 3) * HELD_CHUNKS}
        with kvcr_pair(plan, kvcr, **chunks) as pair:
            measure_kvcr(run, pair, warm_up, sent, {source: times.answers for source, times in found.items()})


def measure_lmkv(
    run: BenchmarkRun,
    dtype: str,
    context_tokens: int,
    pool_bytes: int,
    warm_up: Sequence[int],
    sent: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Times]:
    """lmkv with every source that is there; what was measured, by source."""
    stored: dict[str, Callable[[], int]] = {}
    found: dict[str, Times] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run.folder / "disk", ignore_errors=True)  # makes room for KVCR's
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
        measure_source(coordinator, pauses, "disk", stored, [warm_up])
        for source in own:
            count = len(sent[source])
            run.say(f"{source}: {count} prompts of {HELD_TOKENS + 1} tokens")
            times = found[source] = measure_source(coordinator, pauses, source, stored, sent[source])
            run.add(*rows_of(source, times))
            engines.check_identical(run, source, count - times.different_count, count)
    return found


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


def measure_kvcr(
    run: BenchmarkRun,
    pair: KvcrPair,
    warm_up: Sequence[int],
    sent: Mapping[str, Sequence[Sequence[int]]],
    answers: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """KVCR with the prompts of lmkv, whose answers were these.

    The first engine's memory holds a prompt and a half, so that each prompt takes the one before out of it.
    """
    first, second = pair.first, pair.second
    computed = [compute_kvcr(pair, prompt) for prompt in (warm_up, *sent["disk"])]
    peer_warm_up = Prompts(seed=4).make(HELD_TOKENS + 1)
    compute_kvcr(pair, peer_warm_up)
    engines.check_hit("KVCR, peer", second.complete(peer_warm_up, OUTPUT_TOKENS, extra=pair.hint()), HELD_TOKENS)
    wait_until(lambda: pair.disk_chunks() >= len(computed) * HELD_CHUNKS, "KVCR's disk holds the prompts")
    disk = Times()
    run.say(f"KVCR, disk: {len(sent['disk'])} prompts")
    ask_kvcr(first, warm_up, computed[0], Times())
    for prompt, completion, answer in zip(sent["disk"], computed[1:], answers["disk"], strict=True):
        ask_kvcr(first, prompt, completion, disk, answer)
    peer = Times()
    run.say(f"KVCR, peer: {len(sent['peer'])} prompts")
    for prompt, answer in zip(sent["peer"], answers["peer"], strict=True):
        ask_kvcr(second, prompt, compute_kvcr(pair, prompt), peer, answer, extra=pair.hint())
    unhinted = []
    for prompt in sent["remote"][: -(-len(sent["peer"]) // 3)]:
        compute_kvcr(pair, prompt)
        completion = second.complete(prompt, OUTPUT_TOKENS)
        engines.check_miss("KVCR without a hint", completion)
        unhinted.append(completion.ttft_seconds)
    for source, times in (("disk", disk), ("peer", peer)):
        own, value = 1e3 * statistics.median(times.own), 1e3 * statistics.median(times.without)
        run.add(compare(f"kvcr_{source}_ttft_ms", value, "ms", "hit in its pool", own))
        count = len(times.own)
        engines.check_identical(run, f"KVCR, {source}, and lmkv", count - times.different_count, count)
    own = 1e3 * statistics.median(peer.own)
    run.add(compare("kvcr_unhinted_ttft_ms", 1e3 * statistics.median(unhinted), "ms", "hit in its pool", own))


def compute_kvcr(pair: KvcrPair, prompt: Sequence[int]) -> Completion:
    """Has the first engine compute a new prompt, and returns when its KVCR has stored it."""
    before = pair.stored_chunks()
    completion = pair.first.complete(prompt, OUTPUT_TOKENS)
    engines.check_miss("KVCR", completion)
    wait_until(lambda: pair.stored_chunks() >= before + HELD_CHUNKS, "KVCR has stored a prompt")
    return completion


def ask_kvcr(
    engine: EngineProcess,
    prompt: Sequence[int],
    first: Completion,
    times: Times,
    *answers: Sequence[int],
    extra: Mapping[str, object] | None = None,
) -> None:
    """Measures a prompt that is not in this engine's memory, with `extra` in its request, then again when it is."""
    completions = [first]
    for seconds, more in ((times.without, extra), (times.own, None)):
        engine.reset_prefix_cache()
        completions.append(engine.complete(prompt, OUTPUT_TOKENS, extra=more))
        engines.check_hit(f"KVCR, {engine.name}", completions[-1], HELD_TOKENS)
        seconds.append(completions[-1].ttft_seconds)
    times.compare(completions, *answers)


def disk_chunks(coordinator: CoordinatorProcess, instance_id: str) -> int:
    """The number of chunks on an instance's disk, as it has reported."""
    usages = coordinator.instances()[instance_id].tiers
    return sum(usage.chunk_count for usage in usages if usage.tier == DISK)


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
    "store and a peer, beside KVCR.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
