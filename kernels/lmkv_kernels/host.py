"""The CPU kernels' Python side: checks every argument, then makes one native call without the GIL."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import _host
from lmkv_kernels.pages import WORD_BYTES, BlockCopy, Pages

Buffer = bytes | bytearray | memoryview | mmap.mmap | NDArray[Any]
"""Contiguous memory; `lmkv.pool.Pool.buffer` is some."""


def gather(pages: Pages, pool: Buffer, copies: Sequence[BlockCopy], *, threads: int = 1) -> list[int]:
    """Copies blocks of the pages into extents of the pool, and sums them in the same pass.

    Returns per copy what its words add to its chunk's checksum: the checksum itself where one rank has all heads and
    copies all blocks, else a part; parts of ranks and copies are added modulo 2^64. Parts of the pool that two copies
    of one call write must not overlap. Uses up to `threads` threads (0: as many as help) where the bytes are worth it.
    Raises `ValueError`, before a byte is moved, if a copy does not fit the pages or the pool.
    """
    memory = _bytes_of(pool, "pool")
    if not memory.flags.writeable:
        raise ValueError("pool is read-only")
    rows, block_ids = _check(pages, memory.size, copies, threads)
    checksums = np.empty(len(rows), np.uint64)
    _host.gather(_addresses(pages), _geometry(pages), memory, rows, block_ids, checksums, threads)
    return checksums.tolist()


def scatter(pages: Pages, pool: Buffer, copies: Sequence[BlockCopy], *, threads: int = 1) -> None:
    """Copies blocks of extents of the pool into the pages; the other way of `gather`.

    Raises `ValueError`, before a byte is moved, if a copy does not fit, or two copies write one block of the pages.
    """
    memory = _bytes_of(pool, "pool")
    rows, block_ids = _check(pages, memory.size, copies, threads)
    ordered = np.sort(block_ids)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise ValueError(f"block_ids: block {twice[0]} would be written twice")
    _host.scatter(_addresses(pages), _geometry(pages), memory, rows, block_ids, threads)


def checksum(buffer: Buffer, offset: int = 0, size_bytes: int | None = None, *, threads: int = 1) -> int:
    """Checksum of the chunk in `buffer[offset : offset + size_bytes]`; to the end if no size is given.

    Raises `ValueError` if that is not inside the buffer or not a multiple of 8 bytes long.
    """
    memory = _bytes_of(buffer, "buffer")
    if size_bytes is None:
        size_bytes = memory.size - offset
    if offset < 0 or size_bytes < 0 or offset + size_bytes > memory.size:
        raise ValueError(f"bytes {offset} to {offset + size_bytes} are not inside the buffer of {memory.size}")
    if size_bytes % WORD_BYTES:
        raise ValueError(f"size_bytes must be a multiple of {WORD_BYTES}, not {size_bytes}")
    _check_threads(threads)
    return _host.checksum(memory, offset, size_bytes, threads)


def token_ids(json: Buffer) -> NDArray[np.uint32]:
    """The token ids in a JSON list, read-only, at a tenth of what a list of Python's integers costs.

    Raises `ValueError` if it is no list of whole numbers from 0 to 2^32 - 1.
    """
    return np.frombuffer(_host.token_ids(_bytes_of(json, "json")), np.uint32)


def _bytes_of(buffer: Buffer, name: str) -> NDArray[np.uint8]:
    """The buffer as bytes. While the array lives, the buffer cannot be unmapped or resized."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (BufferError, ValueError) as error:
        raise ValueError(f"{name} is not contiguous memory: {error}") from None


def _addresses(pages: Pages) -> NDArray[np.uint64]:
    return np.array(pages.layer_addresses, np.uint64)


def _geometry(pages: Pages) -> NDArray[np.int64]:
    return np.array(
        [
            pages.block_stride_bytes,
            pages.head_stride_bytes,
            pages.tile_bytes,
            pages.head_count,
            pages.first_head,
            pages.kv_head_count,
        ],
        np.int64,
    )


def _check_threads(threads: int) -> None:
    if threads < 0:
        raise ValueError(f"threads must be 0 or more, not {threads}")


def _check(
    pages: Pages, pool_size_bytes: int, copies: Sequence[BlockCopy], threads: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Copies as `[copy, (offset, extent_block_count, first_block, number of block ids)]`, and all their block ids."""
    _check_threads(threads)
    bytes_per_block = pages.extent_bytes(1)
    for index, copy in enumerate(copies):
        if problem := _problem(copy, bytes_per_block, pool_size_bytes):
            raise ValueError(f"copies[{index}]: {problem}")
    rows = [(copy.offset, copy.extent_block_count, copy.first_block, len(copy.block_ids)) for copy in copies]
    # All ids at once, and compared by numpy: there may be thousands.
    block_ids = np.fromiter(
        chain.from_iterable(copy.block_ids for copy in copies), np.int64, sum(row[3] for row in rows)
    )
    if (wrong := block_ids[(block_ids < 0) | (block_ids >= pages.block_count)]).size:
        raise ValueError(f"block_ids: block {wrong[0]} is not among the pages' {pages.block_count}")
    return np.array(rows, np.int64).reshape(-1, 4), block_ids


def _problem(copy: BlockCopy, bytes_per_block: int, pool_size_bytes: int) -> str | None:
    if copy.extent_block_count < 1:
        return f"extent_block_count must be positive, not {copy.extent_block_count}"
    if copy.offset < 0 or copy.offset % WORD_BYTES:
        return f"offset {copy.offset} is not a multiple of {WORD_BYTES} from 0 up"
    end = copy.offset + copy.extent_block_count * bytes_per_block
    if end > pool_size_bytes:
        return f"the extent from offset {copy.offset} to {end} ends behind the pool of {pool_size_bytes} bytes"
    if copy.first_block < 0 or copy.first_block + len(copy.block_ids) > copy.extent_block_count:
        return (
            f"{len(copy.block_ids)} block_ids from first_block {copy.first_block} on "
            f"do not fit into {copy.extent_block_count} blocks"
        )
    return None
