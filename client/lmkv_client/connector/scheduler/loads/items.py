"""What a load copies: the chunks of a prompt, or the items of a hit where chunks have several parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.scheduler.block_copies import BlockIds, BlockMap, blocks_of, has_null_page
from lmkv_kernels import ChunkCopy


class LoadItems(Protocol):
    """Tokens `[start, end)` of one request, by the chunks or items that have them."""

    wanted: range
    """Indices of those that are to be loaded."""
    all_or_none: bool
    """Whether the load fails if one is lost; otherwise vLLM computes the blocks of those that are."""

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
        self._start = start
        self._end = end
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
            start=self._start,
            end=self._end,
            offset=chunk.extent.offset,
            extent_tokens=chunk.token_count,
        )

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        return min(self._end, index * self._size + chunk.token_count) - self._low(index)

    def blocks(self, indices: Iterable[int]) -> list[int]:
        lost: dict[int, None] = {}  # two chunks may share a block
        for chunk in sorted(indices):
            for group, ids in zip(self._blocks.groups, self._block_ids, strict=True):
                high = min(self._end, (chunk + 1) * self._size)
                lost |= dict.fromkeys(blocks_of(ids, group.block_size, self._low(chunk), high))
        return list(lost)

    def _low(self, chunk: int) -> int:
        return max(self._start, chunk * self._size)


class PartItems:
    """The items of a hit that ends at token `end`. Those before `start` are not loaded: vLLM has the tokens."""

    all_or_none = True

    def __init__(self, blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> None:
        self._blocks = blocks
        self._block_ids = block_ids
        self._start = start
        self._end = end
        self._size = blocks.spec.chunk_size
        self.chunk_count = end // self._size
        self.items = blocks.spec.items(self.chunk_count)
        behind = (at for at, item in enumerate(self.items) if (item.chunk + 1) * self._size > start)
        first = next(behind, len(self.items))
        self.wanted = range(first, len(self.items))

    def copies(self, index: int, chunk: HeldChunk) -> list[ChunkCopy] | None:
        item, spec = self.items[index], self._blocks.spec
        if chunk.extent.size_bytes != spec.part_bytes(item.part) or chunk.token_count != self._size:
            return None
        if (item.chunk + 1) * self._size <= self._start:
            return []
        copies = self._blocks.loaded(
            item.part,
            item.chunk,
            self._block_ids,
            start=self._start,
            end=self._end,
            offset=chunk.extent.offset,
            extent_tokens=self._size,
        )
        return None if has_null_page(copies) else copies

    def token_count(self, index: int, chunk: HeldChunk) -> int:
        """Of all items together the tokens of the load; it is not known which item has which of them."""
        del chunk
        return self._end - self._start if index == self.wanted.stop - 1 else 0

    def blocks(self, indices: Iterable[int]) -> list[int]:
        """None: the load fails as a whole."""
        del indices
        return []


def load_items(blocks: BlockMap, block_ids: BlockIds, start: int, end: int) -> LoadItems:
    """What to load of a request whose first `start` tokens vLLM has."""
    items = ChunkItems if blocks.spec.has_plain_parts else PartItems
    return items(blocks, block_ids, start, end)
