"""Where the items of a prompt are: in the pool, in which tier, or nowhere. Pure; used by `ItemLookup`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lmkv_server.node.cache.prompt_items import PromptItems

OWN = 0
"""The source of items in the pool; tiers have the numbers from 1 on, in the order in which they were asked."""
ABSENT = 1 << 16


class ItemGrid:
    """All items of a prompt (`PromptItems.of_prompt`), each with its first source."""

    def __init__(self, items: PromptItems) -> None:
        self.items = items
        spec = items.spec
        self.chunk_count = len(items.chunk_keys)
        counts = np.arange(self.chunk_count + 1)
        self._sources = np.full((len(spec.parts), self.chunk_count), ABSENT)
        self._starts = np.stack([part.first_needed(counts * spec.chunk_size, spec.chunk_size) for part in spec.parts])
        sizes = np.array([[spec.part_bytes(part)] for part in range(len(spec.parts))])
        self._hit_bytes = ((counts - self._starts) * sizes).sum(axis=0)

    def place(self, source: int, indices: Iterable[int]) -> None:
        """These items are in a source. An earlier source stays."""
        flat = self._sources.reshape(-1)
        at = np.fromiter(indices, np.int64)
        flat[at] = np.minimum(flat[at], source)

    def place_own(self, indices: Iterable[int]) -> None:
        """Exactly these items are in the pool."""
        self._sources[self._sources == OWN] = ABSENT
        self.place(OWN, indices)

    def longest(self, last_source: int = ABSENT - 1, budget_bytes: int | None = None) -> int:
        """Chunks of the longest hit with the sources up to `last_source` whose items together fit into the budget."""
        counts = np.arange(self.chunk_count + 1)
        possible = np.ones(counts.size, np.bool_)
        for starts, held in zip(self._starts, self._sources <= last_source, strict=True):
            before = np.concatenate(([0], np.cumsum(held)))
            possible &= before[counts] - before[starts] == counts - starts
        if budget_bytes is not None:
            possible &= self._hit_bytes <= budget_bytes
        found = np.flatnonzero(possible)
        return int(found[-1]) if found.size else 0

    def hit_bytes(self, chunk_count: int) -> int:
        """Bytes of the items of a hit."""
        return int(self._hit_bytes[chunk_count])

    def beyond(self, chunk_count: int) -> list[int]:
        """The items that hits of more chunks than these need."""
        return [int(index) for index in np.flatnonzero(self._beyond(chunk_count))]

    def wanted(self, budget_bytes: int) -> list[int]:
        """The absent items that hits longer than the present one, which fits into the budget, would need."""
        beyond = self._beyond(self.longest(budget_bytes=budget_bytes))
        return [int(index) for index in np.flatnonzero(beyond & (self._sources == ABSENT))]

    def _beyond(self, chunk_count: int) -> NDArray[np.bool_]:
        if chunk_count == self.chunk_count:
            return np.zeros_like(self._sources, np.bool_)
        chunks = np.arange(self.chunk_count)
        found: NDArray[np.bool_] = (chunks >= self._starts[:, chunk_count + 1, None]) & (chunks >= self._starts[:, 1:])
        return found

    def sources_of_hit(self, chunk_count: int) -> NDArray[np.int64]:
        """The source of each item of a hit, in their order."""
        return self._sources.reshape(-1)[self.items.in_hit(chunk_count)]
