"""The chunks of one load: missing, arrived, delivered. Each tier adds the chunks that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Receives chunks with their indices; each has a hold that the callee ends."""


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
    ) -> None:
        self.spec = spec
        self.keys = keys
        self.in_order = in_order
        self.missing = set(range(first, len(keys)))
        """Indices of chunks that have not arrived."""
        self.handed_count = 0
        """Number of chunks delivered."""
        self.failures: dict[ChunkKey, LmkvError] = {}
        """Why reads of chunks failed; another read may have succeeded since."""
        self.changed = asyncio.Event()
        """Set when another load has read a chunk of this one, or failed to."""
        self.size_bytes = 0
        """Bytes of the chunks that arrived from peers."""
        self.instance_ids: dict[str, None] = {}
        """The peers that sent them, in order of first use."""
        self._tier = tier
        self._on_chunks = on_chunks
        self._next_index = first
        self._arrived: dict[int, Chunk] = {}
        self._closed = False

    @property
    def front(self) -> Collection[int]:
        """The missing chunks that would be delivered as soon as they arrive."""
        return {self._next_index} & self.missing if self.in_order else self.missing

    def add(self, chunks: Iterable[tuple[int, Chunk]], instance_id: str = "") -> None:
        """Adds chunks that are in the host tier now; `instance_id` is the peer that sent them, if any."""
        for index, chunk in chunks:
            if index in self.missing and not self._closed:
                self._take(index, chunk, instance_id)
        if due := self._due():
            self.handed_count += len(due)
            self._on_chunks(due)

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
            self.size_bytes += chunk.size_bytes
            self.instance_ids[instance_id] = None

    def find_own(self) -> None:
        """Adds missing chunks that are in the host tier by now."""
        found = ((index, self._tier.get(self.keys[index])) for index in sorted(self.missing))
        self.add([(index, chunk) for index, chunk in found if chunk and chunk.fingerprint == self.spec.fingerprint])

    def close(self) -> None:
        """Ends the holds on chunks that were not delivered. No chunk is added after this. Idempotent."""
        self._closed = True
        self._tier.unhold(self._arrived.values())
        self._arrived.clear()
