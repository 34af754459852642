"""Copies of a request's tokens between the blocks that hold them and extents: for stores, and for loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.engine_kv import LayerGroup
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMap:
    """Finds the blocks in which the layers of one engine have a request's tokens."""

    spec: KvSpec
    groups: tuple[LayerGroup, ...]

    def copies(
        self, part: int, chunk: int, block_ids: BlockIds, *, low: int, high: int, offset: int, extent_tokens: int
    ) -> list[ChunkCopy]:
        """Copies of tokens `[low, high)`, which one part of a chunk has in the extent at `offset`: one for each group.

        `extent_tokens` is the number of tokens that a chunk of this size has; of a window shorter than a chunk the
        extent has only the last tokens. Of a state, the block of the chunk's last token is copied.
        """
        size = self.spec.chunk_size
        kind = self.spec.parts[part]
        kept = kind.kept_tokens(extent_tokens)
        start = chunk * size + kind.first_kept(extent_tokens)
        return [
            self._state_copy(block_ids[index], group, chunk, offset, index)
            if kind.rule == PART_RULE_END
            else ChunkCopy(
                offset=offset,
                extent_tokens=kept,
                token_count=high - low,
                first_token=low - start,
                first_slot=low % group.block_size,
                block_ids=blocks_of(block_ids[index], group.block_size, low, high),
                group=index,
            )
            for index, group in enumerate(self.groups)
            if group.part == part
        ]

    def stored(self, part: int, chunk: int, block_ids: BlockIds, *, offset: int, token_count: int) -> list[ChunkCopy]:
        """Copies of all that the extent of one part of a chunk of `token_count` tokens has."""
        base = chunk * self.spec.chunk_size
        low, high = base + self.spec.parts[part].first_kept(token_count), base + token_count
        return self.copies(part, chunk, block_ids, low=low, high=high, offset=offset, extent_tokens=token_count)

    def loaded(
        self, part: int, chunk: int, block_ids: BlockIds, *, start: int, end: int, offset: int, extent_tokens: int
    ) -> list[ChunkCopy]:
        """Copies of what a load of tokens `[start, end)` needs of one part of a chunk: vLLM has pages for no more."""
        base = chunk * self.spec.chunk_size
        low = max(start, base, self._oldest(part, end))
        high = min(end, base + extent_tokens)
        return self.copies(part, chunk, block_ids, low=low, high=high, offset=offset, extent_tokens=extent_tokens)

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


class LoadItems(Protocol):
    """Tokens `[start, end)` of one request, by the chunks or items that have them."""

    start: int
    end: int
    wanted: range
    """The indices of the items that the load brings."""
    all_or_none: bool
    """Whether one lost item fails the load. Otherwise vLLM computes the blocks of the lost items."""

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        """The copies out of a chunk's extent; None if it is not such a chunk or item."""

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        """Tokens that the copies of a chunk load."""

    def blocks(self, indices: Iterable[int]) -> list[int]:
        """The blocks that stay unfilled without these."""

    @property
    def chunk_count(self) -> int:
        """Chunks of the prompt that are held once the load is complete."""


class ChunkItems:
    """Chunks of one part.

    chunk      0          1          2
           ┌──────────┬──────────┬──────────┐
    tokens │ ▒▒▒▒▒▒▒▒ │ ▒▒▒▒████ │ ███      │   ▒ vLLM had it: start     █ to load: end
           └──────────┴──────────┴──────────┘
    """

    all_or_none = False

    def __init__(self, blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self.start = start
        self.end = end
        self._size = blocks.spec.chunk_size
        self.wanted = range(start // self._size, -(-end // self._size))

    @property
    def chunk_count(self) -> int:
        return self.wanted.stop

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        return self._blocks.loaded(
            0,
            index,
            self._block_ids,
            start=self.start,
            end=self.end,
            offset=chunk.extent.offset,
            extent_tokens=chunk.token_count,
        )

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


class PartItems:
    """The items of a hit that ends at token `end`. Those before `start` are not loaded: vLLM has the tokens."""

    all_or_none = True

    def __init__(self, blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self.start = start
        self.end = end
        self._size = blocks.spec.chunk_size
        self.chunk_count = -(-end // self._size)
        self.items = blocks.spec.items(end // self._size, end % self._size)
        behind = (at for at, item in enumerate(self.items) if (item.chunk + 1) * self._size > start)
        first = next(behind, len(self.items))
        self.wanted = range(first, len(self.items))

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        item, spec = self.items[index], self._blocks.spec
        least = min(self._size, self.end - item.chunk * self._size)
        if chunk.token_count < least or chunk.extent.size_bytes != spec.part_bytes(item.part, chunk.token_count):
            return None
        if (item.chunk + 1) * self._size <= self.start:
            return []
        copies = self._blocks.loaded(
            item.part,
            item.chunk,
            self._block_ids,
            start=self.start,
            end=self.end,
            offset=chunk.extent.offset,
            extent_tokens=chunk.token_count,
        )
        return None if has_null_page(copies) else copies

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        """The tokens of the whole load: which item has which tokens is not known."""
        del chunk
        return self.end - self.start if index == self.wanted.stop - 1 else 0

    def blocks(self, indices: Iterable[int]) -> list[int]:
        """Returns no block, since the load fails as a whole."""
        del indices
        return []


def load_items(blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> LoadItems:
    """The items to load for a request whose first `start` tokens vLLM has."""
    items = ChunkItems if blocks.spec.has_plain_parts else PartItems
    return items(blocks, block_ids, start, end)
