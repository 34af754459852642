"""Index of the chunks in which prompts end, by the chunk before them, in memory and on disk. Pure; a `CacheListener`.

The index has no tokens. A prompt finds two kinds of chunks behind its last full chunk: partial ones that it continues,
by their key, which `PromptTokens` computes for each length that there is; and chunks that begin as it does, by their
prefix digests. A prompt costs at most as many keys as a chunk has tokens, however many chunks are behind the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lmkv.keys import ChunkKey, Tokens, partial_keys, prefix_digests
from lmkv.misses import MissReason
from lmkv.prompt import EndIndex
from lmkv.spec import KvSpec
from lmkv_server.node.cache.events import CachedChunk

MAX_BEGINNINGS = 256
"""Chunks that begin as a prompt does of which a lookup considers the ones with the most tokens in common."""


class PartialChunks:
    """The chunks with ends of prompts of the specs that engines have attached with. One event loop owns it."""

    def __init__(self, tiers: Mapping[str, Iterable[CachedChunk]] | None = None) -> None:
        """`tiers`, by name, are read when a spec is added: they may have its chunks already."""
        self._tiers = dict(tiers or {})
        self._chunk_sizes: dict[bytes, int] = {}
        """By fingerprint."""
        self._index: EndIndex[tuple[str, ChunkKey]] = EndIndex()
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
                if chunk.fingerprint == spec.fingerprint and self._has_ends(chunk):
                    self.stored(name, chunk)
                    self.on_found(name, chunk)

    def remove_spec(self, fingerprint: bytes) -> None:
        """Has the chunks of a spec no longer indexed; those that are, are until they are removed. Idempotent."""
        self._chunk_sizes.pop(fingerprint, None)

    def lengths(self, parent: ChunkKey) -> Sequence[int]:
        """Token counts of the chunks behind a chunk, or behind a root: ascending, each once."""
        return self._index.lengths(parent)

    def ends(self, prompt: PromptTokens, keys: Sequence[ChunkKey], index: int) -> Sequence[ChunkEnd]:
        """The chunks that have the prompt's tokens from chunk `index` on, or may have; the one with the most first.

        `keys` are those of the prompt's chunks.
        """
        parent = prompt.parent(keys, index)
        exact = prompt.partials(keys, index, self._index.lengths(parent))
        found = [ChunkEnd(key=key, token_count=length, stored_token_count=length) for length, key in exact]
        if not self._index.has_digests(parent):
            return found
        beginnings = self._index.beginning_as(parent, prompt.prefixes(keys, index))
        longer = {
            key: ChunkEnd(key=key, token_count=count, stored_token_count=self._index.token_count((tier, key)))
            for count, (tier, key) in islice(beginnings, MAX_BEGINNINGS)
        }
        known = {one.key for one in found}
        found += [one for one in longer.values() if one.key not in known]
        return sorted(found, key=lambda one: (-one.token_count, one.stored_token_count))

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Adds a chunk that a tier has stored, if prompts end in it and its parent is known."""
        if chunk.parent is not None and self._has_ends(chunk):
            self._index.add((tier, chunk.key), chunk.parent, chunk.token_count, chunk.prefix_digests)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Removes a chunk that a tier no longer holds."""
        self._index.remove((tier, chunk.key))

    def _has_ends(self, chunk: CachedChunk) -> bool:
        chunk_size = self._chunk_sizes.get(chunk.fingerprint, 0)
        return chunk.token_count < chunk_size or (chunk_size > 0 and len(chunk.prefix_digests) > 0)

    def check(self) -> None:
        """Asserts the invariants of the index."""
        self._index.check()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEnd:
    """A chunk that has the prompt's next tokens behind its full chunks."""

    key: ChunkKey
    token_count: int
    """The prompt's tokens that the chunk begins with."""
    stored_token_count: int
    """All tokens of the chunk."""


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

    def prefixes(self, keys: Sequence[ChunkKey], index: int) -> bytes:
        """The prefix digests of the prompt's tokens from chunk `index` on."""
        begin = index * self.chunk_size
        tokens = self.tokens[begin : begin + self.chunk_size]
        return prefix_digests(self.parent(keys, index), tokens, self.extras.get(index, b""))

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
