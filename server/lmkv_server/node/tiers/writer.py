"""Writes chunks of the host tier to the backends of a secondary tier, in the background. Used by `BackendTier`.

    stored ──► waiting ──► being written, and held meanwhile ──► written, or present already
                  └── evicted before its turn, no room, or refused: skipped

A waiting chunk is not held and is in the host tier, whose size therefore bounds the queue. A backend that is slower
than the engines skips chunks; it never delays an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.backend import Backend, WriteResult
from lmkv_server.node.tiers.base import TierStats


class TierWriter:
    """The chunks to write. One event loop owns it; `run` it once for each thread of each backend."""

    def __init__(
        self, backends: Sequence[Backend[Any]], tier: HostTier, pool: Pool, has: Callable[[ChunkKey], bool]
    ) -> None:
        """`has`: whether the secondary tier is known to hold a chunk."""
        self._backends = backends
        self._tier = tier
        self._pool = pool
        self._has = has
        self._waiting: dict[ChunkKey, Chunk] = {}  # oldest first
        self._writing: dict[Chunk, bool] = {}  # and whether it is still wanted; as many as there are threads at most
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._written_chunks = 0
        self._written_bytes = 0
        self._present_count = 0
        self._skipped_count = 0

    def stats(self) -> TierStats:
        """What was written, and what waits to be."""
        return TierStats(
            written_chunks=self._written_chunks,
            written_bytes=self._written_bytes,
            present_chunks=self._present_count,
            skipped_chunks=self._skipped_count,
            waiting_chunks=len(self._waiting) + len(self._writing),
        )

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Queues chunks that the host tier stores."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.add(chunk)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Skips chunks that leave the host tier before they are written."""
        if tier == HOST and self._waiting.pop(chunk.key, None) is not None:
            self._skipped_count += 1

    def add(self, chunk: Chunk) -> None:
        """Queues a chunk of the host tier, unless the secondary tier holds it or no backend is open."""
        if any(backend.health.is_open for backend in self._backends) and not self._has(chunk.key):
            self._waiting[chunk.key] = chunk
            self._flushed.clear()
            self._wake()

    def forget(self, is_selected: Callable[[Chunk], bool]) -> None:
        """Removes chunks from the queue; those that are being written are removed from the backend afterwards."""
        for chunk in [chunk for chunk in self._waiting.values() if is_selected(chunk)]:
            del self._waiting[chunk.key]
        self._writing.update({chunk: False for chunk in self._writing if is_selected(chunk)})

    async def flush(self) -> None:
        """Returns once no chunk waits. While no backend is writable that may be never."""
        await self._flushed.wait()

    async def run(self, backend: Backend[Any]) -> None:
        """Writes to one backend, one chunk at a time, until cancelled."""
        while True:
            if chunk := self._next(backend):
                await self._write(backend, chunk)
                self._wake()  # another backend may wait to see whether this one has room
            else:
                if not (self._waiting or self._writing):
                    self._flushed.set()
                backend.health.work.clear()
                await backend.health.work.wait()

    def clear(self) -> None:
        """Empties the queue, because no backend is open. A backend that is opened adds the chunks again."""
        self._waiting.clear()

    def _next(self, backend: Backend[Any]) -> Chunk | None:
        """Takes the oldest waiting chunk, unless another backend has room for it and this one has not."""
        chunk = next(iter(self._waiting.values()), None)
        if chunk is None or not backend.writable:
            return None
        size_bytes = align(chunk.size_bytes)
        if not backend.has_room(size_bytes) and any(other.has_room(size_bytes) for other in self._backends):
            return None
        return self._waiting.pop(chunk.key)

    async def _write(self, backend: Backend[Any], chunk: Chunk) -> None:
        if self._has(chunk.key):
            return
        self._tier.hold([chunk])  # for good if this is cancelled: the thread continues to read
        self._writing[chunk] = True
        memory = self._pool.buffer[chunk.offset : chunk.offset + align(chunk.size_bytes)]
        result = await backend.write(chunk, memory, lambda: self._writing[chunk])
        del self._writing[chunk]
        self._tier.unhold([chunk])
        if result is WriteResult.WRITTEN:
            self._written_chunks += 1
            self._written_bytes += chunk.size_bytes
        self._present_count += result is WriteResult.PRESENT
        self._skipped_count += result is WriteResult.SKIPPED

    def _wake(self) -> None:
        for backend in self._backends:
            backend.health.work.set()
