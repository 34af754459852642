"""Which chunks one folder of the disk tier holds, within a limit. Pure; used by `DiskVolume`.

free ──reserve──► reserved ──admit──► held ──reserve for another, remove──► gone
                     └──give_back──► free
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.eviction import EvictionQueue
from lmkv_server.node.tiers.disk.chunk import DiskChunk


class DiskIndex:
    """The chunks of one folder that may take `capacity_bytes`. Not thread-safe: one loop owns it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        """What chunks may take now: less than the capacity where the disk turned out to be full."""
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
        """Chunks of a prompt, in its order, were used; those of them that are held here."""
        self._queue.use([key for key in keys if key in self._chunks])

    def reserve(self, size_bytes: int) -> list[DiskChunk] | None:
        """Makes room for a chunk; those that had to go for it. None if there can be no room now."""
        size = align(size_bytes)
        if self._reserved_bytes + size > self.limit_bytes:
            return None
        self._reserved_bytes += size
        return self._shrunk()

    def admit(self, chunk: DiskChunk) -> None:
        """What room was reserved for is there. The chunk must not be held already."""
        assert chunk.key not in self._chunks, "held already"
        self._reserved_bytes -= chunk.file_bytes
        self._insert(chunk)

    def give_back(self, size_bytes: int) -> None:
        """What room was reserved for does not come."""
        self._reserved_bytes -= align(size_bytes)

    def fill(self, chunks: Iterable[DiskChunk]) -> list[DiskChunk]:
        """Takes over what the folder held when it was opened, oldest first; what is too much of it, or there twice."""
        twice = []
        for chunk in chunks:
            if known := self.remove(chunk.key):
                twice.append(known)
            self._insert(chunk)
        return twice + self._shrunk()

    def remove(self, key: ChunkKey) -> DiskChunk | None:
        """Forgets the chunk; None if it is not held."""
        if key not in self._chunks:
            return None
        self._queue.remove(key)
        return self._forget(key)

    def full(self) -> None:
        """The disk has no more room than for what is there."""
        self.limit_bytes = min(self.limit_bytes, self._chunk_bytes)

    def _insert(self, chunk: DiskChunk) -> None:
        self._chunks[chunk.key] = chunk
        self._queue.add(chunk.key, chunk.parent)
        self._chunk_bytes += chunk.file_bytes

    def _forget(self, key: ChunkKey) -> DiskChunk:
        """Ends a chunk that is out of the queue."""
        chunk = self._chunks.pop(key)
        self._chunk_bytes -= chunk.file_bytes
        return chunk

    def _shrunk(self) -> list[DiskChunk]:
        """Forgets what has to go until the limit is kept, and returns it."""
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
