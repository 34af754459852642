"""Differences between two computations of a chunk's KV (`kernels/csrc/difference.h`), without the GIL on one thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import _host
from lmkv_kernels.host import Buffer, _bytes_of

NUMBERS = ("bfloat16", "float16", "float32", "bytes")
"""Element types, in the order in which the native code numbers them. A table maps each of `bytes` to its value."""
NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "bytes": 1}
NO_TABLE = np.zeros(256, np.float32)


def differences(
    number: str,
    pool: Buffer,
    offsets: tuple[int, int],
    layers: tuple[int, int, int],
    table: NDArray[np.float32] = NO_TABLE,
) -> NDArray[np.float64]:
    """Measures, for each layer, by how much the bytes at the second of two offsets differ from those at the first.

    `layers` are the number of layers, the bytes from the beginning of one to that of the next, and the bytes that are
    compared of each. Returns `[layer, mean and most]`: the root mean square of the differences, as a share of that of
    the first values; and the largest difference, as a share of the smaller value and that root mean square. Raises
    `ValueError` if what is to be compared is not inside the pool, or not whole elements.
    """
    memory = _bytes_of(pool, "pool")
    layer_count, stride, size_bytes = layers
    element_bytes = NUMBER_BYTES[number]
    if layer_count < 1 or stride < size_bytes or size_bytes < element_bytes or table.size != NO_TABLE.size:
        raise ValueError(f"there are no {layer_count} layers of {size_bytes} bytes, {stride} bytes apart")
    if any(value % element_bytes for value in (*offsets, stride, size_bytes)):
        raise ValueError(f"offsets and sizes must be multiples of {element_bytes} bytes")
    if min(offsets) < 0 or max(offsets) + (layer_count - 1) * stride + size_bytes > memory.size:
        raise ValueError(f"the layers at {offsets[0]} and {offsets[1]} are not inside the pool of {memory.size} bytes")
    found = np.empty(2 * layer_count, np.float64)
    fresh, held = offsets
    count = size_bytes // element_bytes
    _host.differences(NUMBERS.index(number), table, memory, fresh, held, stride, count, found)
    return found.reshape(layer_count, 2)
