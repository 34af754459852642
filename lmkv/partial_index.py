"""Index of partial chunks by the chunk before them: which lengths there are. Pure; used by node and coordinator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Id = TypeVar("Id", bound=Hashable)


class PartialIndex(Generic[Id]):
    """Token counts of partial chunks by parent: the key of the chunk before them, or the root of the key chain.

    Chunks are identified by `Id`. Memory is bounded by the number of chunks.
    """

    def __init__(self) -> None:
        self._chunks: dict[Id, tuple[bytes, int]] = {}
        """Parent and tokens of each chunk."""
        self._counts: dict[bytes, dict[int, int]] = {}
        """Number of chunks by tokens, by parent."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Id]:
        return iter(self._chunks)

    def __contains__(self, chunk: Id) -> bool:
        return chunk in self._chunks

    def lengths(self, parent: bytes) -> Sequence[int]:
        """Token counts of the partial chunks behind a chunk or a root: ascending, each once."""
        counts = self._counts.get(parent)
        return sorted(counts) if counts else ()

    def add(self, chunk: Id, parent: bytes, token_count: int) -> None:
        """Adds a chunk, or replaces it."""
        self.remove(chunk)
        self._chunks[chunk] = parent, token_count
        counts = self._counts.setdefault(parent, {})
        counts[token_count] = counts.get(token_count, 0) + 1

    def remove(self, chunk: Id) -> None:
        """Removes a chunk. Idempotent."""
        known = self._chunks.pop(chunk, None)
        if known is None:
            return
        parent, token_count = known
        counts = self._counts[parent]
        counts[token_count] -= 1
        if not counts[token_count]:
            del counts[token_count]
            if not counts:
                del self._counts[parent]

    def remove_all(self, chunks: Iterable[Id]) -> None:
        """Removes those of the chunks that are there."""
        for chunk in chunks:
            self.remove(chunk)

    def check(self) -> None:
        """Asserts that counts match the chunks."""
        counts: dict[bytes, dict[int, int]] = {}
        for parent, token_count in self._chunks.values():
            of_parent = counts.setdefault(parent, {})
            of_parent[token_count] = of_parent.get(token_count, 0) + 1
        assert counts == self._counts
