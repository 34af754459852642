"""Index of partial chunks by the chunk before them, in memory and on disk. Pure; a `CacheListener`.

The index has no tokens: it returns the lengths of the partial chunks behind a chunk. `PromptTokens` computes the keys
that partial chunks of these lengths with the prompt's next tokens would have, and a tier is asked for these keys. So a
chunk is found only by prompts with exactly its tokens, whatever a client has claimed about it. A prompt costs at most
as many keys as a chunk has tokens, however many partial chunks are behind the same chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey, Tokens, partial_keys
from lmkv.misses.reason import MissReason
from lmkv.partial_index import PartialIndex
from lmkv.spec import KvSpec
from lmkv_server.node.cache.events import CachedChunk


class PartialChunks:
    """The partial chunks of the specs that engines have attached with. One event loop owns it."""

    def __init__(self, tiers: Mapping[str, Iterable[CachedChunk]] | None = None) -> None:
        """`tiers`, by name, are read when a spec is added: they may have its chunks already."""
        self._tiers = dict(tiers or {})
        self._chunk_sizes: dict[bytes, int] = {}
        """By fingerprint."""
        self._index: PartialIndex[tuple[str, ChunkKey]] = PartialIndex()
        """By tier and key."""
        self.on_found: Callable[[str, CachedChunk], None] = lambda _, __: None
        """Called with each chunk that was found when its spec was added."""

    @property
    def chunk_count(self) -> int:
        """Partial chunks in all tiers together."""
        return len(self._index)

    def add_tier(self, name: str, chunks: Iterable[CachedChunk]) -> None:
        """Adds a tier that is read when a spec is added."""
        self._tiers[name] = chunks

    def add_spec(self, spec: KvSpec) -> None:
        """Has partial chunks of a spec indexed, those that the tiers hold included. Idempotent."""
        if spec.fingerprint in self._chunk_sizes or not spec.has_plain_parts:
            return
        self._chunk_sizes[spec.fingerprint] = spec.chunk_size
        for name, chunks in self._tiers.items():
            for chunk in chunks:
                if chunk.token_count < spec.chunk_size and chunk.fingerprint == spec.fingerprint:
                    self.stored(name, chunk)
                    self.on_found(name, chunk)

    def remove_spec(self, fingerprint: bytes) -> None:
        """Has the chunks of a spec no longer indexed; those that are, are until they are removed. Idempotent."""
        self._chunk_sizes.pop(fingerprint, None)

    def lengths(self, parent: ChunkKey) -> Sequence[int]:
        """Token counts of the partial chunks behind a chunk, or behind a root: ascending, each once."""
        return self._index.lengths(parent)

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Adds a chunk that a tier has stored, if it is a partial one whose parent is known."""
        if chunk.token_count < self._chunk_sizes.get(chunk.fingerprint, 0) and chunk.parent is not None:
            self._index.add((tier, chunk.key), chunk.parent, chunk.token_count)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Removes a chunk that a tier no longer holds."""
        self._index.remove((tier, chunk.key))

    def check(self) -> None:
        """Asserts the invariants of the index."""
        self._index.check()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTokens:
    """What the keys of a prompt's chunks are computed from."""

    root: ChunkKey
    chunk_size: int
    tokens: Tokens
    """The first tokens of the prompt, or all."""
    extras: Mapping[int, bytes] = field(default_factory=dict)
    """Inputs of the keys other than tokens, by index of the chunk."""

    def parent(self, keys: Sequence[ChunkKey], index: int) -> ChunkKey:
        """The key before chunk `index`, where `keys` are those of the prompt's chunks."""
        return keys[index - 1] if index else self.root

    def partials(self, keys: Sequence[ChunkKey], index: int, lengths: Iterable[int]) -> list[tuple[int, ChunkKey]]:
        """Lengths and keys of the partial chunks of these lengths that chunk `index` begins with, longest first.

        `lengths` must ascend. Those that the prompt does not have are left out, and so is the chunk of `keys` itself.
        """
        begin = index * self.chunk_size
        tokens = self.tokens[begin : begin + self.chunk_size]
        fitting = [length for length in lengths if 0 < length <= tokens.size and length < self.chunk_size]
        if not fitting:
            return []
        found = partial_keys(self.parent(keys, index), tokens, fitting, self.extras.get(index, b""))
        own = keys[index] if index < len(keys) else None
        return [(length, key) for length, key in reversed(found) if key != own]
