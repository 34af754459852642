"""Events of the cache: a chunk was stored in a tier, or removed from it. Pure.

One list of listeners serves all tiers: reports to coordinators, writers of secondary tiers, the ledger, handoffs.
"""

from __future__ import annotations

from typing import Protocol

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason


class CachedChunk(Protocol):
    """What all tiers know of a chunk. Events of the host tier carry a `host.Chunk`."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def token_count(self) -> int: ...
    @property
    def parent(self) -> ChunkKey | None: ...
    @property
    def prefix_digests(self) -> bytes: ...


class CacheListener(Protocol):
    """Receives events in their order, synchronously, on the node's loop. Must neither raise nor change the cache."""

    def stored(self, tier: str, chunk: CachedChunk, /) -> None:
        """The tier holds the chunk and can find it."""

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason, /) -> None:
        """The tier no longer finds the chunk, for this reason: it was evicted, dropped, or its backend failed."""


class CacheEvents:
    """The listeners of a node's tiers. It is itself the listener that each tier is given."""

    def __init__(self, *listeners: CacheListener) -> None:
        self._listeners = list(listeners)

    def subscribe(self, listener: CacheListener) -> None:
        """Adds a listener; events reach listeners in the order of their subscription."""
        self._listeners.append(listener)

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Sends the event to every listener."""
        for listener in self._listeners:
            listener.stored(tier, chunk)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        """Sends the event to every listener."""
        for listener in self._listeners:
            listener.removed(tier, chunk, reason)
