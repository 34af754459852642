"""Compiled host kernels. They trust their arguments; call them through `lmkv_kernels`, which checks them."""

import numpy as np
from numpy.typing import NDArray

def isa() -> str:
    """Instruction set that the kernels use on this processor."""

def gather(
    layer_addresses: NDArray[np.uint64],
    geometry: NDArray[np.int64],
    pool: NDArray[np.uint8],
    copies: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    threads: int,
    portable: bool = False,
) -> None:
    """Pages to pool; fills `checksums` [copies], or sums nothing if it is empty.

    `geometry` is block stride, head stride, rows per block, row bytes, element bytes, head count, first head, heads of
    the model, number of parts, and of two parts offset, row stride and element stride. A row of `copies` is as in
    `lmkv_kernels.copies.Rows`. `portable` avoids instruction set extensions.
    """

def scatter(
    layer_addresses: NDArray[np.uint64],
    geometry: NDArray[np.int64],
    pool: NDArray[np.uint8],
    copies: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    threads: int,
    portable: bool = False,
) -> None:
    """Pool to pages; arguments as for `gather`."""

def checksum(pool: NDArray[np.uint8], offset: int, size_bytes: int, threads: int, portable: bool = False) -> int:
    """Checksum of one extent."""

def summed_copy(target: int, source: int, size_bytes: int, first_word: int, portable: bool = False) -> int:
    """Copies a run of bytes between addresses; what its words, of which `first_word` is the first, add to the sum."""

def chunk_keys(tokens: NDArray[np.uint32], root: NDArray[np.uint8], chunk_size: int, portable: bool = False) -> bytes:
    """Keys of the chunks of `chunk_size` tokens and of what is left after them, 16 bytes each. `root` has 16 bytes."""

def token_ids(json: NDArray[np.uint8]) -> bytes:
    """The numbers of a JSON list as u32. Raises `ValueError` if it is no list of numbers from 0 to 2^32 - 1."""
