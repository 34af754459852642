"""Quotas in bytes of one tier, by owner: the salt, model and adapter of the prompts that chunks are of. Pure.

The pool, the disk tier and the remote tier have one each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from lmkv.keys import ChunkKey

SCANNED_AT_ONCE = 256
"""Number of chunks of an owner that are searched, at most twice, for a chunk to evict, whenever it stores one chunk."""


class OwnedChunk(Protocol):
    """A chunk of an owner."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def parent(self) -> ChunkKey | None: ...
    @property
    def owner(self) -> bytes: ...
    @property
    def extent_bytes(self) -> int:
        """Bytes of the tier that it takes."""


class EvictableChunks(Protocol):
    """The chunks of a tier: an `EvictionQueue`, or those of several backends."""

    def __contains__(self, key: ChunkKey, /) -> bool: ...

    def is_free(self, key: ChunkKey) -> bool:
        """Whether the chunk is here, and neither held, nor continued by another one, nor retained."""


class _Owned:
    """The chunks of one owner, least recently used first; of one prompt the last one first."""

    def __init__(self) -> None:
        self.line: OrderedDict[ChunkKey, int] = OrderedDict()  # and their bytes
        self.size_bytes = 0


class OwnerQuotas:
    """The chunks of each owner, and which of them leave if it has more than `limit_bytes`.

    Chunks without an owner count for none. Every call takes constant time for each chunk that it names or evicts.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Most bytes of one owner's chunks."""
        self._evicted_count = 0
        self._owners: dict[bytes, _Owned] = {}

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def evicted_count(self) -> int:
        """Chunks that were evicted because their owner had more."""
        return self._evicted_count

    def count_evicted(self) -> None:
        """Counts a chunk that is evicted because its owner has more."""
        self._evicted_count += 1

    @property
    def most_bytes(self) -> int:
        """Bytes of the owner that has most."""
        return max((owned.size_bytes for owned in self._owners.values()), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of the chunks of all owners."""
        return sum(owned.size_bytes for owned in self._owners.values())

    def used_bytes(self, owner: bytes) -> int:
        """Bytes of the owner's chunks."""
        return owned.size_bytes if (owned := self._owners.get(owner)) else 0

    def exceeds(self, owner: bytes) -> bool:
        """Whether the owner has more than its quota."""
        return self.used_bytes(owner) > self.limit_bytes

    def add(self, chunk: OwnedChunk) -> None:
        """Adds a chunk, if it has an owner, that is not there."""
        if chunk.owner:
            owned = self._owners.setdefault(chunk.owner, _Owned())
            assert chunk.key not in owned.line, "added twice"
            owned.line[chunk.key] = chunk.extent_bytes
            owned.size_bytes += chunk.extent_bytes

    def remove(self, chunk: OwnedChunk) -> None:
        """Removes a chunk, if it has an owner."""
        if (owned := self._owners.get(chunk.owner)) and (size_bytes := owned.line.pop(chunk.key, None)) is not None:
            owned.size_bytes -= size_bytes
            if not owned.line:
                del self._owners[chunk.owner]

    def use(self, chunks: Iterable[OwnedChunk]) -> None:
        """Notes a use of chunks of a prompt, in its order: the first one becomes the youngest."""
        for chunk in reversed(list(chunks)):
            if (owned := self._owners.get(chunk.owner)) and chunk.key in owned.line:
                owned.line.move_to_end(chunk.key)

    def surplus(self, stored: OwnedChunk, chunks: EvictableChunks) -> Iterator[ChunkKey]:
        """Yields chunks to evict, oldest first, until the owner of a stored chunk is within its quota.

        The caller removes each. Those that are not free stay, and are looked at again after the others. If none is
        free, the stored chunk itself leaves; also if the chunk before it has left, so that it cannot be found.
        """
        is_behind_a_gap = stored.parent not in (None, stored.owner) and stored.parent not in chunks
        if not is_behind_a_gap:
            yield from self._oldest(stored, chunks)
        if self.exceeds(stored.owner) and (is_behind_a_gap or chunks.is_free(stored.key)):
            yield stored.key
            yield from self._oldest(stored, chunks)  # those that only the stored chunk has kept

    def _oldest(self, stored: OwnedChunk, chunks: EvictableChunks) -> Iterator[ChunkKey]:
        """Yields chunks other than the stored one, as `surplus` does."""
        for _ in range(SCANNED_AT_ONCE):
            if not self.exceeds(stored.owner):
                return
            line = self._owners[stored.owner].line
            key = next(iter(line))
            line.move_to_end(key)
            if key != stored.key and chunks.is_free(key):
                yield key

    def check(self, chunks: Iterable[OwnedChunk]) -> None:
        """Asserts that these are all chunks, and that bytes add up."""
        owned = {(chunk.owner, chunk.key): chunk.extent_bytes for chunk in chunks if chunk.owner}
        found = {(owner, key): size for owner, one in self._owners.items() for key, size in one.line.items()}
        assert owned == found
        assert all(one.size_bytes == sum(one.line.values()) > 0 for one in self._owners.values())
