"""Why chunks left the pool and the tiers behind it. Pure; a listener of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable

from lmkv.keys import ChunkKey
from lmkv.misses import Loss, LossMemory, MissReason
from lmkv_server.node.cache.events import CachedChunk


class Losses:
    """The last loss of each chunk, from any tier. A chunk that left one tier may still be in another."""

    def __init__(self, memory: LossMemory | None = None, clock: Callable[[], float] = time.time) -> None:
        self._memory = LossMemory() if memory is None else memory
        self._clock = clock

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Forgets the loss of a chunk that is held again."""
        del tier
        self._memory.discard(chunk.key)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        """Records the loss of a chunk."""
        self._memory.add(chunk.key, tier, reason, self._clock())

    def get(self, key: ChunkKey) -> Loss | None:
        """The chunk's last loss; None if it was not stored, or is forgotten."""
        return self._memory.get(key)
