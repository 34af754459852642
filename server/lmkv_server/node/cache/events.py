"""Events of the cache: a chunk was stored in a tier, or removed from it. Pure.

One list of listeners serves all tiers: reports to coordinators, writers of secondary tiers, the ledger, handoffs, and
the two listeners here. `PartialChunks` indexes the chunks in which prompts end, by the chunk before them, in memory and
on disk; it has no tokens. A prompt finds two kinds of chunks behind its last full chunk (`Prompt.tails`): partial ones
that it continues, by their key, which it computes for each length that there is; and chunks that begin as it does, by
their prefix digests. A prompt costs at most as many keys as a chunk has tokens, however many chunks are behind the same
one. `Losses` remembers why chunks left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from lmkv.end_index import EndIndex
from lmkv.keys import ChunkKey, part_key
from lmkv.misses import Loss, LossMemory, MissReason
from lmkv.spec import KvSpec


class CachedChunk(Protocol):
    """A chunk with the properties that all tiers know. Events of the host tier carry a `host.Chunk`."""

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


class PartialChunks:
    """The chunks with ends of prompts of the specs that engines have attached with. One event loop owns it."""

    def __init__(self, tiers: Mapping[str, Iterable[CachedChunk]] | None = None) -> None:
        """`tiers`, by name, are read when a spec is added: they may have its chunks already."""
        self._tiers = dict(tiers or {})
        self._specs: dict[bytes, KvSpec] = {}
        self.index: EndIndex[tuple[str, ChunkKey]] = EndIndex()
        self.on_found: Callable[[str, CachedChunk], None] = lambda _, __: None
        """Called with each chunk that was found when its spec was added."""

    @property
    def chunk_count(self) -> int:
        """Partial chunks in all tiers together."""
        return len(self.index)

    def add_tier(self, name: str, chunks: Iterable[CachedChunk]) -> None:
        """Adds a tier that is read when a spec is added."""
        self._tiers[name] = chunks

    def add_spec(self, spec: KvSpec) -> None:
        """Has partial chunks of a spec indexed, those that the tiers hold included. Idempotent."""
        if spec.fingerprint in self._specs or not spec.ends_anywhere:
            return
        self._specs[spec.fingerprint] = spec
        for name, chunks in self._tiers.items():
            for chunk in chunks:
                if chunk.fingerprint == spec.fingerprint and self._has_ends(chunk):
                    self.stored(name, chunk)
                    self.on_found(name, chunk)

    def remove_spec(self, fingerprint: bytes) -> None:
        """Has the chunks of a spec no longer indexed; those that are, are until they are removed. Idempotent."""
        self._specs.pop(fingerprint, None)

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Adds a chunk that a tier has stored, if prompts end in it and its parent is known."""
        if chunk.parent is not None and self._has_ends(chunk):
            self.index.add((tier, chunk.key), chunk.parent, chunk.token_count, chunk.prefix_digests)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Removes a chunk that a tier no longer holds."""
        self.index.remove((tier, chunk.key))

    def _has_ends(self, chunk: CachedChunk) -> bool:
        """Whether prompts end in a chunk. Other parts of it than part 0 are not indexed: they have it as parent."""
        spec = self._specs.get(chunk.fingerprint)
        if spec is None or not (chunk.token_count < spec.chunk_size or chunk.prefix_digests):
            return False
        parent, others = chunk.parent, range(1, len(spec.parts))
        return parent is None or all(chunk.key != part_key(parent, part) for part in others)

    def check(self) -> None:
        """Asserts the invariants of the index."""
        self.index.check()
