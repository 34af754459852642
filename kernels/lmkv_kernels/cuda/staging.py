"""The layout of copies in a staging buffer, and the DMA copies between it and the pool. Pure: needs no device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.copies import Rows
from lmkv_kernels.pages import Pages

ALIGNMENT = 256
"""Alignment of copies in the staging buffer, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DmaCopy:
    """One DMA copy: `height` rows of `width` bytes, contiguous in the staging buffer, `pitch` apart in the pool."""

    pool_offset: int
    staging_offset: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Copies of one launch, through one fill of the staging buffer or without it."""

    indices: list[int]
    """Indices of the call's copies."""
    staging_offsets: list[int] | None
    """Offset of each copy in the staging buffer; None: the launch accesses the pool itself."""


def staged_bytes(pages: Pages, row_count: int) -> int:
    """Bytes of a copy of `row_count` rows, for the heads of this rank."""
    return len(pages.layer_addresses) * pages.head_count * len(pages.parts) * row_count * pages.row_bytes


def make_batches(pages: Pages, rows: Rows, capacity_bytes: int) -> list[Batch]:
    """Splits copies into batches that fit the staging buffer. The first batch has the copies that cannot be staged.

    Only copies of whole chunks are staged: each layer is one contiguous range in the pool. Other copies would need a
    DMA copy per head and part, and short DMA copies are slower than the kernel.
    """
    direct: list[int] = []
    staged: list[Batch] = []
    end = capacity_bytes
    for index, (_, extent_rows, _, row_count, _, _) in enumerate(rows.tolist()):
        size = staged_bytes(pages, row_count)
        if row_count != extent_rows or size > capacity_bytes:
            direct.append(index)
            continue
        if end + size > capacity_bytes:
            staged.append(Batch(indices=[], staging_offsets=[]))
            end = 0
        batch = staged[-1]
        assert batch.staging_offsets is not None
        batch.indices.append(index)
        batch.staging_offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return ([Batch(indices=direct, staging_offsets=None)] if direct else []) + staged


def make_dma_copies(pages: Pages, rows: Rows, batch: Batch) -> list[DmaCopy]:
    """The DMA copies of a staged batch. Copies that are adjacent on both sides are merged."""
    assert batch.staging_offsets is not None
    dma_copies: list[DmaCopy] = []
    for index, staging_offset in zip(batch.indices, batch.staging_offsets, strict=True):
        dma_copy = _dma_copy(pages, int(rows[index, 0]), int(rows[index, 1]), staging_offset)
        last = dma_copies[-1] if dma_copies else None
        if last and last.height == dma_copy.height == 1 and _follows(last, dma_copy):
            dma_copies[-1] = DmaCopy(
                pool_offset=last.pool_offset,
                staging_offset=last.staging_offset,
                width=last.width + dma_copy.width,
                height=1,
                pitch=last.pitch + dma_copy.pitch,
            )
        else:
            dma_copies.append(dma_copy)
    return dma_copies


def _dma_copy(pages: Pages, offset: int, extent_rows: int, staging_offset: int) -> DmaCopy:
    per_head = len(pages.parts) * extent_rows * pages.row_bytes
    layers, width, pitch = len(pages.layer_addresses), pages.head_count * per_head, pages.kv_head_count * per_head
    if width == pitch:  # the layers are contiguous
        layers, width, pitch = 1, layers * width, layers * pitch
    return DmaCopy(
        pool_offset=offset + pages.first_chunk_head * per_head,
        staging_offset=staging_offset,
        width=width,
        height=layers,
        pitch=pitch,
    )


def _follows(last: DmaCopy, dma_copy: DmaCopy) -> bool:
    return (
        dma_copy.pool_offset == last.pool_offset + last.width
        and dma_copy.staging_offset == last.staging_offset + last.width
    )


def launch_words(
    rows: Rows, block_ids: NDArray[np.int64], batch: Batch
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """A batch for the kernels: copies `[copy, 6]` as `lmkv::ChunkCopy`, block ids, and the copy of each id."""
    counts = rows[batch.indices, 5]
    firsts = np.concatenate([[0], np.cumsum(rows[:, 5])])[batch.indices]
    ids = np.concatenate([block_ids[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    copies = rows[batch.indices].copy()
    copies[:, 5] = np.cumsum(counts) - counts
    return copies, ids, np.repeat(np.arange(len(batch.indices)), counts)
