"""Copies between an engine's pages in host memory and extents of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmkv.spec import KvSpec
from lmkv_client.engine.extent import Extent
from lmkv_kernels import ChunkCopy, Pages, copied_bytes, gather, scatter


class Copier:
    """Copies chunks between pages and extents. Several threads may copy at once, also with the same copier.

    Made by `Engine.register`. The memory of the pages must stay where it is as long as the copier is used.
    """

    def __init__(self, spec: KvSpec, pages: Sequence[Pages], threads: int) -> None:
        """Raises `ValueError` if the pages are not in host memory, or do not make up the bytes of the spec's chunks."""
        if not pages:
            raise ValueError("pages is empty")
        for index, one in enumerate(pages):
            if one.device != "cpu":
                raise ValueError(f"pages[{index}] are on {one.device}; a copier needs pages in host memory")
            if (size_bytes := one.extent_bytes(spec.chunk_size)) != spec.chunk_bytes:
                raise ValueError(
                    f"a chunk of pages[{index}] has {size_bytes} bytes, and the spec says {spec.chunk_bytes}: layers, "
                    "heads, head size, element type or chunk size differ"
                )
        total = sum(copied_bytes(one, [_whole_chunk(spec, one)]) for one in pages)
        if total != spec.chunk_bytes:
            raise ValueError(f"the pages have {total} bytes of each chunk, not its {spec.chunk_bytes}")
        self._spec = spec
        self._pages = tuple(pages)
        self._threads = threads

    def gather(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        *,
        token_counts: Sequence[int] = (),
        first_slots: Sequence[int] = (),
    ) -> list[int]:
        """Copies pages into extents and returns their checksums, for `Written`.

        `blocks[i]` are the ids of the blocks that have the tokens of chunk i, in order; `first_slots[i]` is the index
        of its first token in the first of them (by default 0), and `token_counts[i]` the number of its tokens (by
        default a full chunk). Raises `ValueError` if a copy does not fit the pages, or the lengths of the lists differ.
        """
        copies = self._copies(extents, blocks, token_counts, first_slots)
        totals = [0] * len(extents)
        for pool, indices in _by_pool(extents):
            own = [copies[index] for index in indices]
            for pages in self._pages:
                for index, part in zip(indices, gather(pages, pool, own, threads=self._threads), strict=True):
                    totals[index] = (totals[index] + part) & 0xFFFF_FFFF_FFFF_FFFF
        return totals

    def scatter(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        *,
        token_counts: Sequence[int] = (),
        first_slots: Sequence[int] = (),
    ) -> None:
        """Copies extents into pages; arguments and errors as for `gather`. The extents have the default counts."""
        copies = self._copies(extents, blocks, token_counts or [one.token_count for one in extents], first_slots)
        for pool, indices in _by_pool(extents):
            own = [copies[index] for index in indices]
            for pages in self._pages:
                scatter(pages, pool, own, threads=self._threads)

    def _copies(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        token_counts: Sequence[int],
        first_slots: Sequence[int],
    ) -> list[ChunkCopy]:
        counts = token_counts or [self._spec.chunk_size] * len(extents)
        slots = first_slots or [0] * len(extents)
        return [
            ChunkCopy(
                offset=extent.offset, extent_tokens=count, token_count=count, block_ids=block_ids, first_slot=slot
            )
            for extent, block_ids, count, slot in zip(extents, blocks, counts, slots, strict=True)
        ]


def _whole_chunk(spec: KvSpec, pages: Pages) -> ChunkCopy:
    block_count = -(-spec.chunk_size // pages.block_tokens)
    return ChunkCopy(offset=0, extent_tokens=spec.chunk_size, token_count=spec.chunk_size, block_ids=range(block_count))


def _by_pool(extents: Sequence[Extent]) -> Iterator[tuple[memoryview, list[int]]]:
    """Indices of the extents of each pool: those of a lost node may be among them."""
    pools = {id(extent.pool): extent.pool for extent in extents}
    for number, pool in pools.items():
        yield pool.memory, [index for index, extent in enumerate(extents) if id(extent.pool) == number]
