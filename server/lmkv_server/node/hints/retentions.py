"""Retained chunks: evicted after others before a time. Pure; a `CacheListener`. Used by `HintExecutor`.

retain ──► retained ──┬── expire ──────────► as just used
  └─again: longer     └── evicted, dropped ─► forgotten       A chunk has one retention: the longest and the highest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The retention of one chunk."""

    expire_at: float
    priority: int
    owner: bytes
    """The owner whose quota it takes: the first that has retained the chunk."""
    size_bytes: int


class Retentions:
    """The retained chunks of one host tier, at most `limit_bytes`, and half of that, or its quota, for one owner."""

    def __init__(self, tier: HostTier, limit_bytes: int) -> None:
        self._tier = tier
        self._limit_bytes = limit_bytes
        quota_bytes = limit_bytes if tier.quotas is None else tier.quotas.limit_bytes
        self._owner_limit_bytes = min(limit_bytes // 2, quota_bytes)
        self._retained: dict[ChunkKey, Retention] = {}
        self._owner_bytes: Counter[bytes] = Counter()
        self._due: list[tuple[float, ChunkKey]] = []  # heap; entries whose time is not that of `_retained` are void

    def __len__(self) -> int:
        return len(self._retained)

    @property
    def size_bytes(self) -> int:
        """Bytes of the retained chunks."""
        return self._owner_bytes.total()

    def room(self, chunks: Sequence[Chunk], owner: bytes) -> int:
        """Counts the first of these chunks that the quota has room for."""
        room = min(self._limit_bytes - self.size_bytes, self._owner_limit_bytes - self._owner_bytes[owner])
        for count, chunk in enumerate(chunks):
            room -= 0 if chunk.key in self._retained else align(chunk.size_bytes)
            if room < 0:
                return count
        return len(chunks)

    def retain(self, chunks: Sequence[Chunk], owner: bytes, priority: int, expire_at: float) -> None:
        """Retains chunks that are in the index and that there is `room` for.

        A chunk that is retained already stays so at least as long, and at least at its priority.
        """
        for chunk in chunks:
            self._add(chunk, owner, priority, expire_at)

    def _add(self, chunk: Chunk, owner: bytes, priority: int, expire_at: float) -> None:
        known = self._retained.get(chunk.key)
        size_bytes = align(chunk.size_bytes)
        if known is None:
            self._owner_bytes[owner] += size_bytes
        else:
            owner, priority, expire_at = known.owner, max(priority, known.priority), max(expire_at, known.expire_at)
        retention = Retention(expire_at=expire_at, priority=priority, owner=owner, size_bytes=size_bytes)
        self._retained[chunk.key] = retention
        if known is None or known.priority != priority:
            self._tier.retain([chunk.key], priority)
        if known is None or known.expire_at != expire_at:
            self._push(chunk.key, expire_at)

    def end(self, key: ChunkKey) -> None:
        """Ends the retention of a chunk early. Idempotent."""
        if key in self._retained:
            self._forget(key)
            self._tier.release(key)

    def expire(self, now: float) -> int:
        """Ends the retentions whose time is up; their number."""
        count = 0
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            if key in self._retained and self._retained[key].expire_at == at:
                self.end(key)
                count += 1
        return count

    def next_expiry(self) -> float | None:
        """Returns when the next retention expires; None if nothing is retained."""
        return self._due[0][0] if self._due else None

    # --- `CacheListener` -----------------------------------------------------------------------------------------

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Nothing: a chunk is retained by a hint about it."""

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Forgets a chunk that has left the pool."""
        if tier == HOST:
            self._forget(chunk.key)

    def _forget(self, key: ChunkKey) -> None:
        retention = self._retained.pop(key, None)
        if retention is None:
            return
        self._owner_bytes[retention.owner] -= retention.size_bytes
        if not self._owner_bytes[retention.owner]:
            del self._owner_bytes[retention.owner]

    def _push(self, key: ChunkKey, expire_at: float) -> None:
        heapq.heappush(self._due, (expire_at, key))
        if len(self._due) > 2 * len(self._retained) + 16:
            self._due = [(one.expire_at, each) for each, one in self._retained.items()]
            heapq.heapify(self._due)

    def check(self) -> None:
        """Asserts that bytes add up within the limits, and that each retention has an end."""
        sizes: Counter[bytes] = Counter()
        for retention in self._retained.values():
            sizes[retention.owner] += retention.size_bytes
        assert sizes == self._owner_bytes
        assert self.size_bytes <= self._limit_bytes
        assert {(one.expire_at, key) for key, one in self._retained.items()} <= set(self._due)
        assert all(self._tier.get(key) is not None for key in self._retained)
