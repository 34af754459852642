"""Copies of a request's tokens between the blocks that hold them and extents: for stores, and for loads.

Only here is a model with one kind of layers another than one with several: `ChunkItems` and `PartItems` say what vLLM
can make of their hits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.engine.hit_sources import HitSources
from lmkv_kernels import ChunkCopy

BlockIds = Sequence[Sequence[int]]
"""The blocks of one request, for each of vLLM's KV-cache groups."""
NULL_BLOCK_ID = 0
"""vLLM's null page: it stands for pages that were freed while their request runs, and holds no request's KV."""


def blocks_of(block_ids: Sequence[int], block_size: int, low: int, high: int) -> list[int]:
    """The blocks that hold tokens `[low, high)` of the prompt whose blocks these are."""
    return list(block_ids[low // block_size : -(-high // block_size)])


def has_null_page(copies: Sequence[ChunkCopy]) -> bool:
    """Whether a copy names the null page."""
    return any(NULL_BLOCK_ID in copy.block_ids for copy in copies)


class PartExtent(NamedTuple):
    """An extent that holds one part of a chunk."""

    part: int
    chunk: int
    token_count: int
    """Tokens of the chunk."""
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMap:
    """Finds the blocks in which the layers of one engine have a request's tokens."""

    spec: KvSpec
    groups: tuple[LayerGroup, ...]

    def copies(self, extent: PartExtent, block_ids: BlockIds, low: int, high: int) -> list[ChunkCopy]:
        """Copies of tokens `[low, high)` of the extent: one for each group.

        Of a window shorter than a chunk the extent has only the last tokens. Of a state, the block of the chunk's last
        token is copied.
        """
        size = self.spec.chunk_size
        kind = self.spec.parts[extent.part]
        kept = kind.kept_tokens(extent.token_count)
        start = extent.chunk * size + kind.first_kept(extent.token_count)
        return [
            self._state_copy(block_ids[index], group, extent.chunk, extent.offset, index)
            if kind.rule == PART_RULE_END
            else ChunkCopy(
                offset=extent.offset,
                extent_tokens=kept,
                token_count=high - low,
                first_token=low - start,
                first_slot=low % group.block_size,
                block_ids=blocks_of(block_ids[index], group.block_size, low, high),
                group=index,
            )
            for index, group in enumerate(self.groups)
            if group.part == extent.part
        ]

    def stored(self, extent: PartExtent, block_ids: BlockIds) -> list[ChunkCopy]:
        """Copies of all tokens of an extent."""
        base = extent.chunk * self.spec.chunk_size
        low = base + self.spec.parts[extent.part].first_kept(extent.token_count)
        return self.copies(extent, block_ids, low, base + extent.token_count)

    def loaded(self, extent: PartExtent, block_ids: BlockIds, start: int, end: int) -> list[ChunkCopy]:
        """Copies of what a load of tokens `[start, end)` needs of an extent: vLLM has pages for no more."""
        base = extent.chunk * self.spec.chunk_size
        low = max(start, base, self._oldest(extent.part, end))
        return self.copies(extent, block_ids, low, min(end, base + extent.token_count))

    def state_copies(self, part: int, blocks: Sequence[tuple[int, int]], *, offset: int) -> list[ChunkCopy]:
        """Copies of the states that vLLM offers: `blocks` has groups of one part, and the block of each."""
        assert self.spec.parts[part].rule == PART_RULE_END
        return [self._one_block(block, offset, group) for group, block in blocks]

    def _oldest(self, part: int, end: int) -> int:
        """The oldest token of a part that a hit ending at `end` copies: the first of its page.

        vLLM takes pages that were loaded for complete, and uses them for hits that end earlier.
        """
        page = max(group.block_size for group in self.groups if group.part == part)
        return self.spec.parts[part].first_token(end) // page * page

    def _state_copy(
        self, block_ids: Sequence[int], group: LayerGroup, chunk: int, offset: int, index: int
    ) -> ChunkCopy:
        return self._one_block(block_ids[(chunk + 1) * self.spec.chunk_size // group.block_size - 1], offset, index)

    def _one_block(self, block_id: int, offset: int, group: int) -> ChunkCopy:
        size = self.spec.chunk_size
        return ChunkCopy(offset=offset, extent_tokens=size, token_count=size, block_ids=[block_id], group=group)


class LoadItems(ABC):
    """Tokens `[start, end)` of one request, by the chunks or items that have them.

    The class answers for all hits of the engine.
    """

    all_or_none: ClassVar[bool]
    """Whether one lost item fails the load, and vLLM computes the whole request. Otherwise vLLM computes the blocks of
    the lost items, also in the step that needs them: only then a load may be part of a step."""

    def __init__(self, blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self._size = blocks.spec.chunk_size
        self.start = start
        self.end = end
        self.chunk_count = -(-end // self._size)
        """Chunks of the prompt that are held once the load is complete."""
        self.wanted = range(start // self._size, self.chunk_count)
        """The indices of the items that the load brings."""

    @staticmethod
    @abstractmethod
    def chunks_of(item_count: int, sources: HitSources) -> int:
        """The chunks that can be loaded if the first `item_count` items of a hit can be; `sources` are the hit's."""

    @staticmethod
    @abstractmethod
    def most_tokens(token_count: int) -> int:
        """The longest hit of a request of `token_count` tokens."""

    @staticmethod
    @abstractmethod
    def cut(token_count: int, most: int) -> int:
        """Returns the end, at token `most` at the latest, of the hit that is left of one that ends at `token_count`."""

    @abstractmethod
    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        """The copies out of a chunk's extent; None if it is not such a chunk or item."""

    @abstractmethod
    def token_count(self, index: int, chunk: HeldChunk) -> int:
        """Tokens that the copies of a chunk load."""

    @abstractmethod
    def blocks(self, indices: Iterable[int]) -> list[int]:
        """The blocks that stay unfilled without these."""


class ChunkItems(LoadItems):
    """Chunks of one part.

    chunk      0          1          2
           ┌──────────┬──────────┬──────────┐
    tokens │ ▒▒▒▒▒▒▒▒ │ ▒▒▒▒████ │ ███      │   ▒ vLLM had it: start     █ to load: end
           └──────────┴──────────┴──────────┘

    Any first tokens of a hit are a hit, too: vLLM cuts a hit that is the whole request.
    """

    all_or_none = False

    @staticmethod
    def chunks_of(item_count: int, sources: HitSources) -> int:
        del sources
        return item_count

    @staticmethod
    def most_tokens(token_count: int) -> int:
        return token_count

    @staticmethod
    def cut(token_count: int, most: int) -> int:
        return min(token_count, most)

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        extent = PartExtent(0, index, chunk.token_count, chunk.extent.offset)
        return self._blocks.loaded(extent, self._block_ids, self.start, self.end)

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        return min(self.end, index * self._size + chunk.token_count) - self._low(index)

    def blocks(self, indices: Iterable[int]) -> list[int]:
        lost: dict[int, None] = {}  # two chunks may share a block
        for chunk in sorted(indices):
            for group, ids in zip(self._blocks.groups, self._block_ids, strict=True):
                high = min(self.end, (chunk + 1) * self._size)
                lost |= dict.fromkeys(blocks_of(ids, group.block_size, self._low(chunk), high))
        return list(lost)

    def _low(self, chunk: int) -> int:
        return max(self.start, chunk * self._size)


class PartItems(LoadItems):
    """The items of a hit that ends at token `end`. Those before `start` are not loaded: vLLM has the tokens.

    A hit is loaded to its end or not at all, since a window or a state is that of its last token. So it leaves at least
    one token for vLLM to compute.
    """

    all_or_none = True

    def __init__(self, blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> None:
        super().__init__(blocks, block_ids, start, end)
        self.items = blocks.spec.items(end // self._size, end % self._size)
        behind = (at for at, item in enumerate(self.items) if (item.chunk + 1) * self._size > start)
        first = next(behind, len(self.items))
        self.wanted = range(first, len(self.items))

    @staticmethod
    def chunks_of(item_count: int, sources: HitSources) -> int:
        return sources.chunk_count if 0 < item_count == sources.item_count else 0

    @staticmethod
    def most_tokens(token_count: int) -> int:
        return max(0, token_count - 1)

    @staticmethod
    def cut(token_count: int, most: int) -> int:
        return token_count if token_count <= most else 0

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        item, spec = self.items[index], self._blocks.spec
        least = min(self._size, self.end - item.chunk * self._size)
        if chunk.token_count < least or chunk.extent.size_bytes != spec.part_bytes(item.part, chunk.token_count):
            return None
        if (item.chunk + 1) * self._size <= self.start:
            return []
        extent = PartExtent(item.part, item.chunk, chunk.token_count, chunk.extent.offset)
        copies = self._blocks.loaded(extent, self._block_ids, self.start, self.end)
        return None if has_null_page(copies) else copies

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        """The tokens of the whole load: which item has which tokens is not known."""
        del chunk
        return self.end - self.start if index == self.wanted.stop - 1 else 0

    def blocks(self, indices: Iterable[int]) -> list[int]:
        """Returns no block, since the load fails as a whole."""
        del indices
        return []


def items_of(spec: KvSpec) -> type[LoadItems]:
    """The kind of items that hits of an engine have."""
    return ChunkItems if spec.has_plain_parts else PartItems
