"""One folder of the disk tier with its index, which keeps it within a limit: the disk tier's backend.

free ──reserve──► reserved ──admit──► held ──reserve for another, remove──► gone
                     └──give_back──► free
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv.kv_inputs import KvInputs
from lmkv.misses import MissReason
from lmkv.units import format_bytes
from lmkv_server.node.cache.eviction import EvictionQueue
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.backend import BackendHealth, BackendTimes, WriteResult
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.disk.folder import DiskChunk, DiskFolder

logger = logging.getLogger(__name__)


class DiskIndex:
    """The chunks of one folder that may take `capacity_bytes`. Not thread-safe: one loop owns it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        """Bytes that chunks may take now: fewer than the capacity while the disk is full."""
        self._chunks: dict[ChunkKey, DiskChunk] = {}
        self._queue = EvictionQueue()
        self._chunk_bytes = 0
        self._reserved_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that chunks take, and those that are being written."""
        return self._chunk_bytes + self._reserved_bytes

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[DiskChunk]:
        return iter(self._chunks.values())

    def get(self, key: ChunkKey) -> DiskChunk | None:
        """The chunk, if it is held. Does not count as a use."""
        return self._chunks.get(key)

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """Notes a use of those chunks of a prompt, in its order, that are here."""
        self._queue.use([key for key in keys if key in self._chunks])

    def is_free(self, key: ChunkKey) -> bool:
        """Whether the chunk is held, and no other one continues it."""
        return key in self._chunks and self._queue.is_free(key)

    def supersede(self, key: ChunkKey) -> None:
        """Has the chunk, if it is here and not used again, evicted before others."""
        if key in self._chunks:
            self._queue.supersede(key)

    def reserve(self, file_bytes: int) -> list[DiskChunk] | None:
        """Reserves room for a file; returns the chunks that are evicted for it, or None if there is no room now."""
        if self._reserved_bytes + file_bytes > self.limit_bytes:
            return None
        self._reserved_bytes += file_bytes
        return self._shrunk()

    def admit(self, chunk: DiskChunk) -> None:
        """Adds a chunk that room was reserved for. It must not be held already."""
        assert chunk.key not in self._chunks, "held already"
        self._reserved_bytes -= chunk.file_bytes
        self._insert(chunk)

    def give_back(self, file_bytes: int) -> None:
        """Releases reserved room."""
        self._reserved_bytes -= file_bytes

    def fill(self, chunks: Iterable[DiskChunk]) -> list[DiskChunk]:
        """Adds the chunks of an opened folder, oldest first; returns those that exceed the limit or are duplicates."""
        twice = []
        for chunk in chunks:
            if known := self.remove(chunk.key):
                twice.append(known)
            self._insert(chunk)
        return twice + self._shrunk()

    def remove(self, key: ChunkKey) -> DiskChunk | None:
        """Removes the chunk; None if it is not held."""
        if key not in self._chunks:
            return None
        self._queue.remove(key)
        return self._forget(key)

    def full(self) -> None:
        """Limits the index to its present chunks, because the disk is full."""
        self.limit_bytes = min(self.limit_bytes, self._chunk_bytes)

    def _insert(self, chunk: DiskChunk) -> None:
        self._chunks[chunk.key] = chunk
        self._queue.add(chunk.key, chunk.parent)
        self._chunk_bytes += chunk.file_bytes

    def _forget(self, key: ChunkKey) -> DiskChunk:
        """Removes a chunk that has left the queue."""
        chunk = self._chunks.pop(key)
        self._chunk_bytes -= chunk.file_bytes
        return chunk

    def _shrunk(self) -> list[DiskChunk]:
        """Evicts chunks until the limit is met; returns them."""
        gone = []
        while self.used_bytes > self.limit_bytes and (key := self._queue.pop()) is not None:
            gone.append(self._forget(key))
        return gone

    def check(self) -> None:
        """Asserts that bytes add up and that the limit is kept."""
        self._queue.check()
        assert len(self._queue) == len(self._chunks)
        assert all(chunk.key == key for key, chunk in self._chunks.items())
        assert self._chunk_bytes == sum(chunk.file_bytes for chunk in self)
        assert self._reserved_bytes >= 0
        assert self.limit_bytes <= self.capacity_bytes
        assert self.used_bytes <= self.capacity_bytes


READ_THREADS = 4
WRITE_THREADS = 2
"""Enough for near the speed of a device, past the page cache."""
DISK_TIMES = BackendTimes(stall_seconds=10.0)
"""A device that takes longer for one chunk is not used until it has answered."""
REMOVED_AT_ONCE = 256
FILLED_AT_ONCE = 1024
"""Chunks of a folder that are indexed before other tasks run: some 15 milliseconds."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskVolume:
    """A folder and its chunks. One event loop owns it; each volume has its own threads, so none waits for another."""

    def __init__(
        self, folder: DiskFolder, capacity_bytes: int, tier: BackendTier[DiskChunk], times: BackendTimes
    ) -> None:
        self.folder = folder
        self.index = DiskIndex(capacity_bytes)
        threads = {"read": READ_THREADS, "write": WRITE_THREADS}
        self.health = BackendHealth("disk", str(folder.path), self, threads, times)
        self._tier = tier
        self._stall_seconds = times.stall_seconds
        self._serial = 0
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> bool:
        """Whether chunks can be read and written now."""
        return self.health.usable

    @property
    def writable(self) -> bool:
        """Whether chunks can be written now. A full volume replaces its own."""
        return self.health.usable

    def has_room(self, size_bytes: int, /) -> bool:
        """Whether a chunk fits without an eviction."""
        return self.usable and self.index.used_bytes + size_bytes <= self.index.limit_bytes

    def find(self, key: ChunkKey) -> DiskChunk | None:
        """The chunk, if it is here. Does not count as a use."""
        return self.index.get(key)

    def holds(self, chunk: DiskChunk) -> bool:
        """Whether this very file of the chunk is in the index."""
        return self.index.get(chunk.key) is chunk

    async def read(
        self, chunk: DiskChunk, memory: memoryview, is_intact: Callable[[DiskChunk], bool]
    ) -> DiskChunk | None:
        """Reads a chunk; None if it is gone, incomplete, or not intact, or if the folder fails."""

        def read() -> DiskChunk | None:
            found = self.folder.read(chunk, memory)
            return found if found and (found.is_verified or is_intact(found)) else None

        try:
            return await self.health.run("read", read)
        except OSError as error:
            self.health.close(error)
            return None

    async def write(self, chunk: Chunk, memory: memoryview, is_wanted: Callable[[], bool]) -> WriteResult:
        """Writes a chunk, after evicting others if there is no room for it."""
        await self._write_inputs(chunk)
        planned = self._described(chunk)
        evicted = self.index.reserve(planned.file_bytes)
        if evicted is None:
            return WriteResult.SKIPPED
        self._tier.removed(evicted, MissReason.EVICTED_FROM_TIER)
        try:
            written = await self.health.run("write", self.folder.write, planned, memory, evicted)
        except OSError as error:
            self.index.give_back(planned.file_bytes)
            self._write_failed(error)
            return WriteResult.SKIPPED
        self.index.give_back(planned.file_bytes - written.file_bytes)
        if is_wanted() and not chunk.dropped and not self._tier.has(chunk.key) and self.health.is_open:
            self.index.admit(written)
            self._tier.stored(written)
            return WriteResult.WRITTEN
        self.index.give_back(written.file_bytes)
        self.remove([written])
        return WriteResult.UNWANTED

    def inputs(self, writer: bytes) -> KvInputs | None:
        """The inputs of an engine, by their id."""
        return self.folder.inputs(writer)

    async def _write_inputs(self, chunk: Chunk) -> None:
        """Writes the inputs of the engine that has stored a chunk, if they are known. A chunk needs no inputs."""
        if (writer := chunk.origin.writer) and not self.folder.inputs(writer.id):
            with suppress(OSError):
                await self.health.run("write", self.folder.write_inputs, writer)

    def keeps(self, key: ChunkKey) -> bool:
        """Whether the chunk is here."""
        return self.index.get(key) is not None

    def is_free(self, key: ChunkKey) -> bool:
        """Whether the chunk is here, and no other one continues it."""
        return self.index.is_free(key)

    def evict(self, key: ChunkKey) -> None:
        """Removes the chunk, if it is here, and its file in the background."""
        if chunk := self.index.get(key):
            self.discard([chunk], MissReason.EVICTED_FROM_TIER)

    def discard(self, chunks: Sequence[DiskChunk], reason: MissReason) -> None:
        """Forgets chunks, and removes their files in the background."""
        for chunk in chunks:
            self.index.remove(chunk.key)
        self._tier.removed(chunks, reason)
        self.remove(chunks)

    def remove(self, chunks: Sequence[DiskChunk]) -> None:
        """Removes files of chunks that are not in the index, in the background; `settle` waits for it."""
        task = asyncio.create_task(self._remove(chunks))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def settle(self) -> None:
        """Returns once the files of removed chunks are gone. Raises `Unreachable` if the folder does not answer."""
        while self._removals:
            await asyncio.wait(self._removals, timeout=self._stall_seconds)
            if self._removals and self.health.is_late:
                raise Unreachable(f"{self.folder.path} does not answer: it may still have files of dropped chunks")

    async def aclose(self) -> None:
        """Ends running calls within a bounded time, and releases the folder. Idempotent."""
        await self.health.aclose()
        self.folder.close()
        for removal in self._removals:  # their calls have ended, or are left behind
            removal.cancel()
        if self._removals:
            await asyncio.wait(self._removals)

    async def open(self) -> None:
        """Opens the folder and indexes its chunks. Raises `OSError`."""
        await self.health.wait_idle()  # a call of before must not meet the files that are indexed now
        found = await self.health.run("write", self.folder.open)
        superfluous: list[DiskChunk] = []
        for start in range(0, len(found), FILLED_AT_ONCE):
            superfluous += self.index.fill(found[start : start + FILLED_AT_ONCE])
            await asyncio.sleep(0)
        await self._remove(superfluous)
        self.health.opened()
        logger.info(
            "disk: %s has %d chunks, %s of %s%s",
            self.folder.path,
            len(self.index),
            format_bytes(self.index.used_bytes),
            format_bytes(self.index.capacity_bytes),
            "" if self.folder.direct else "; its file system has no direct IO",
        )
        self._tier.opened(self)

    async def _remove(self, chunks: Sequence[DiskChunk]) -> None:
        with suppress(OSError):  # closed: the next opening finds them
            for start in range(0, len(chunks), REMOVED_AT_ONCE):
                await self.health.run("write", self.folder.remove, chunks[start : start + REMOVED_AT_ONCE])

    def lost(self) -> None:
        """Forgets all chunks, because the folder failed."""
        chunks = list(self.index)
        for chunk in chunks:
            self.index.remove(chunk.key)
        self._tier.removed(chunks, MissReason.TIER_DOWN)
        self._tier.lost()

    def _write_failed(self, error: OSError) -> None:
        if error.errno not in NO_ROOM:
            self.health.close(error)
        elif self.health.is_open:
            self.index.full()
            self.health.full(error, self._retry_room)

    def _retry_room(self) -> None:
        self.index.limit_bytes = self.index.capacity_bytes

    def _described(self, chunk: Chunk) -> DiskChunk:
        self._serial = max(self._serial + 1, time.time_ns())
        described = DiskChunk(
            key=chunk.key,
            parent=chunk.parent,
            prefix_digests=chunk.prefix_digests,
            fingerprint=chunk.fingerprint,
            token_count=chunk.token_count,
            size_bytes=chunk.size_bytes,
            checksum=chunk.checksum,
            serial=self._serial,
            owner=chunk.owner,
            writer=writer.id if (writer := chunk.origin.writer) else b"",
        )
        return self.folder.planned(described)
