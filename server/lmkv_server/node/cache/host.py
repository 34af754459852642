"""The chunks in the node's pool: found by prefix, kept by holds, evicted by policy. Pure; one event loop calls it.

free ──reserve──► reserved ──commit──► held ──evict, drop──► free
                     └──give_back──► free       (a hold delays the last step until it ends)

Chunks that an earlier process left in the pool are reserved at their offset, verified, and committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from lmkv.errors import GrantNotFound
from lmkv.keys import ChunkKey
from lmkv.kv_inputs import KvInputs
from lmkv.misses import MissReason
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import FreeList, align
from lmkv_server.node.cache.events import CacheListener
from lmkv_server.node.cache.eviction import EvictionPolicy, EvictionQueue
from lmkv_server.node.cache.quotas import OwnerQuotas


class HasSize(Protocol):
    """An item with a size."""

    @property
    def size_bytes(self) -> int: ...


Item = TypeVar("Item", bound=HasSize)


def batched(items: Iterable[Item], size_bytes: int, max_count: int = 1 << 30) -> Iterator[list[Item]]:
    """The items in order, in batches that each end with the item that reaches `size_bytes` or `max_count`."""
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        batch.append(item)
        batch_bytes += item.size_bytes
        if batch_bytes >= size_bytes or len(batch) >= max_count:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """An extent that may be written to; its content is undefined."""

    offset: int
    size_bytes: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The way by which chunks came into the pool. Many chunks share one."""

    tier: str = ""
    """The tier that they were read from; empty if an engine of this node has stored them."""
    channel: str = ""
    """The channel by which they were transferred, if they were."""
    peer_id: str = ""
    """The instance that they came from; empty if it was none."""
    writers: Sequence[KvInputs] = ()
    """The inputs of the engine that has stored them; or of engines that may have; empty if none is known."""

    @property
    def writer(self) -> KvInputs | None:
        """The inputs of the engine that has stored them, if it is known; peers name engines that may have."""
        return self.writers[0] if len(self.writers) == 1 and not self.peer_id else None


UNKNOWN_ORIGIN = Origin()


@dataclass(kw_only=True, slots=True, eq=False)
class Chunk:
    """A chunk and where its bytes are."""

    key: ChunkKey
    fingerprint: bytes
    offset: int
    size_bytes: int
    checksum: int
    token_count: int
    tier: HostTier = field(init=False)
    """The tier that it was committed to."""
    generation: int = 0
    """The generation of the reservation that it was committed to."""
    holds: int = 0
    """Number of grants and pins that keep the bytes in place."""
    pins: int = 0
    """Number of holds that are pins, which keep the chunk in the index, too."""
    parent: ChunkKey | None = None
    """The chunk before it in its prompts, if that is known."""
    prefix_digests: bytes = b""
    """`lmkv.keys.prefix_digests` of a chunk in which prompts end, if they are known; else empty."""
    owner: bytes = b""
    """Whose quota it takes: the root of its key chain; empty: no one's."""
    origin: Origin = UNKNOWN_ORIGIN
    """The way by which it came into the pool."""
    arrived_at: float = field(default_factory=time.monotonic)
    """When it came, on the clock of `time.monotonic`."""
    dropped: bool = False
    """Whether it left the index, and only its holds keep the bytes."""
    extent_bytes: int = field(init=False)
    """Bytes of the pool that it takes."""

    def __post_init__(self) -> None:
        self.extent_bytes = align(self.size_bytes)


class HostTier:
    """Chunks in a pool of `size_bytes`, or in an engine's device buffer. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        size_bytes: int,
        listener: CacheListener | None = None,
        policy: EvictionPolicy | None = None,
        *,
        region: int = 0,
        quota_bytes: int = 0,
    ) -> None:
        """`quota_bytes`: most bytes of the chunks of one owner; 0: no limit."""
        self.region = region
        """The memory that its offsets are in, as in `Extent.region`."""
        self._free = FreeList(size_bytes)
        self._listener = listener
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._queue = EvictionQueue(policy)
        self.quotas = OwnerQuotas(quota_bytes) if quota_bytes else None
        """Bytes by owner, if they are limited."""
        self._reserved: dict[int, Reservation] = {}
        self._generation = 0
        self._chunk_bytes = 0
        self._evicted_count = 0
        self.on_supersede: Callable[[ChunkKey], None] = lambda _: None
        """Called with each chunk that is superseded."""
        self.sealed = False
        """Whether nothing may be overwritten, because a worker of an earlier process may read or write the pool."""

    @property
    def size_bytes(self) -> int:
        """Bytes that chunks may take in all."""
        return self._free.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that chunks and reservations take."""
        return self._free.size_bytes - self._free.free_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunks in the index. Other used bytes are reserved, or kept by holds."""
        return self._chunk_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are reserved, and neither committed nor released."""
        return sum(reserved.size_bytes for reserved in self._reserved.values())

    @property
    def reserved_count(self) -> int:
        """Extents that are reserved, and neither committed nor released."""
        return len(self._reserved)

    @property
    def evicted_count(self) -> int:
        """Chunks evicted for room since the start."""
        return self._evicted_count

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def get(self, key: ChunkKey) -> Chunk | None:
        """The chunk, if it is held. Does not count as a use."""
        return self._chunks.get(key)

    def find(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        """The chunks of the longest prefix of `keys` that is held without a gap; counts as a use of each."""
        found = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            found.append(chunk)
        self.use(found, keys[len(found) :])
        return found

    def prefix_length(self, keys: Sequence[ChunkKey], fingerprint: bytes) -> int:
        """Counts the keys that are held, as chunks of one spec, from the first on without a gap. Does not count as a
        use."""
        chunks = self._chunks
        for count, key in enumerate(keys):
            chunk = chunks.get(key)
            if chunk is None or chunk.fingerprint != fingerprint:
                return count
        return len(keys)

    def flags(self, keys: Sequence[ChunkKey], fingerprint: bytes) -> bytes:
        """Returns a byte for each key: 1 if it is held as a chunk of the spec, else 0. Does not count as a use."""
        chunks = self._chunks
        if chunks.keys().isdisjoint(keys):
            return bytes(len(keys))
        found = map(chunks.get, keys)
        return bytes(chunk is not None and chunk.fingerprint == fingerprint for chunk in found)

    def use(self, chunks: Iterable[Chunk], absent: Sequence[ChunkKey] = ()) -> None:
        """Notes a use of chunks of a prompt, in its order, that are in the index; `absent` are those behind them."""
        used = list(chunks)
        self._queue.use([chunk.key for chunk in used], absent)
        if self.quotas is not None:
            self.quotas.use(used)

    def supersede(self, key: ChunkKey) -> None:
        """Has the chunk, if it is here and not used again, evicted before others."""
        if key in self._chunks:
            self._queue.supersede(key)
            self.on_supersede(key)

    def demote(self, key: ChunkKey) -> None:
        """Has a chunk that is here, and that another tier keeps, evicted from here before others, unless it is used."""
        self._queue.supersede(key)

    def retain(self, keys: Iterable[ChunkKey], priority: int) -> None:
        """Has chunks that are here evicted after all that are not retained, until `release`."""
        for key in keys:
            self._queue.retain(key, priority)

    def release(self, key: ChunkKey) -> None:
        """Ends the retention of a chunk, if it is here and retained."""
        self._queue.release(key)

    def own_tail(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        """Returns the chunks of a prompt, all indexed, that no other prompt continues and no pin keeps, last first."""
        kept = {key for key in keys if self._chunks[key].pins}
        return [self._chunks[key] for key in self._queue.tail(keys, kept)]

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """Keeps the bytes of the chunks, each in its own tier, in place until as many `unhold`s."""
        for chunk in chunks:
            chunk.holds += 1
            if not chunk.dropped:
                chunk.tier._queue.hold(chunk.key)

    def unhold(self, chunks: Iterable[Chunk]) -> None:
        """Ends one hold on each chunk."""
        for chunk in chunks:
            assert chunk.holds > 0, "unhold without hold"
            chunk.holds -= 1
            if not chunk.dropped:
                chunk.tier._queue.unhold(chunk.key)
            elif not chunk.holds:
                chunk.tier._free.give(chunk.offset, chunk.extent_bytes)

    def pin(self, chunks: Collection[Chunk]) -> None:
        """Holds the chunks and keeps them from `clear`, until as many `unpin`s."""
        self.hold(chunks)
        for chunk in chunks:
            chunk.pins += 1

    def unpin(self, chunks: Collection[Chunk]) -> None:
        """Ends one pin on each chunk."""
        for chunk in chunks:
            assert chunk.pins > 0, "unpin without pin"
            chunk.pins -= 1
        self.unhold(chunks)

    def reserve(self, size_bytes: int, *, evict: MissReason | None = MissReason.EVICTED_BY_STORE) -> Reservation | None:
        """Reserves an extent, evicting chunks without holds; None if these do not make room, or if sealed.

        `evict` is why the others are evicted; None: only free memory is used.
        """
        size = align(size_bytes)
        if self.sealed or size > self._free.size_bytes:
            return None
        while (offset := self._free.take(size)) is None:
            if evict is None or (key := self._queue.pop()) is None:
                return None
            self._forget(self._chunks[key], evict)
            self._evicted_count += 1
        return self._reserve(offset, size)

    def keep_quota(self, stored: Chunk) -> None:
        """Evicts other chunks of the owner of a chunk that was just stored until it is within its quota.

        Those that are held, retained, or continued by others stay, and the stored one leaves if none else can; or if
        the chunk before it has left for the same reason, so that it cannot be found.
        """
        if self.quotas is None:
            return
        for key in self.quotas.surplus(stored, self._queue):
            self.quotas.count_evicted()
            self._queue.remove(key)
            self._forget(self._chunks[key], MissReason.EVICTED_BY_STORE)
            self._evicted_count += 1

    def adopt(self, chunks: Iterable[Chunk], owner: bytes) -> None:
        """Counts those of the chunks, all indexed, that have no owner towards the quota of this one."""
        if self.quotas is None:
            return
        for chunk in chunks:
            if not chunk.owner and chunk.tier is self:
                chunk.owner = owner
                self.quotas.add(chunk)

    def has_room(self, size_bytes: int) -> bool:
        """Whether an extent of this size can be reserved without an eviction."""
        return not self.sealed and align(size_bytes) <= self._free.longest_bytes

    def reserve_at(self, offset: int, size_bytes: int) -> Reservation | None:
        """Reserves the extent at `offset`, whose content is kept; None if a part of it is taken."""
        return self._reserve(offset, align(size_bytes)) if self._free.take_at(offset, size_bytes) else None

    def _reserve(self, offset: int, size_bytes: int) -> Reservation:
        self._generation += 1
        reserved = Reservation(offset=offset, size_bytes=size_bytes, generation=self._generation)
        self._reserved[offset] = reserved
        return reserved

    def commit(self, chunk: Chunk) -> Chunk | None:
        """Makes the bytes at the offset of a new chunk visible, which is reserved; whole pages of the extent beyond its
        `size_bytes` are freed.

        Its `parent` is not evicted before it, and need not be here. Returns the chunk; None if one of this key is held
        already: then the whole extent is freed. Raises `GrantNotFound` if nothing is reserved there, or too little.
        """
        key, offset, used = chunk.key, chunk.offset, chunk.extent_bytes
        reserved = self._reserved.get(offset)
        if reserved is None or chunk.size_bytes > reserved.size_bytes:
            raise GrantNotFound(f"no {chunk.size_bytes} bytes are reserved at offset {offset}", offset=offset)
        if key in self._chunks:
            self.give_back(offset)
            return None
        del self._reserved[offset]
        self._free.give(offset + used, reserved.size_bytes - used)
        chunk.tier, chunk.generation = self, reserved.generation
        self._chunks[key] = chunk
        self._queue.add(key, chunk.parent)
        self._chunk_bytes += used
        if self.quotas is not None:
            parent = self._chunks.get(chunk.parent) if chunk.parent else None
            chunk.owner = chunk.owner or (parent.owner if parent else b"")
            self.quotas.add(chunk)
        if self._listener:
            self._listener.stored(HOST, chunk)
        return chunk

    def give_back(self, offset: int) -> None:
        """Ends a reservation without a chunk. Raises `GrantNotFound` if nothing is reserved there."""
        reserved = self._reserved.pop(offset, None)
        if reserved is None:
            raise GrantNotFound(f"nothing is reserved at offset {offset}", offset=offset)
        self._free.give(offset, reserved.size_bytes)

    def end_at(self, offset: int) -> None:
        """Reserves nothing behind `offset` any more, where the pool's memory ends. Chunks there stay."""
        self._free.end_at(offset)

    def drop(self, keys: Iterable[ChunkKey], reason: MissReason = MissReason.DROPPED) -> int:
        """Drops the chunks, pinned or not; returns how many there were. Held bytes stay until the hold ends."""
        chunks = [chunk for key in keys if (chunk := self._chunks.get(key))]
        for chunk in chunks:
            self._queue.remove(chunk.key)
            self._forget(chunk, reason)
        return len(chunks)

    def _forget(self, chunk: Chunk, reason: MissReason) -> None:
        """Removes a chunk that has left the queue."""
        del self._chunks[chunk.key]
        self._chunk_bytes -= chunk.extent_bytes
        chunk.dropped = True
        if self.quotas is not None:
            self.quotas.remove(chunk)
        if not chunk.holds:
            self._free.give(chunk.offset, chunk.extent_bytes)
        if self._listener:
            self._listener.removed(HOST, chunk, reason)

    def check(self, dropped_on_hold: Iterable[Chunk] = ()) -> None:
        """Asserts that extents do not overlap and that every byte is free, reserved, held, or kept by a hold."""
        self._free.check()
        self._queue.check()
        assert len(self._queue) == len(self._chunks)
        chunks = [*self, *dropped_on_hold]
        assert all(0 <= chunk.pins <= chunk.holds for chunk in chunks)
        taken = [(chunk.offset, chunk.extent_bytes) for chunk in chunks]
        taken += [(r.offset, r.size_bytes) for r in self._reserved.values()]
        taken.sort()
        for (offset, size), (following, _) in pairwise(taken):
            assert offset + size <= following, "extents overlap"
        assert sum(size for _, size in taken) == self.used_bytes
        assert sum(chunk.extent_bytes for chunk in self) == self.chunk_bytes
        if self.quotas is not None:
            self.quotas.check(self)
