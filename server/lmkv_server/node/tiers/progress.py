"""The chunks of one load: missing, arrived, delivered. Each tier adds the chunks that it reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.prompt import Items
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Receives chunks with their indices; each has a hold that the callee ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The outcome of one load."""

    chunk_count: int
    """Chunks that were delivered."""
    size_bytes: int
    """Bytes of those that came from peers."""
    seconds: float
    instance_ids: tuple[str, ...]
    """Peers that sent any, in order of first use."""
    error: LmkvError | None
    """Why chunks are missing, if there was an error; that no tier holds a chunk any more is not an error."""


class Progress:
    """The chunks of one load. An arrived chunk is held, and delivered once all chunks before it have arrived.

    Without `in_order` each chunk is delivered when it arrives.
    """

    def __init__(
        self,
        tier: HostTier,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        first: int,
        on_chunks: OnChunks,
        *,
        in_order: bool = True,
        evict: bool = True,
        evict_reason: MissReason = MissReason.EVICTED_BY_FETCH,
        items: Items | None = None,
    ) -> None:
        """`evict`: whether other chunks may be evicted to make room for those from peers; `evict_reason`: why they are.

        `items`: what the keys are, if their prompt is known.
        """
        self.spec = spec
        self.keys = keys
        self.in_order = in_order
        self.evict = evict
        self.evict_reason = evict_reason
        self.items = items
        self.stops_at_gap = in_order and spec.matches_prefixes
        """Whether a chunk is of no use if one before it cannot be had. Items come from several tiers, in any order."""
        self.missing = set(range(first, len(keys)))
        """Indices of chunks that have not arrived."""
        self.failures: dict[ChunkKey, LmkvError] = {}
        """Why reads of chunks failed; another read may have succeeded since."""
        self.changed = asyncio.Event()
        """Set when another load has read a chunk of this one, or failed to."""
        self._tier = tier
        self._on_chunks = on_chunks
        self._next_index = first
        self._arrived: dict[int, Chunk] = {}
        self._closed = False
        self._began = time.monotonic()
        self._handed_count = 0
        self._peer_bytes = 0
        self._instance_ids: dict[str, None] = {}

    @property
    def front(self) -> Collection[int]:
        """The missing chunks that would be delivered as soon as they arrive."""
        return {self._next_index} & self.missing if self.stops_at_gap else self.missing

    @property
    def mean_bytes(self) -> int:
        """Average size of the chunks."""
        if self.items:
            return self.items.mean_bytes
        return max(1, self.spec.chunk_bytes // len(self.spec.parts))

    def size_bytes(self, index: int) -> int | None:
        """Exact size of a chunk; None if it depends on the number of its tokens, or its part is not known."""
        return self.items.sizes[index] if self.items and not self.spec.matches_prefixes else None

    def parent(self, index: int) -> ChunkKey | None:
        """The key of what must not be evicted before a chunk; None if there is none or it is unknown."""
        if self.items:
            return self.items.parent(index)
        return self.keys[index - 1] if index and self.spec.matches_prefixes else None

    def held_by(self, matched_count: int) -> Collection[int]:
        """The chunks that a holder of the first `matched_count` chunks of the prompt may hold."""
        return self.items.below(matched_count) if self.items else range(matched_count)

    def result(self, error: LmkvError | None = None) -> Loaded:
        """What has been delivered by now; `error` is why chunks are missing, if any are."""
        return Loaded(
            chunk_count=self._handed_count,
            size_bytes=self._peer_bytes,
            seconds=time.monotonic() - self._began,
            instance_ids=tuple(self._instance_ids),
            error=error if self.missing else None,
        )

    def add(self, chunks: Iterable[tuple[int, Chunk]], instance_id: str = "") -> None:
        """Adds chunks that are in the host tier now; `instance_id` is the peer that sent them, if any."""
        for index, chunk in chunks:
            if index in self.missing and not self._closed and self._fits(index, chunk):
                self._take(index, chunk, instance_id)
        if due := self._due():
            self._handed_count += len(due)
            self._on_chunks(due)

    def _fits(self, index: int, chunk: Chunk) -> bool:
        size_bytes = self.size_bytes(index)
        return size_bytes is None or (chunk.fingerprint == self.spec.fingerprint and chunk.size_bytes == size_bytes)

    def _due(self) -> list[tuple[int, Chunk]]:
        """Removes and returns the chunks to deliver now."""
        if not self.in_order:
            due, self._arrived = list(self._arrived.items()), {}
            return due
        due = []
        while self._next_index in self._arrived:
            due.append((self._next_index, self._arrived.pop(self._next_index)))
            self._next_index += 1
        return due

    def _take(self, index: int, chunk: Chunk, instance_id: str) -> None:
        self.missing.discard(index)
        self._tier.hold([chunk])
        self._arrived[index] = chunk
        if instance_id:
            self._peer_bytes += chunk.size_bytes
            self._instance_ids[instance_id] = None

    def find_own(self) -> None:
        """Adds missing chunks that are in the host tier by now."""
        found = ((index, self._tier.get(self.keys[index])) for index in sorted(self.missing))
        self.add([(index, chunk) for index, chunk in found if chunk and chunk.fingerprint == self.spec.fingerprint])

    def close(self) -> None:
        """Ends the holds on chunks that were not delivered. No chunk is added after this. Idempotent."""
        self._closed = True
        self._tier.unhold(self._arrived.values())
        self._arrived.clear()
