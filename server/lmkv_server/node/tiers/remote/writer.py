"""Puts what the host tier gains into the remote store, behind everybody's back. Used by `RemoteTier`.

    admitted ──► waiting ──► being put, and held meanwhile ──► in the store, by this node or another
                    └── evicted before its turn, or refused: skipped

What waits holds nothing and is in the host tier, so the host tier bounds it. A store that is slower than the engines
loses chunks; it never makes anybody wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.events import HOST, CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.remote.chunk import RemoteObject, object_name

if TYPE_CHECKING:
    from lmkv_server.node.tiers.remote.tier import RemoteTier


class RemoteWriter:
    """The chunks that are to be put. One loop owns it; `run` it for every thread."""

    def __init__(self, remote: RemoteTier, tier: HostTier, pool: Pool) -> None:
        self.written_chunks = 0
        """Chunks put since the start."""
        self.written_bytes = 0
        """Bytes of these."""
        self.present_count = 0
        """Chunks that were in the store already."""
        self.skipped_count = 0
        """Chunks that left the host tier before they were put, or that the store did not take."""
        self._remote = remote
        self._tier = tier
        self._pool = pool
        self._waiting: dict[ChunkKey, Chunk] = {}  # oldest first
        self._writing: dict[Chunk, bool] = {}  # and whether it is still wanted; never more than there are threads
        self._flushed = asyncio.Event()
        self._flushed.set()

    @property
    def waiting_count(self) -> int:
        """Chunks that wait to be put, or are being put."""
        return len(self._waiting) + len(self._writing)

    def add(self, chunk: Chunk) -> None:
        """The host tier has a chunk: it will be put, unless it is evicted before that, or just came from there."""
        if self._remote.link.is_open and not self._remote.knows(chunk.key):
            self._waiting[chunk.key] = chunk
            self._flushed.clear()
            self._remote.link.work.set()

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Writes chunks that the host tier stores."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.add(chunk)

    def removed(self, tier: str, chunk: CachedChunk) -> None:
        """Skips chunks that leave the host tier before they are written."""
        if tier == HOST and self._waiting.pop(chunk.key, None) is not None:
            self.skipped_count += 1

    def forget(self, is_meant: Callable[[Chunk], bool]) -> None:
        """These are not to be in the store any more, even if they are just being put."""
        for chunk in [chunk for chunk in self._waiting.values() if is_meant(chunk)]:
            del self._waiting[chunk.key]
        self._writing.update({chunk: False for chunk in self._writing if is_meant(chunk)})

    def give_up(self) -> None:
        """The store is gone. When it is back, somebody will say again what to put."""
        self._waiting.clear()

    async def flush(self) -> None:
        """Returns once nothing waits to be put. As long as the store takes nothing that may be never."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Puts one chunk after the other, until cancelled."""
        link = self._remote.link
        while True:
            if self._waiting and link.takes_more:
                await self._write(self._waiting.pop(next(iter(self._waiting))))
            else:
                if not self.waiting_count:
                    self._flushed.set()
                link.work.clear()
                await link.work.wait()

    async def _write(self, chunk: Chunk) -> None:
        """Puts one chunk, which stays where it is meanwhile."""
        name = object_name(chunk.fingerprint, chunk.key)
        header = RemoteObject(
            key=chunk.key,
            parent=chunk.parent,
            fingerprint=chunk.fingerprint,
            token_count=chunk.token_count,
            size_bytes=chunk.size_bytes,
            checksum=chunk.checksum,
        ).header
        self._tier.hold([chunk])  # for good, if this is cancelled: the thread goes on reading
        self._writing[chunk] = True
        is_new = await self._remote.link.write(
            name, header, self._pool.buffer[chunk.offset : chunk.offset + chunk.size_bytes]
        )
        is_wanted = self._writing.pop(chunk)
        self._tier.unhold([chunk])
        if is_new is None:
            self.skipped_count += 1
        elif not is_wanted:
            self._remote.remove([name])
        elif is_new:
            self.written_chunks += 1
            self.written_bytes += chunk.size_bytes
        else:
            self.present_count += 1
