"""Index of the chunks in which prompts end, by the chunk before them, in memory and on disk. Pure; a `CacheListener`.

The index has no tokens. A prompt finds two kinds of chunks behind its last full chunk (`Prompt.tails`): partial ones
that it continues, by their key, which it computes for each length that there is; and chunks that begin as it does, by
their prefix digests. A prompt costs at most as many keys as a chunk has tokens, however many chunks are behind the same
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lmkv.keys import ChunkKey, part_key
from lmkv.misses import MissReason
from lmkv.prompt import EndIndex
from lmkv.spec import KvSpec
from lmkv_server.node.cache.events import CachedChunk


class PartialChunks:
    """The chunks with ends of prompts of the specs that engines have attached with. One event loop owns it."""

    def __init__(self, tiers: Mapping[str, Iterable[CachedChunk]] | None = None) -> None:
        """`tiers`, by name, are read when a spec is added: they may have its chunks already."""
        self._tiers = dict(tiers or {})
        self._specs: dict[bytes, KvSpec] = {}
        """By fingerprint."""
        self.index: EndIndex[tuple[str, ChunkKey]] = EndIndex()
        """By tier and key."""
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
