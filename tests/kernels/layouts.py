"""Random page layouts for the kernel tests: real memory with poison around everything that a kernel may touch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmkv_kernels import BlockCopy, Pages

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Pages, a pool and copies between them. `memory` holds the pages of all layers."""

    pages: Pages
    memory: Bytes
    pool: Bytes
    copies: list[BlockCopy]


def random_bytes(seed: int, size_bytes: int) -> Bytes:
    """Bytes on a 64-byte boundary."""
    raw = np.random.default_rng(seed).integers(0, 256, size_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts of both orders of block and head, gaps everywhere, any rank's heads, partial copies, shuffled blocks."""
    small = st.integers(1, 4)
    gap = st.integers(0, 5).map(lambda words: 8 * words)
    tile_bytes = 8 * draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 1024, 1040])))
    layer_count, head_count = draw(st.integers(1, 5)), draw(small)
    first_head = draw(st.integers(0, 3))
    kv_head_count = first_head + head_count + draw(st.integers(0, 2))
    wanted = draw(st.lists(st.tuples(small, st.integers(0, 3), st.integers(0, 3)), max_size=4))
    block_count = sum(count for count, _, _ in wanted) + draw(small)

    inner = tile_bytes + draw(gap)
    if draw(st.booleans()):
        head_stride, block_stride = inner, inner * head_count + draw(gap)
    else:
        head_stride, block_stride = inner * block_count + draw(gap), inner
    layer_bytes = head_stride * head_count + block_stride * block_count + draw(gap)
    seed = draw(st.integers(0, 2**32 - 1))
    memory = random_bytes(seed, layer_bytes * layer_count)

    pages = Pages(
        layer_addresses=tuple(memory.ctypes.data + layer * layer_bytes for layer in range(layer_count)),
        block_stride_bytes=block_stride,
        head_stride_bytes=head_stride,
        tile_bytes=tile_bytes,
        head_count=head_count,
        first_head=first_head,
        kv_head_count=kv_head_count,
        block_count=block_count,
    )
    ids = draw(st.permutations(range(block_count)))
    copies, end = [], 0
    for count, before, after in wanted:
        offset = end + draw(gap)
        blocks = before + count + after
        copies.append(
            BlockCopy(offset=offset, extent_block_count=blocks, first_block=before, block_ids=tuple(ids[:count]))
        )
        ids = ids[count:]
        end = offset + pages.extent_bytes(blocks)
    pool = random_bytes(seed + 1, end + draw(gap))
    return Case(pages=pages, memory=memory, pool=pool, copies=copies)


def large_case(*, layer_count: int = 4, head_count: int = 4, chunk_count: int = 4) -> Case:
    """Chunks of 2 blocks with tiles of 32 KiB, enough bytes that several threads are used."""
    tile_bytes, block_count = 32768, 2 * chunk_count
    block_stride = head_count * tile_bytes
    memory = random_bytes(7, layer_count * block_count * block_stride)
    pages = Pages(
        layer_addresses=tuple(memory.ctypes.data + layer * block_count * block_stride for layer in range(layer_count)),
        block_stride_bytes=block_stride,
        head_stride_bytes=tile_bytes,
        tile_bytes=tile_bytes,
        head_count=head_count,
        first_head=0,
        kv_head_count=head_count,
        block_count=block_count,
    )
    copies = [
        BlockCopy(
            offset=index * pages.extent_bytes(2),
            extent_block_count=2,
            block_ids=(block_count - 1 - 2 * index, 2 * index),
        )
        for index in range(chunk_count)
    ]
    return Case(pages=pages, memory=memory, pool=random_bytes(8, chunk_count * pages.extent_bytes(2)), copies=copies)
