"""What a copy becomes when it goes through a staging buffer: its bytes side by side there, and DMA to or from the pool.

Plain arithmetic, without a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.copies import Rows
from lmkv_kernels.pages import Pages

ALIGNMENT = 256
"""Copies begin at multiples of this in the staging buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DmaCopy:
    """One DMA: `height` rows of `width` bytes, side by side in the staging buffer, `pitch` apart in the pool."""

    pool_offset: int
    staging_offset: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Copies that are made in one launch, through one filling of the staging buffer or without it."""

    indices: list[int]
    """Which of the call's copies."""
    staging_offsets: list[int] | None
    """Where each begins in the staging buffer; None: they go straight to or from the pool."""


def staged_bytes(pages: Pages, row_count: int) -> int:
    """Bytes of a copy of so many rows: this rank's heads alone."""
    return len(pages.layer_addresses) * pages.head_count * len(pages.parts) * row_count * pages.row_bytes


def make_batches(pages: Pages, rows: Rows, capacity_bytes: int) -> list[Batch]:
    """The copies in batches, each of which fits the staging buffer; what cannot be staged first, in one batch.

    Staged are copies of whole chunks: what they have of a layer is one run of bytes in the pool. Of other copies it
    would be as many dma_copies as there are heads and parts, and DMA of short dma_copies is slower than the kernel.
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
    """The DMAs of a staged batch. Copies that are neighbours on both sides share one."""
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
    if width == pitch:  # the layers lie side by side
        layers, width, pitch = 1, layers * width, layers * pitch
    return DmaCopy(
        pool_offset=offset + pages.first_head * per_head,
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
    """A batch as the kernels read it: its copies `[copy, 6]` as `lmkv::ChunkCopy`, its block ids, whose each id is."""
    counts = rows[batch.indices, 5]
    firsts = np.concatenate([[0], np.cumsum(rows[:, 5])])[batch.indices]
    ids = np.concatenate([block_ids[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    copies = rows[batch.indices].copy()
    copies[:, 5] = np.cumsum(counts) - counts
    return copies, ids, np.repeat(np.arange(len(batch.indices)), counts)
