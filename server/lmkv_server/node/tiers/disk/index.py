"""Which chunks one folder of the disk tier holds, within a limit. Pure; used by `DiskVolume`.

free ──reserve──► reserved ──admit──► held ──reserve for another, remove──► gone
                     └──give_back──► free
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import EvictionQueue
from lmkv_server.node.tiers.disk.chunk import DiskChunk


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
