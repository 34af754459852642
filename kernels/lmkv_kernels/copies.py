"""The arguments of the copy kernels, which tokens of which chunks to copy, and their validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.pages import WORD_BYTES, Pages


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCopy:
    """The tokens of one chunk to copy: `token_count` tokens from `first_token` on.

    In the pages they are consecutive in `block_ids`, from token `first_slot` of the first block on. Whole tiles begin
    with a block, and the last one is copied whole even if the chunk ends within it.
    """

    offset: int
    """Offset of the chunk's extent in the pool, in bytes."""
    extent_tokens: int
    """Number of tokens of the whole chunk."""
    token_count: int
    block_ids: Sequence[int]
    first_token: int = 0
    first_slot: int = 0
    group: int = 0
    """The group of layers whose pages are copied: they share block ids. The kernels are called for each group."""


def copied_bytes(pages: Pages, copies: Sequence[ChunkCopy]) -> int:
    """Total bytes of the copies, for the heads of this rank."""
    rows = sum(pages.row_count(copy.token_count) for copy in copies)
    return rows * len(pages.layer_addresses) * pages.head_count * len(pages.parts) * pages.row_bytes


Rows = NDArray[np.int64]
"""Per copy: offset, rows of the extent, first row, rows to copy, first row in the first block, number of blocks."""


def check(pages: Pages, pool_bytes: int, copies: Sequence[ChunkCopy]) -> tuple[Rows, NDArray[np.int64]]:
    """Converts copies to rows and block ids. Raises `ValueError` if one does not fit the pages or the pool."""
    rows = []
    for index, copy in enumerate(copies):
        row = _row(pages, copy)
        if problem := _problem(pages, pool_bytes, copy, row):
            raise ValueError(f"copies[{index}]: {problem}")
        rows.append(row)
    # All ids at once, with numpy: there may be thousands.
    block_ids = np.fromiter(
        chain.from_iterable(copy.block_ids for copy in copies), np.int64, sum(len(copy.block_ids) for copy in copies)
    )
    if (wrong := block_ids[(block_ids < 0) | (block_ids >= pages.block_count)]).size:
        raise ValueError(f"block_ids: block {wrong[0]} is not among the pages' {pages.block_count}")
    return np.array(rows, np.int64).reshape(-1, 6), block_ids


def check_written_once(pages: Pages, rows: Rows, block_ids: NDArray[np.int64]) -> None:
    """Raises `ValueError` if two copies write the same row of the pages."""
    ordered = np.sort(block_ids)
    if not (ordered[1:] == ordered[:-1]).any():
        return
    ends: dict[int, list[tuple[int, int]]] = {}
    for block_id, first, stop in _touched(pages, rows, block_ids):
        ends.setdefault(block_id, []).append((first, stop))
    for block_id, ranges in ends.items():
        ranges.sort()
        if any(first < stop for (_, stop), (first, _) in pairwise(ranges)):
            raise ValueError(f"block_ids: block {block_id} would be written twice")


def _touched(pages: Pages, rows: Rows, block_ids: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Each written block with the range of its rows."""
    ids = iter(block_ids.tolist())
    for _, _, _, count, slot, id_count in rows.tolist():
        for block in range(id_count):
            begin = block * pages.rows_per_block
            yield next(ids), max(slot - begin, 0), min(slot + count - begin, pages.rows_per_block)


def _row(pages: Pages, copy: ChunkCopy) -> tuple[int, ...]:
    return (
        copy.offset,
        pages.row_count(copy.extent_tokens),
        copy.first_token // pages.row_tokens,
        pages.row_count(copy.token_count),
        copy.first_slot // pages.row_tokens,
        len(copy.block_ids),
    )


def _problem(pages: Pages, pool_bytes: int, copy: ChunkCopy, row: tuple[int, ...]) -> str | None:
    offset, extent_rows, first_row, row_count, first_slot, id_count = row
    if copy.extent_tokens < 1:
        return f"extent_tokens must be positive, not {copy.extent_tokens}"
    if offset < 0 or offset % WORD_BYTES:
        return f"offset {offset} is not a multiple of {WORD_BYTES} from 0 up"
    end = offset + pages.extent_bytes(copy.extent_tokens)
    if end > pool_bytes:
        return f"the extent from offset {offset} to {end} ends behind the pool of {pool_bytes} bytes"
    if copy.first_token < 0 or copy.token_count < 0 or first_row + row_count > extent_rows:
        return f"{copy.token_count} tokens from first_token {copy.first_token} on do not fit into {copy.extent_tokens}"
    if not 0 <= copy.first_slot < pages.block_tokens:
        return f"first_slot {copy.first_slot} is not in a block of {pages.block_tokens} tokens"
    if copy.first_token % pages.row_tokens or copy.first_slot % pages.row_tokens:
        return (
            f"first_token {copy.first_token} and first_slot {copy.first_slot} are not where a block begins, "
            f"and blocks of {pages.row_tokens} tokens are moved whole"
        )
    if id_count != -(-(first_slot + row_count) // pages.rows_per_block):
        return (
            f"{id_count} block_ids do not hold {copy.token_count} tokens from first_slot {copy.first_slot} on, "
            f"with {pages.block_tokens} tokens a block"
        )
    return None
