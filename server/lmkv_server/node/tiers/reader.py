"""Reads chunks of a secondary tier into the pool, verifies them, and commits them to the host tier.

requested ──► extent reserved ──► read ──► checksum verified ──► committed to the host tier
                                    └── damaged, or gone: dropped, and a miss
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic

from lmkv.errors import Full
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.runtime.places import Places, most_of, requester
from lmkv.runtime.turns import Slots
from lmkv.spec import KvSpec
from lmkv.telemetry.logs import LimitedLogger
from lmkv.transfer.bandwidth import Bandwidth, MovedShares
from lmkv_kernels import checksum
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.host import Chunk, Origin, Reservation
from lmkv_server.node.tiers.backend import Backend, C
from lmkv_server.node.tiers.base import TierStats
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.encryption_header import ChunkDescription

logger = logging.getLogger(__name__)

READS_AHEAD = 12
"""Chunks that one load reads at a time: more than a backend has threads, so that none waits for the event loop."""
MAX_READS = 16
"""Chunks that all loads read at a time; each has an extent of the pool reserved."""
MAX_WAITING = 1024
"""Chunks that are being read or wait for it, engines in turn; a request for more is a miss."""

OnRead = Callable[[int, Chunk], None]
"""Called with the index of a chunk that was committed to the host tier. The chunk is not held for the callee."""


class _Load:
    """The chunks that one call of `TierReader.read` waits for."""

    def __init__(self, fingerprint: bytes, sizes: Sequence[int], on_read: OnRead) -> None:
        """`sizes` are those of the chunks in bytes, 0 of chunks that no backend holds."""
        self.ahead = asyncio.Semaphore(READS_AHEAD)
        self.fingerprint = fingerprint
        self.size_bytes = 0
        """Bytes of the chunks that were read."""
        self.moved_bytes = 0
        """Bytes that were read for them."""
        self.left_bytes = sum(sizes)
        """Bytes of the chunks that are still to be read."""
        self._sizes = sizes
        self._on_read: OnRead | None = on_read

    def ended(self, index: int, chunk: Chunk | None, moved_bytes: int = 0) -> None:
        """Takes a chunk at once, before others can evict it; None: it cannot be read. 0 bytes: it was in the tier."""
        self.ahead.release()
        if self._on_read is None:
            return
        self.left_bytes -= self._sizes[index]
        if chunk:
            self.size_bytes += chunk.size_bytes if moved_bytes else 0
            self.moved_bytes += moved_bytes
            self._on_read(index, chunk)

    def close(self) -> None:
        """Takes no more chunks."""
        self._on_read = None


class TierReader(Generic[C]):
    """The reads that run. One event loop owns it."""

    def __init__(self, backends: Sequence[Backend[C]], cache: HostCache, codec: ChunkCodec | None = None) -> None:
        self._backends = backends
        self._codec = codec
        self._tier = cache.tier
        self._pool = cache.pool
        self._bandwidth = Bandwidth()
        self._shares = MovedShares()
        self._loads: set[_Load] = set()
        self._log = LimitedLogger(logger)
        self._reading: dict[ChunkKey, list[tuple[_Load, int]]] = {}
        """The loads that wait for each chunk, and its index in them."""
        self._places = Places[ChunkKey]("chunks to read", MAX_WAITING, most_of(MAX_WAITING))
        self._slots = Slots(MAX_READS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._read_chunks = 0
        self._read_bytes = 0
        self._damaged_count = 0

    def stats(self) -> TierStats:
        """Counts the chunks that were read, and those that were damaged or gone."""
        return TierStats(read_chunks=self._read_chunks, read_bytes=self._read_bytes, damaged_chunks=self._damaged_count)

    def moved_share(self, spec: KvSpec) -> float | None:
        """Bytes that reads move for each byte of chunks of a spec; None if they are encoded, and none was read yet."""
        if self._codec is None or not self._codec.applies_to(spec):
            return 1.0
        return self._shares.get(spec.fingerprint)

    def expected_seconds(self, moved_bytes: float) -> float | None:
        """Estimates the seconds in which this many bytes move behind the reads that run; None if that is not known."""
        queued_bytes = sum(load.left_bytes * (self._shares.get(load.fingerprint) or 1.0) for load in self._loads)
        return self._bandwidth.seconds(moved_bytes + queued_bytes, time.monotonic())

    async def read(self, fingerprint: bytes, keys: Sequence[ChunkKey], timeout_seconds: float, on_read: OnRead) -> None:
        """Reads those of the chunks that a backend holds into the host tier, in order, a few at a time.

        A chunk is a miss if it is not read within `timeout_seconds`, is damaged, or finds no room in the pool.
        Concurrent requests for a chunk share one read. Raises nothing but for cancellation, and neither may `on_read`,
        which is not called after the return.
        """
        sizes = [found[1].size_bytes if (found := self._find(key, fingerprint)) else 0 for key in keys]
        began, load = time.monotonic(), _Load(fingerprint, sizes, on_read)
        self._loads.add(load)
        try:
            async with asyncio.timeout(timeout_seconds):
                for index, key in enumerate(keys):
                    await load.ahead.acquire()
                    self._start(key, fingerprint, load, index)
                for _ in range(READS_AHEAD):
                    await load.ahead.acquire()
        except TimeoutError:
            logger.debug("a read of %d chunks takes more than %.3g s", len(keys), timeout_seconds)
        finally:
            load.close()
            self._loads.discard(load)
        now = time.monotonic()
        busy = self._bandwidth.busy(began, now)
        self._bandwidth.record_read(load.moved_bytes, busy.seconds, now, busy.share)
        self._shares.record(fingerprint, load.moved_bytes, load.size_bytes)

    async def aclose(self) -> None:
        """Ends every read. The backends must be closed, so that nothing writes to the pool. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _find(self, key: ChunkKey, fingerprint: bytes) -> tuple[Backend[C], C] | None:
        """The first backend that holds the chunk, if it can be read there."""
        for backend in self._backends:
            if chunk := backend.find(key):
                return (backend, chunk) if backend.usable and chunk.fingerprint == fingerprint else None
        return None

    def _start(self, key: ChunkKey, fingerprint: bytes, load: _Load, index: int) -> None:
        """Starts to read a chunk, unless a read of it runs; the load receives its end in any case, perhaps at once."""
        found = self._find(key, fingerprint)
        if found is None:
            load.ended(index, None)
        elif (waiting := self._reading.get(key)) is not None:
            waiting.append((load, index))
        else:
            try:
                self._places.take(key, requester.get())
            except Full:
                load.ended(index, None)
                return
            self._reading[key] = [(load, index)]
            task = asyncio.create_task(self._read(*found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, backend: Backend[C], chunk: C) -> None:
        read, moved_bytes = None, 0
        try:
            async with self._slots.take(requester.get()):
                read = self._tier.get(chunk.key)  # another load may have committed it
                if read is None and backend.usable:
                    reserved = self._tier.reserve(chunk.size_bytes, evict=MissReason.EVICTED_BY_FETCH)
                    read, moved_bytes = await self._read_into(reserved, backend, chunk) if reserved else (None, 0)
        finally:
            self._places.release(chunk.key)
            for load, index in self._reading.pop(chunk.key):
                load.ended(index, read, moved_bytes)

    async def _read_into(self, reserved: Reservation, backend: Backend[C], chunk: C) -> tuple[Chunk | None, int]:
        """Reads into an extent; the chunk, and the bytes that were read for it.

        The extent stays reserved for good if this is cancelled: the thread continues to write.
        """
        memory = self._pool.buffer[reserved.offset : reserved.offset + chunk.memory_bytes]
        header = await backend.read(chunk, memory, lambda header: self._is_intact(reserved, header))
        is_held = backend.holds(chunk)
        if header is None or not is_held:
            self._tier.give_back(reserved.offset)
            if is_held:
                self._damaged_count += 1
                self._log.warning(
                    "chunk %s is damaged or gone in %s, and was dropped", chunk.key.hex(), backend.health.name
                )
                backend.discard([chunk], MissReason.DAMAGED)
            return None, 0
        writer = backend.inputs(header.writer) if header.writer else None
        self._read_chunks += 1
        self._read_bytes += header.size_bytes
        intact = Chunk(
            key=header.key,
            fingerprint=header.fingerprint,
            offset=reserved.offset,
            size_bytes=header.size_bytes,
            checksum=header.checksum,
            token_count=header.token_count,
            parent=header.parent,
            prefix_digests=chunk.prefix_digests,
            owner=chunk.owner,
            origin=Origin(tier=backend.health.name, writers=[writer] if writer else ()),
        )
        return self._tier.commit(intact) or self._tier.get(chunk.key), header.moved_bytes

    def _is_intact(self, reserved: Reservation, header: ChunkDescription) -> bool:
        return checksum(self._pool.buffer, reserved.offset, header.size_bytes) == header.checksum
