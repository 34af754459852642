"""Writes what the host tier gains to disk, behind everybody's back. Used by `DiskTier`.

    admitted ──► waiting ──► being written, and held meanwhile ──► on disk
                    └── evicted before its turn, or no room: skipped

What waits holds nothing and is in the host tier, so the host tier bounds it. A disk that is slower than the engines
store loses chunks; it never makes anybody wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.events import HOST, CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.disk.chunk import DiskChunk
from lmkv_server.node.tiers.disk.volume import DiskVolume

if TYPE_CHECKING:
    from lmkv_server.node.tiers.disk.tier import DiskTier


class DiskWriter:
    """The chunks that are to be written. One loop owns it; `run` it for every thread of every folder."""

    def __init__(self, disk: DiskTier, tier: HostTier, pool: Pool) -> None:
        self.written_chunks = 0
        """Chunks written since the start."""
        self.written_bytes = 0
        """Bytes of these."""
        self.skipped_count = 0
        """Chunks that left the host tier before they were written, or that no folder had room for."""
        self._disk = disk
        self._tier = tier
        self._pool = pool
        self._waiting: dict[ChunkKey, Chunk] = {}  # oldest first
        self._writing: dict[Chunk, bool] = {}  # and whether it is still wanted; never more than there are threads
        self._serial = 0
        self._flushed = asyncio.Event()
        self._flushed.set()

    @property
    def waiting_count(self) -> int:
        """Chunks that wait to be written, or are being written."""
        return len(self._waiting) + len(self._writing)

    def add(self, chunk: Chunk) -> None:
        """The host tier has a chunk: it will be written, unless it is evicted before that."""
        if self._disk.is_usable and self._disk.get(chunk.key) is None:
            self._waiting[chunk.key] = chunk
            self._flushed.clear()
            self._wake()

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Writes chunks that the host tier stores."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.add(chunk)

    def removed(self, tier: str, chunk: CachedChunk) -> None:
        """Skips chunks that leave the host tier before they are written."""
        if tier == HOST and self._waiting.pop(chunk.key, None) is not None:
            self.skipped_count += 1

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """These are not to be on disk any more, even if they are just being written."""
        for key in keys:
            self._waiting.pop(key, None)
        self._writing.update({chunk: False for chunk in self._writing if chunk.key in keys})

    def give_up(self) -> None:
        """There is nowhere to write to. When there is, somebody will say again what to write."""
        self._waiting.clear()

    async def flush(self) -> None:
        """Returns once nothing waits to be written. As long as no folder can be used that may be never."""
        await self._flushed.wait()

    async def run(self, shelf: DiskVolume) -> None:
        """Writes to one folder, one chunk after the other, until cancelled."""
        while True:
            if chunk := self._take(shelf):
                await self._write(shelf, chunk)
                self._wake()  # another folder may wait to see whether this one has room
            else:
                if not self.waiting_count:
                    self._flushed.set()
                shelf.work.clear()
                await shelf.work.wait()

    def _take(self, shelf: DiskVolume) -> Chunk | None:
        """The chunk that has waited for longest, if this folder is the one to write it: where there is room, if any."""
        chunk = next(iter(self._waiting.values()), None)
        if chunk is None or not shelf.is_usable:
            return None
        size_bytes = align(chunk.size_bytes)
        if not shelf.has_room(size_bytes) and any(other.has_room(size_bytes) for other in self._disk.shelves):
            return None
        return self._waiting.pop(chunk.key)

    async def _write(self, shelf: DiskVolume, chunk: Chunk) -> None:
        """Writes one chunk, which stays where it is meanwhile."""
        if self._disk.get(chunk.key):
            return
        instead_of = shelf.index.reserve(chunk.size_bytes)
        if instead_of is None:
            self.skipped_count += 1
            return
        self._disk.evicted(instead_of)
        written = self._described(chunk)
        memory = self._pool.buffer[chunk.offset : chunk.offset + written.file_bytes]
        self._tier.hold([chunk])  # for good, if this is cancelled: the thread goes on reading
        self._writing[chunk] = True
        is_written = await shelf.write(written, memory, instead_of)
        is_wanted = self._writing.pop(chunk) and not chunk.dropped and not self._disk.get(chunk.key)
        self._tier.unhold([chunk])
        if not is_written:
            shelf.index.give_back(written.size_bytes)
        elif is_wanted and shelf.is_open:
            self._disk.stored(shelf, written)
            self.written_chunks += 1
            self.written_bytes += written.size_bytes
        else:
            shelf.index.give_back(written.size_bytes)
            self._disk.remove(shelf, [written])

    def _described(self, chunk: Chunk) -> DiskChunk:
        self._serial = max(self._serial + 1, time.time_ns())
        return DiskChunk(
            key=chunk.key,
            parent=chunk.parent,
            fingerprint=chunk.fingerprint,
            token_count=chunk.token_count,
            size_bytes=chunk.size_bytes,
            checksum=chunk.checksum,
            serial=self._serial,
        )

    def _wake(self) -> None:
        for shelf in self._disk.shelves:
            shelf.work.set()
