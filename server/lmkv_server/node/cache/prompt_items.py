"""Items of a prompt: parts of its chunks, under keys of their own. Pure.

Pool and tiers hold an item as they hold a chunk: by key, with a size. Only specs whose chunks have several parts have
items that are not chunks (`KvSpec.has_plain_parts`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey, part_key
from lmkv.spec import ALL, KvSpec
from lmkv_server.node.cache.host import Chunk


@dataclass(frozen=True, eq=False, slots=True)
class PromptItems:
    """Some or all items of a prompt. An index means the same in every field."""

    spec: KvSpec
    chunk_keys: Sequence[ChunkKey]
    """Keys of the prompt's chunks."""
    parts: NDArray[np.int64]
    chunks: NDArray[np.int64]
    """Part and chunk of each item."""
    keys: Sequence[ChunkKey]
    """Key of each item."""
    sizes: Sequence[int]
    """Bytes of each item."""

    @classmethod
    def of_prompt(cls, spec: KvSpec, chunk_keys: Sequence[ChunkKey]) -> Self:
        """All parts of all chunks, part by part."""
        return cls._of_ranges(spec, chunk_keys, [range(len(chunk_keys))] * len(spec.parts))

    @classmethod
    def of_hit(cls, spec: KvSpec, chunk_keys: Sequence[ChunkKey], chunk_count: int) -> Self:
        """The items of a hit of `chunk_count` chunks, in their order (`KvSpec.items`)."""
        return cls._of_ranges(
            spec, chunk_keys, [part.needed(chunk_count * spec.chunk_size, spec.chunk_size) for part in spec.parts]
        )

    @classmethod
    def _of_ranges(cls, spec: KvSpec, chunk_keys: Sequence[ChunkKey], ranges: Sequence[range]) -> Self:
        """For each part the chunks of one range."""
        counts = [len(chunks) for chunks in ranges]
        return cls(
            spec=spec,
            chunk_keys=chunk_keys,
            parts=np.repeat(np.arange(len(ranges)), counts),
            chunks=np.concatenate([np.arange(chunks.start, chunks.stop) for chunks in ranges]),
            keys=_ItemKeys(chunk_keys, ranges),
            sizes=[size for part, count in enumerate(counts) for size in [spec.part_bytes(part)] * count],
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def mean_bytes(self) -> int:
        """Average size of the items."""
        return max(1, sum(self.sizes) // max(1, len(self)))

    def parent(self, index: int) -> ChunkKey | None:
        """What must not be evicted before an item; see `parent_of`."""
        chunk = int(self.chunks[index])
        previous = self.chunk_keys[chunk - 1] if chunk else None
        return parent_of(self.spec, int(self.parts[index]), self.chunk_keys[chunk], previous)

    def fits(self, index: int, chunk: Chunk) -> bool:
        """Whether this is the item that the key stands for."""
        return chunk.fingerprint == self.spec.fingerprint and chunk.size_bytes == self.sizes[index]

    def below(self, chunk_count: int) -> frozenset[int]:
        """The items of the first chunks."""
        return frozenset(np.flatnonzero(self.chunks < chunk_count).tolist())

    def used_with(self, found: Sequence[int], asked: Sequence[int]) -> list[ChunkKey]:
        """The keys that a hit uses if a tier that was asked for some items has found some of them.

        Those that were found and, of parts of which a hit needs every chunk, the chunks before them or before the first
        one that was asked for.
        """
        every = np.array([part.rule == ALL for part in self.spec.parts])[self.parts]
        at = np.array(asked, np.int64)
        first = self.chunks[at[every[at]]].min(initial=len(self.chunk_keys))
        last = self.chunks[np.array(found, np.int64)].max(initial=-1)
        used = every & ((self.chunks <= last) | ((self.chunks < first) & (at.size > 0)))
        used[np.array(found, np.int64)] = True
        return [self.keys[index] for index in np.flatnonzero(used)]

    def in_hit(self, chunk_count: int) -> NDArray[np.bool_]:
        """Which of the items a hit of `chunk_count` chunks needs."""
        needed = [part.needed(chunk_count * self.spec.chunk_size, self.spec.chunk_size) for part in self.spec.parts]
        starts = np.array([part.start for part in needed])
        found: NDArray[np.bool_] = (self.chunks >= starts[self.parts]) & (self.chunks < chunk_count)
        return found


class _ItemKeys(Sequence[ChunkKey]):
    """The keys of items of a prompt. Those of parts 1, 2, ... are computed when they are first asked for."""

    def __init__(self, chunk_keys: Sequence[ChunkKey], ranges: Sequence[range]) -> None:
        """`ranges` has the chunks of each part."""
        self._chunk_keys = chunk_keys
        self._ranges = ranges
        self._starts = [0, *accumulate(map(len, ranges))]
        self._keys: list[ChunkKey | None] = [*chunk_keys[ranges[0].start : ranges[0].stop]]
        self._keys += [None] * (self._starts[-1] - len(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ChunkKey]: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | Sequence[ChunkKey]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        key = self._keys[index]
        if key is None:
            part = bisect_right(self._starts, index % len(self._keys)) - 1
            chunk = self._ranges[part][index % len(self._keys) - self._starts[part]]
            key = self._keys[index] = part_key(self._chunk_keys[chunk], part)
        return key


def parent_of(spec: KvSpec, part: int, chunk_key: ChunkKey, previous: ChunkKey | None) -> ChunkKey | None:
    """The key of what must not be evicted before a part of a chunk; `previous` is the key of the chunk before it.

    A part leaves before part 0 of its chunk, which no hit that needs the part can do without. Part 0 keeps the chunk
    before it only if a hit needs every chunk of it: of a sliding window the oldest chunks leave first.
    """
    if part:
        return chunk_key
    return previous if spec.rule == ALL else None
