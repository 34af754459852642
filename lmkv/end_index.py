"""`EndIndex`: the chunks in which prompts and answers have ended, by the chunk before, so that prompts find them. Pure.

The layout map and a node's caches keep one each; `Prompt.tails` asks it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from lmkv.keys import PREFIX_DIGEST_BYTES

Id = TypeVar("Id", bound="bytes | tuple[Any, ...]")


class EndIndex(Generic[Id]):
    """Token counts and prefix digests of chunks by parent: the key of the chunk before, or the root of the key chain.

    Chunks are identified by `Id`. Memory is bounded by the number of chunks, and 8 bytes for each of their tokens.
    """

    def __init__(self) -> None:
        self._chunks: dict[Id, tuple[bytes, int, bytes]] = {}
        """Parent, tokens and prefix digests of each chunk."""
        self._counts: dict[bytes, dict[int, int]] = {}
        """Number of chunks by tokens, by parent."""
        self._sorted: dict[bytes, list[tuple[bytes, Id]]] = {}
        """The chunks with prefix digests in the order of these, by parent: those that begin alike are neighbours."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Id]:
        return iter(self._chunks)

    def __contains__(self, chunk: Id) -> bool:
        return chunk in self._chunks

    def lengths(self, parent: bytes) -> Sequence[int]:
        """Token counts of the chunks behind a chunk or a root: ascending, each once."""
        counts = self._counts.get(parent)
        return sorted(counts) if counts else ()

    def has_digests(self, parent: bytes) -> bool:
        """Whether a chunk behind a chunk or a root has prefix digests."""
        return parent in self._sorted

    def token_count(self, chunk: Id) -> int:
        return self._chunks[chunk][1]

    def beginning_as(self, parent: bytes, digests: bytes) -> Iterator[tuple[int, Id]]:
        """The chunks behind `parent` that begin as a prompt whose prefix digests behind it are `digests`.

        Each with the number of tokens that they have in common, at least one; the most first.
        """
        chunks = self._sorted.get(parent, [])
        right = bisect_left(chunks, (digests,))
        left = right - 1
        below = _common_tokens(chunks[left][0], digests) if left >= 0 else 0
        above = _common_tokens(chunks[right][0], digests) if right < len(chunks) else 0
        while below or above:
            if above >= below:
                yield above, chunks[right][1]
                right += 1
                above = _common_tokens(chunks[right][0], digests) if right < len(chunks) else 0
            else:
                yield below, chunks[left][1]
                left -= 1
                below = _common_tokens(chunks[left][0], digests) if left >= 0 else 0

    def add(self, chunk: Id, parent: bytes, token_count: int, prefix_digests: bytes = b"") -> None:
        """Adds a chunk, or replaces it."""
        self.remove(chunk)
        self._chunks[chunk] = parent, token_count, prefix_digests
        counts = self._counts.setdefault(parent, {})
        counts[token_count] = counts.get(token_count, 0) + 1
        if prefix_digests:
            insort(self._sorted.setdefault(parent, []), (prefix_digests, chunk))

    def remove(self, chunk: Id) -> None:
        """Removes a chunk. Idempotent."""
        known = self._chunks.pop(chunk, None)
        if known is None:
            return
        parent, token_count, prefix_digests = known
        counts = self._counts[parent]
        counts[token_count] -= 1
        if not counts[token_count]:
            del counts[token_count]
            if not counts:
                del self._counts[parent]
        if prefix_digests:
            chunks = self._sorted[parent]
            del chunks[bisect_left(chunks, (prefix_digests, chunk))]
            if not chunks:
                del self._sorted[parent]

    def remove_all(self, chunks: Iterable[Id]) -> None:
        """Removes these chunks; others are ignored."""
        for chunk in chunks:
            self.remove(chunk)

    def check(self) -> None:
        """Asserts that counts and order match the chunks."""
        counts: dict[bytes, dict[int, int]] = {}
        ordered: dict[bytes, list[tuple[bytes, Id]]] = {}
        for chunk, (parent, token_count, digests) in self._chunks.items():
            of_parent = counts.setdefault(parent, {})
            of_parent[token_count] = of_parent.get(token_count, 0) + 1
            if digests:
                ordered.setdefault(parent, []).append((digests, chunk))
        assert counts == self._counts
        assert {parent: sorted(chunks) for parent, chunks in ordered.items()} == self._sorted


def _common_tokens(one: bytes, other: bytes) -> int:
    """The number of tokens for which two chunks begin alike, by their prefix digests."""
    low, high = 0, min(len(one), len(other)) // PREFIX_DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * PREFIX_DIGEST_BYTES
        if one[:end] == other[:end]:
            low = middle
        else:
            high = middle - 1
    return low
