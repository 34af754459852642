"""Compiled host kernels. They do not check arguments; call them through `lmkv_kernels`, which does."""

import numpy as np
from numpy.typing import NDArray

def isa() -> str:
    """The instruction set that the kernels use on this processor."""

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
    """Copies pages to the pool; fills `checksums` [copies], or computes none if it is empty.

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
    """Copies the pool to pages; arguments as for `gather`."""

def checksum(pool: NDArray[np.uint8], offset: int, size_bytes: int, threads: int, portable: bool = False) -> int:
    """The checksum of one extent."""

def summed_copy(target: int, source: int, size_bytes: int, first_word: int, portable: bool = False) -> int:
    """Copies bytes between addresses; returns what their words, from `first_word` on, add to the checksum."""

def chunk_keys(tokens: NDArray[np.uint32], root: NDArray[np.uint8], chunk_size: int, portable: bool = False) -> bytes:
    """Keys of the chunks of `chunk_size` tokens and of the tokens after them, 16 bytes each."""

def token_ids(json: NDArray[np.uint8]) -> bytes:
    """The integers of a JSON list as u32. Raises `ValueError` if it is not a list of integers from 0 to 2^32 - 1."""

class JsonScan:
    """Scans a JSON text while its parts arrive. Keeps the places of `max_fields` fields of its object."""

    def __init__(self, max_fields: int) -> None: ...
    def add(self, part: bytes) -> None:
        """Scans the next part."""

    @property
    def fields(self) -> bytes:
        """Rows of 8 u64, one for each field of the outermost object.

        They are: begin and end of its name, with quotes, and of its value; objects and lists of the value; its texts,
        names included; commas of its own list or object; and whether it has something else but whole numbers from 0 on.
        """

    @property
    def is_object(self) -> bool:
        """Whether the text so far is one object, if it is JSON."""

    @property
    def size(self) -> int:
        """Bytes of the parts."""

    @property
    def commas(self) -> int:
        """Commas outside of texts."""

    @property
    def opened(self) -> int:
        """Objects and lists."""

    @property
    def texts(self) -> int:
        """Texts, names of fields included."""

    @property
    def colons(self) -> int:
        """Colons outside of texts."""

    @property
    def is_ascii(self) -> bool:
        """Whether all characters so far are ASCII."""

    @property
    def has_more_fields(self) -> bool:
        """Whether there are more than `max_fields`."""

def differences(
    number: int,
    table: NDArray[np.float32],
    pool: NDArray[np.uint8],
    fresh: int,
    held: int,
    layer_stride: int,
    count: int,
    found: NDArray[np.float64],
    portable: bool = False,
) -> None:
    """Fills `found` with two differences for each layer of two extents at these offsets: mean, and most.

    `number` is an index, as `lmkv_kernels.differences` has it. A layer has `count` elements, and the next one begins
    `layer_stride` bytes behind its first byte. `table` has the values of elements of one byte.
    """

def codec_isa() -> str:
    """The instruction set that the codecs use on this processor."""

def encoded_bytes(element: int, code: int, plane_elements: int, group_elements: int, count: int) -> int:
    """Bytes of `count` encoded elements. `element` and `code` are indices, as `lmkv_kernels.codecs` has them."""

def encode(
    element: int,
    code: int,
    plane_elements: int,
    group_elements: int,
    chunk: NDArray[np.uint8],
    encoded: NDArray[np.uint8],
    portable: bool = False,
) -> bool:
    """Encodes a chunk; False if it has elements that are too large, infinite, or no numbers."""

def decode(
    element: int,
    code: int,
    plane_elements: int,
    group_elements: int,
    encoded: NDArray[np.uint8],
    chunk: NDArray[np.uint8],
    portable: bool = False,
) -> None:
    """Decodes a chunk."""

def split(element: int, chunk: NDArray[np.uint8], planes: NDArray[np.uint8], portable: bool = False) -> None:
    """Sorts the bytes of elements by their significance."""

def join(element: int, planes: NDArray[np.uint8], chunk: NDArray[np.uint8], portable: bool = False) -> None:
    """The inverse of `split`."""
