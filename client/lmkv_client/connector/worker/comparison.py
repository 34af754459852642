"""Compares the KV of a chunk that was computed again with the held one, layer by layer, for the heads of one rank.

Computing a chunk twice gives the same bytes only if its tokens are computed in the same steps by the same kernels;
otherwise rounding differs. So errors are measured, and the scheduler side judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv_client.connector.messages import Comparison, LayerError
from lmkv_kernels import ChunkCopy, Pages

Floats = NDArray[np.float32]

TINY = float(np.finfo(np.float32).tiny)
BYTE_TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names of KV dtypes of one byte."""


def compare(pages: Pages, dtype: str, memory: Any, copy: ChunkCopy, held_offset: int) -> Comparison:
    """Measures how the rank's heads differ between the extent that `copy` has written and one of the same shape.

    `memory` is that of the pool.
    """
    fresh, held = (_heads(pages, memory, copy, offset) for offset in (copy.offset, held_offset))
    read = READERS[dtype]
    first = pages.first_layer
    return Comparison(
        layers={first + layer: layer_error(read(fresh[layer]), read(held[layer])) for layer in range(len(fresh))}
    )


def layer_error(fresh: Floats, held: Floats) -> LayerError:
    """Measures the differences between two computations of one layer's KV.

    They are without bound if a number is finite in one of them only.
    """
    is_number = np.isfinite(fresh)
    if not np.array_equal(is_number, np.isfinite(held)):
        return LayerError(np.inf, np.inf)
    if not is_number.all():
        fresh, held = np.where(is_number, fresh, 0), np.where(is_number, held, 0)
    with np.errstate(over="ignore"):  # of a number whose exponent is wrong: an error without bound
        size = max(float(np.sqrt(np.mean(np.square(fresh)))), TINY)
        difference = np.abs(fresh - held)
        mean = float(np.sqrt(np.mean(np.square(difference)))) / size
    difference /= np.minimum(np.abs(fresh), np.abs(held)) + np.float32(size)
    return LayerError(mean if np.isfinite(size) else np.inf, float(difference.max()))


def _heads(pages: Pages, memory: Any, copy: ChunkCopy, offset: int) -> NDArray[np.uint8]:
    """The bytes of the rank's layers and heads in an extent, `[layer, head, part, row, byte]`."""
    rows = pages.row_count(copy.extent_tokens)
    shape = (pages.chunk_layers, pages.kv_head_count, len(pages.parts), rows, pages.row_bytes)
    extent = np.frombuffer(memory, np.uint8, pages.extent_bytes(copy.extent_tokens), offset).reshape(shape)
    layers = slice(pages.first_layer, pages.first_layer + len(pages.layer_addresses))
    return extent[layers, pages.first_head : pages.first_head + pages.head_count]


def _of_bfloat16(raw: NDArray[np.uint8]) -> Floats:
    """The numbers are the high halves of those in float32. Ten times as fast as shifts."""
    halves = raw.view(np.uint16)
    words = np.zeros((*halves.shape, 2), np.uint16)
    words[..., 1] = halves
    numbers: Floats = words.view(np.float32)[..., 0]
    return numbers


@cache
def _values_of(name: str) -> Floats:
    """The value of each byte of a dtype."""
    import torch

    values: Floats = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    return values


READERS: dict[str, Callable[[NDArray[np.uint8]], Floats]] = {
    "float32": lambda raw: raw.view(np.float32),
    "float16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bfloat16": _of_bfloat16,
} | {kv_dtype: lambda raw, name=name: _values_of(name)[raw] for kv_dtype, name in BYTE_TYPES.items()}  # type: ignore[misc]
"""Converts bytes of each KV dtype that can be compared; states have another one, and layouts that are not known."""
