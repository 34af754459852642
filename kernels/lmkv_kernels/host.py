"""Python wrappers of the CPU kernels: each checks all arguments, then makes one native call without the GIL."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import _host
from lmkv_kernels.copies import ChunkCopy, check, check_written_once
from lmkv_kernels.pages import WORD_BYTES, Pages

Buffer = bytes | bytearray | memoryview | mmap.mmap | NDArray[Any]
"""Contiguous memory, such as `lmkv.pool.pool.Pool.buffer`."""


def gather(
    pages: Pages, pool: Buffer, copies: Sequence[ChunkCopy], *, threads: int = 1, summed: bool = True
) -> list[int]:
    """Copies tokens from pages into extents of the pool, and computes checksums in the same pass if `summed`.

    Returns per copy what its words add to its chunk's checksum: the checksum itself if one rank has all heads and
    copies all tokens, else a part; parts are added modulo 2^64. Without `summed` it is 0. The pool ranges of the copies
    must not overlap. Uses up to `threads` threads (0: the best number) if there are enough bytes. Raises `ValueError`,
    before any byte is copied, if a copy does not fit the pages or the pool.
    """
    memory = _bytes_of(pool, "pool")
    if not memory.flags.writeable:
        raise ValueError("pool is read-only")
    _check_call(pages, threads)
    rows, block_ids = check(pages, memory.size, copies)
    checksums = np.empty(len(rows) if summed else 0, np.uint64)
    _host.gather(_addresses(pages), _geometry(pages), memory, rows, block_ids, checksums, threads)
    return checksums.tolist() if summed else [0] * len(rows)


def scatter(pages: Pages, pool: Buffer, copies: Sequence[ChunkCopy], *, threads: int = 1) -> None:
    """Copies tokens from extents of the pool into pages; the inverse of `gather`.

    Raises `ValueError`, before any byte is copied, if a copy does not fit, or two copies write the same row.
    """
    memory = _bytes_of(pool, "pool")
    _check_call(pages, threads)
    rows, block_ids = check(pages, memory.size, copies)
    check_written_once(pages, rows, block_ids)
    _host.scatter(_addresses(pages), _geometry(pages), memory, rows, block_ids, threads)


def checksum(buffer: Buffer, offset: int = 0, size_bytes: int | None = None, *, threads: int = 1) -> int:
    """Checksum of the chunk in `buffer[offset : offset + size_bytes]`, by default up to the end of the buffer.

    Raises `ValueError` if the range is not inside the buffer or its size is not a multiple of 8.
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


def summed_copy(target: int, source: int, size_bytes: int, first_word: int) -> int:
    """Copies bytes of a chunk between two addresses, which the caller must have checked.

    Returns what they add to the chunk's checksum; `first_word` is the index of the first word in the chunk. Raises
    `ValueError` if the size is not a multiple of 8.
    """
    if size_bytes < 0 or size_bytes % WORD_BYTES:
        raise ValueError(f"size_bytes must be a multiple of {WORD_BYTES}, not {size_bytes}")
    return _host.summed_copy(target, source, size_bytes, first_word)


def chunk_keys(tokens: NDArray[np.uint32], root: bytes, chunk_size: int) -> bytes:
    """Keys of a prompt's full chunks and of the tokens after them, 16 bytes each.

    The same as `lmkv.keys` for chunks without extras, twice as fast. Raises `ValueError` if the tokens are not a flat
    contiguous array of u32, the root is not a key, or `chunk_size` is below 1.
    """
    if tokens.dtype != np.dtype("<u4") or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError("tokens must be a flat contiguous array of u32")
    if len(root) != 16:
        raise ValueError(f"root must be a key of 16 bytes, not {len(root)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be 1 or more, not {chunk_size}")
    return _host.chunk_keys(tokens, _bytes_of(root, "root"), chunk_size)


def token_ids(json: Buffer) -> NDArray[np.uint32]:
    """Parses a JSON list of token ids into a read-only array, at a tenth of the cost of a list of Python integers.

    Raises `ValueError` if it is not a list of integers from 0 to 2^32 - 1.
    """
    return np.frombuffer(_host.token_ids(_bytes_of(json, "json")), np.uint32)


def _bytes_of(buffer: Buffer, name: str) -> NDArray[np.uint8]:
    """A view of the buffer as bytes. The buffer cannot be unmapped or resized while it exists."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (BufferError, ValueError) as error:
        raise ValueError(f"{name} is not contiguous memory: {error}") from None


def _addresses(pages: Pages) -> NDArray[np.uint64]:
    return np.array(pages.layer_addresses, np.uint64)


def _geometry(pages: Pages) -> NDArray[np.int64]:
    return np.array(pages.geometry(), np.int64)


def _check_call(pages: Pages, threads: int) -> None:
    if pages.device != "cpu":
        raise ValueError(f"the pages are on {pages.device}, not in CPU memory")
    _check_threads(threads)


def _check_threads(threads: int) -> None:
    if threads < 0:
        raise ValueError(f"threads must be 0 or more, not {threads}")
