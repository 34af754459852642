"""Compares the KV of a chunk that was computed again with the held one, layer by layer, for the heads of one rank.

Computing a chunk twice gives the same bytes only if its tokens are computed in the same steps by the same kernels;
otherwise rounding differs. So errors are measured, and the scheduler side judges them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv_client.connector.messages import Comparison, LayerError
from lmkv_kernels import ChunkCopy, Pages
from lmkv_kernels.differences import NO_TABLE, differences

BYTE_TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names of KV dtypes of one byte."""


def compare(pages: Pages, dtype: str, memory: Any, copy: ChunkCopy, held_offset: int) -> Comparison:
    """Measures how the rank's heads differ between the extent that `copy` has written and one of the same shape.

    `memory` is that of the pool. A number that is finite in one of them only makes the errors infinite. Raises
    `ValueError` if an extent is not inside the pool.
    """
    head_bytes = len(pages.parts) * pages.row_count(copy.extent_tokens) * pages.row_bytes
    layer_bytes = pages.kv_head_count * head_bytes
    begin = pages.first_layer * layer_bytes + pages.first_head * head_bytes
    found = differences(
        "bytes" if dtype in BYTE_TYPES else dtype,
        memory,
        (copy.offset + begin, held_offset + begin),
        (len(pages.layer_addresses), layer_bytes, pages.head_count * head_bytes),
        _values_of(BYTE_TYPES[dtype]) if dtype in BYTE_TYPES else NO_TABLE,
    )
    layers = enumerate(found.tolist(), pages.first_layer)
    return Comparison(layers={layer: LayerError(mean, most) for layer, (mean, most) in layers})


@cache
def _values_of(name: str) -> NDArray[np.float32]:
    """The value of each byte of a dtype."""
    import torch

    values: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    return values
