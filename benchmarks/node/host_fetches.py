"""Fetches between two hosts that share no memory: the first one, and those after it, by each channel and by `auto`.

Each end is a process of its own for each measurement: `python -m benchmarks.node.host_fetches`, which obeys the lines
that it reads.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.node.fetch_ends import ReadingNode, keys_of
from benchmarks.node.hosts import Host, NoHosts, two_hosts
from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv.errors import LmkvError
from lmkv.transfer.channels import AUTO
from lmkv.units import GIB
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.serving.read_grants import SHARE
from lmkv_server.node.tiers.base import Needs, Progress

CHOICES = ("tcp", "nixl")
"""The channels that `auto` chooses from between hosts."""
PLUG_INS = ("ucx", "mooncake")
FETCH_BYTES = 160 << 20
SPARE_CHUNKS = 1
FETCH_SECONDS = 30.0
STARTS = 3
FETCHES = 20
"""Fetches of each start after the first one."""


def measure(run: BenchmarkRun, dtype: str) -> None:
    """Adds the rows of each channel, then those of `auto` beside the best that it can choose."""
    run.logs.mkdir(parents=True, exist_ok=True)
    try:
        with two_hosts() as (one, other):
            results = {name: _starts(run, name, dtype, one, other) for name in (*CHOICES, AUTO)}
            for name in PLUG_INS:
                try:
                    results[name] = _starts(run, name, dtype, one, other)
                except LmkvError as error:
                    run.note(f"Fetches between hosts by {name} were not measured: {error}")
    except NoHosts as error:
        run.note(f"Fetches between hosts were not measured: {error}")
        return
    for name, result in results.items():
        if name != AUTO:
            run.add(Row(name=f"hosts_{name}_first_fetch_ms", value=result.first_ms, unit="ms"))
            run.add(Row(name=f"hosts_{name}_fetch", value=result.gb_per_s, unit="GB/s"))
        run.add(Row(name=f"hosts_{name}_cpu_s_per_gb", value=result.cpu_s_per_gb, unit="s/GB"))
    best = max(CHOICES, key=lambda name: results[name].gb_per_s)
    for name, part, unit in (("first_fetch", "first_ms", "ms"), ("fetch", "gb_per_s", "GB/s")):
        chosen, against = (getattr(results[name], part) for name in (AUTO, best))
        run.add(compare(f"hosts_auto_{name}_vs_best", chosen, unit, best, against))


class _Result(NamedTuple):
    """What one channel does between hosts."""

    first_ms: float
    """Of the first fetch."""
    gb_per_s: float
    """Of the others, in 2^30 bytes."""
    cpu_s_per_gb: float
    """Processor time of both ends for the others."""


def _starts(run: BenchmarkRun, channel: str, dtype: str, one: Host, other: Host) -> _Result:
    """Medians of several starts of both ends."""
    made = [_measure(run, channel, dtype, one, other) for _ in range(1 if run.quick else STARTS)]
    return _Result(*(statistics.median(values) for values in zip(*made, strict=True)))


def _measure(run: BenchmarkRun, channel: str, dtype: str, one: Host, other: Host) -> _Result:
    rounds = 5 if run.quick else FETCHES
    log = run.logs / f"hosts-{channel}.log"
    with ExitStack() as stack:
        owner = stack.enter_context(_End("own", channel, dtype, one, log))
        reader = stack.enter_context(_End("read", channel, dtype, other, log))
        holder = json.dumps(owner.said)
        first = reader.ask(f"fetch 1 {holder}")
        before = owner.ask("cpu")["seconds"] + reader.ask("cpu")["seconds"]
        rest = reader.ask(f"fetch {rounds} {holder}")
        cpu_seconds = owner.ask("cpu")["seconds"] + reader.ask("cpu")["seconds"] - before
    run.say(f"between hosts by {channel}: {rest['channel']}, first fetch {1000 * first['seconds'][0]:.0f} ms")
    rate = statistics.median(rest["size_bytes"] / seconds for seconds in rest["seconds"])
    cpu_s_per_gb = cpu_seconds / (rounds * rest["size_bytes"] / GIB)
    return _Result(1000 * first["seconds"][0], rate / GIB, cpu_s_per_gb)


class _End:
    """One end's process. A context manager."""

    def __init__(self, kind: str, channel: str, dtype: str, host: Host, log: Path) -> None:
        words = ["-m", "benchmarks.node.host_fetches", kind, channel, dtype, host.address]
        command = [*host.prefix, sys.executable, *words]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    def __enter__(self) -> Self:
        try:
            self.said = self._hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, order: str) -> dict[str, Any]:
        """Has it carry out an order; its answer."""
        assert self._process.stdin
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise LmkvError("an end of the fetches between hosts has ended; its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def run_end(kind: str, channel: str, dtype: str, address: str) -> None:
    """What the process of an end does."""
    spec = engines.kv_spec(dtype)
    count = max(1, FETCH_BYTES // spec.chunk_bytes)
    chunk_count = SHARE * count if kind == "own" else count + SPARE_CHUNKS
    async with ReadingNode(kind, spec, chunk_count, channel, host=address, shares_memory=False) as node:
        if kind == "own":
            node.fill(keys_of(count))
        _say({"instance_id": kind, "epoch": node.epoch, "peer_address": node.address, "matched_chunk_count": count})
        while order := await asyncio.to_thread(sys.stdin.readline):
            match order.split(maxsplit=2):
                case ["cpu"]:
                    _say({"seconds": time.process_time()})
                case ["fetch", rounds, holder]:
                    peer = Holder(**json.loads(holder))
                    seconds = [await _fetch(node, peer) for _ in range(int(rounds))]
                    used = node.channels.of(f"{peer.instance_id}:{peer.epoch}")
                    _say({"seconds": seconds, "size_bytes": count * spec.chunk_bytes, "channel": used})


async def _fetch(node: ReadingNode, holder: Holder) -> float:
    """Seconds of a fetch into an empty tier."""
    keys, held = keys_of(holder.matched_chunk_count), list[Chunk]()
    started = time.perf_counter()
    needs = Needs(spec=node.spec, keys=keys, indices=range(len(keys)))
    progress = Progress(node.tier, needs, lambda chunks: held.extend(chunk for _, chunk in chunks))
    fetched = await node.fetcher.fetch(progress, [holder], FETCH_SECONDS)
    seconds = time.perf_counter() - started
    progress.close()
    node.tier.unhold(held)
    node.tier.drop(keys)
    if fetched.chunk_count != len(keys):
        raise LmkvError(f"a fetch brought {fetched.chunk_count} of {len(keys)} chunks: {fetched.error}")
    return seconds


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(run_end(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]))
