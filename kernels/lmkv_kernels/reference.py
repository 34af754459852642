"""The plain numpy twin of the kernels: slow, obvious, and what they must agree with bit for bit.

Arguments are as in `lmkv_kernels.host`, unchecked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.pages import BlockCopy, Pages

Bytes = NDArray[np.uint8]


def checksum(words: Bytes, first_word: int = 0) -> int:
    """What a run of words, the first of which is word `first_word` of its chunk, adds to the chunk's checksum."""
    word = words.view("<u8")
    position = np.arange(first_word + 1, first_word + 1 + word.size, dtype=np.uint64).astype(np.uint32)
    low = word.astype(np.uint32) + position * np.uint32(0x9E3779B1)
    high = (word >> np.uint64(32)).astype(np.uint32) + position * np.uint32(0x85EBCA77)
    sums = word + low.astype(np.uint64) * high.astype(np.uint64)
    return int(sums.sum(dtype=np.uint64))


def gather(pages: Pages, pool: Bytes, copies: Sequence[BlockCopy]) -> list[int]:
    """Pages to pool; returns per copy what its words add to the chunk's checksum."""
    sums = []
    for copy in copies:
        total = 0
        for start, tile in _tiles(pages, copy):
            begin = copy.offset + start
            pool[begin : begin + pages.tile_bytes] = tile
            total += checksum(pool[begin : begin + pages.tile_bytes].copy(), start // 8)
        sums.append(total % 2**64)
    return sums


def scatter(pages: Pages, pool: Bytes, copies: Sequence[BlockCopy]) -> None:
    """Pool to pages."""
    for copy in copies:
        for start, tile in _tiles(pages, copy):
            begin = copy.offset + start
            tile[:] = pool[begin : begin + pages.tile_bytes]


def _tiles(pages: Pages, copy: BlockCopy) -> Iterator[tuple[int, Bytes]]:
    """Each tile of a copy: where it begins in the chunk, and the page memory it has."""
    for layer, address in enumerate(pages.layer_addresses):
        for head in range(pages.head_count):
            row = layer * pages.kv_head_count + pages.first_head + head
            for index, block_id in enumerate(copy.block_ids):
                start = (row * copy.extent_block_count + copy.first_block + index) * pages.tile_bytes
                page = address + block_id * pages.block_stride_bytes + head * pages.head_stride_bytes
                yield start, _memory(page, pages.tile_bytes)


def _memory(address: int, size_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
