"""Fetches from node to node by each channel, against the channel's limit and against memcpy of the same bytes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.node.bare_ends import LIMITS, MEMCPY, SHORT_NAMES, Memcpy, bare_reader
from benchmarks.node.copies import rate_row
from benchmarks.node.fetch_ends import TCP_TLS, OwnerProcess, ReadingNode, issue_certificates, keys_of
from benchmarks.support import engines, machine
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from benchmarks.support.timing import seconds_of
from lmkv.errors import LmkvError
from lmkv.transfer import Copy
from lmkv.units import GIB
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.base import Needs, Progress

PROMPT_TOKENS = {4000: "", 2000: "_2000", 512: "_512"}
"""Lengths of prompts, and what rows of that length end with."""
SPARE_CHUNKS = 1
FETCH_SECONDS = 30.0
IDLE_SECONDS = 2.0


def measure(run: BenchmarkRun, dtype: str, channels: Sequence[str] = ("nixl",), *, closely: bool = False) -> None:
    """Adds rows for each channel: a fetch is `Acquire`, read, checksum and commit; its limit is none of these.

    `closely` adds the channel's own read, and the processor time of both ends.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    for channel in channels:
        asyncio.run(_measure(run, dtype, channel, closely))


async def _measure(run: BenchmarkRun, dtype: str, channel: str, closely: bool) -> None:
    spec = engines.kv_spec(dtype)
    most = max(PROMPT_TOKENS) // spec.chunk_size
    with ExitStack() as stack:
        certificates = None
        if channel == TCP_TLS:
            certificates = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-")))
            issue_certificates(certificates)
        log = run.logs / f"fetch-owner-{channel}.log"
        owner = stack.enter_context(OwnerProcess(channel, dtype, most, log, certificates))
        async with ReadingNode("reader", spec, most + SPARE_CHUNKS, channel, certificates=certificates) as node:
            ends = Ends(node, owner, channel)
            try:
                for token_count, suffix in PROMPT_TOKENS.items():
                    await ends.measure(run, token_count // spec.chunk_size, suffix)
                if closely:
                    await ends.measure_closely(run, most)
            finally:
                ends.close()


class Ends:
    """Both ends, and the ways that bytes get from one to the other."""

    def __init__(self, node: ReadingNode, owner: OwnerProcess, channel: str) -> None:
        self._node = node
        self._owner = owner
        self._channel = channel
        self._limit = LIMITS[channel]
        self._bare = bare_reader(channel, node.pool, bytes.fromhex(owner.said.bare))
        self._memcpy = Memcpy(node.pool, b"")

    def close(self) -> None:
        """Lets go of the memory."""
        self._bare.close()
        self._memcpy.close()

    async def measure(self, run: BenchmarkRun, chunk_count: int, suffix: str) -> None:
        """Adds the rows for prompts of this number of chunks."""
        fetched, read, copied = await self._in_turns(run, chunk_count, self._fetch)
        name, size_bytes = f"{self._channel}_fetch{suffix}", chunk_count * self._node.spec.chunk_bytes
        run.add(rate_row(f"{name}_vs_{SHORT_NAMES[self._limit]}", size_bytes, fetched, self._limit, read))
        if self._limit != MEMCPY:
            run.add(rate_row(f"{name}_vs_memcpy", size_bytes, fetched, MEMCPY, copied))

    async def measure_closely(self, run: BenchmarkRun, chunk_count: int) -> None:
        """Adds the row of the channel's own read, and those of processor time."""
        size_bytes = chunk_count * self._node.spec.chunk_bytes
        read, bare, _ = await self._in_turns(run, chunk_count, self._read)
        name = f"{self._channel}_read_vs_{SHORT_NAMES[self._limit]}"
        run.add(rate_row(name, size_bytes, read, self._limit, bare))
        rounds = 5 if run.quick else 20
        before = self._cpu_seconds()
        for _ in range(rounds):
            await self._fetch(chunk_count)
        cpu_seconds = self._cpu_seconds() - before
        run.add(
            Row(name=f"{self._channel}_cpu_s_per_gb", value=cpu_seconds / (rounds * size_bytes / GIB), unit="s/GB"),
        )
        await asyncio.sleep(1.5)  # what makes progress for a connection that is being made rests by then
        pids = [os.getpid(), self._owner.pid]
        before = machine.cpu_seconds(pids)
        await asyncio.sleep(IDLE_SECONDS)
        idle = (machine.cpu_seconds(pids) - before) / IDLE_SECONDS
        run.add(Row(name=f"{self._channel}_idle_cpu_percent", value=100 * idle, unit="% of a core"))

    async def _in_turns(
        self, run: BenchmarkRun, chunk_count: int, act: Callable[[int], object]
    ) -> tuple[list[float], list[float], list[float]]:
        """Seconds of an act, of the channel's limit and of memcpy, taken in turns; the first round connects."""
        acted: list[float] = []
        limited: list[float] = []
        copied: list[float] = []
        for number in range((10 if run.quick else 60) + 1):
            if number % 2:
                copied.append(self._copy(chunk_count))
                acted.append(await act(chunk_count))  # type: ignore[misc]
                limited.append(self._read_bare(chunk_count))
            else:
                limited.append(self._read_bare(chunk_count))
                acted.append(await act(chunk_count))  # type: ignore[misc]
                copied.append(self._copy(chunk_count))
        return acted[1:], limited[1:], copied[1:]

    def _cpu_seconds(self) -> float:
        return machine.process_seconds([os.getpid(), self._owner.pid])

    async def _fetch(self, chunk_count: int) -> float:
        """Seconds of a fetch into an empty tier."""
        keys, held = keys_of(chunk_count), list[Chunk]()
        started = time.perf_counter()
        needs = Needs(spec=self._node.spec, keys=keys, indices=range(chunk_count))
        progress = Progress(self._node.tier, needs, lambda chunks: held.extend(chunk for _, chunk in chunks))
        fetched = await self._node.fetcher.fetch(progress, [self._owner.holder(chunk_count)], FETCH_SECONDS)
        seconds = time.perf_counter() - started
        progress.close()
        self._node.tier.unhold(held)
        self._node.tier.drop(keys)
        if fetched.size_bytes != chunk_count * self._node.spec.chunk_bytes:
            raise LmkvError(f"a fetch brought {fetched.chunk_count} of {chunk_count} chunks: {fetched.error}")
        return seconds

    async def _read(self, chunk_count: int) -> float:
        """Seconds of the channel's read into the same memory, with no words around it."""
        copies = [
            Copy(remote_address=remote, local_address=local, size_bytes=self._node.spec.chunk_bytes)
            for remote, local in zip(self._owner.addresses(chunk_count), self._local(chunk_count), strict=True)
        ]
        connection = self._node.connections.get(self._owner.holder(chunk_count))
        assert connection is not None
        spec = self._node.spec
        await connection.connect(spec, FETCH_SECONDS)
        grant = (await connection.acquire(spec, keys_of(chunk_count), FETCH_SECONDS, FETCH_SECONDS)).grant
        self._owner.serve_bare()  # for what needs the owner's progress; the channel's own is not on without a grant
        started = time.perf_counter()
        await self._node.channels.read(connection.name, copies, FETCH_SECONDS, lambda: None, grant.grant_id)
        seconds = time.perf_counter() - started
        self._owner.rest_bare()
        await connection.release(grant.grant_id, FETCH_SECONDS)
        return seconds

    def _local(self, chunk_count: int) -> list[int]:
        address, size_bytes = self._node.pool.address, self._node.spec.chunk_bytes
        return [address + index * size_bytes for index in range(chunk_count)]

    def _read_bare(self, chunk_count: int) -> float:
        """Seconds of the channel's limit, into the same memory."""
        remote, local = self._owner.addresses(chunk_count), self._local(chunk_count)
        self._owner.serve_bare()
        seconds = seconds_of(lambda: self._bare.read(remote, local, self._node.spec.chunk_bytes))
        self._owner.rest_bare()
        return seconds

    def _copy(self, chunk_count: int) -> float:
        """Seconds of a memcpy into the same memory."""
        local = self._local(chunk_count)
        return seconds_of(lambda: self._memcpy.read(local, local, self._node.spec.chunk_bytes))
