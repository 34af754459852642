"""Compares the KV of a chunk that was computed again with the held one, layer by layer, for the heads of one rank.

Computing a chunk twice gives the same bytes only if its tokens are computed in the same steps by the same kernels;
otherwise rounding differs. So errors are measured, and the scheduler side judges them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.spec import KvPart
from lmkv_client.connector.messages import AuditedExtent, Comparison, LayerError
from lmkv_client.connector.worker.page_copier import is_packed
from lmkv_kernels import ChunkCopy, Pages
from lmkv_kernels.differences import NO_TABLE, differences

BYTE_TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names of KV dtypes of one byte."""


def compare(pages: Pages, part: KvPart, memory: Any, copy: ChunkCopy, audited: AuditedExtent) -> Comparison:
    """Measures how the rank's heads differ between the extent that `copy` has written and a held one.

    `memory` is that of the pool. A number that is finite in one of them only makes the errors infinite. There are no
    layers if both have no tokens in common that can be found in their tiles. Raises `ValueError` if an extent is not
    inside the pool.
    """
    held_offset, number = audited.held.offset, "bytes" if part.kv_dtype in BYTE_TYPES else part.kv_dtype
    table = _values_of(BYTE_TYPES[part.kv_dtype]) if part.kv_dtype in BYTE_TYPES else NO_TABLE
    if audited.computed_count != audited.token_count or copy.extent_tokens % pages.row_tokens:
        first, stop = part.first_kept(audited.token_count), audited.computed_count
        fresh = _tokens(pages, part, memory, copy.offset, (audited.computed_count, first, stop))
        held = _tokens(pages, part, memory, held_offset, (audited.token_count, first, stop))
        layer_count, size_bytes = fresh.shape
        if not size_bytes:
            return Comparison()
        both = np.concatenate([fresh.ravel(), held.ravel()])
        return _errors(
            pages, differences(number, both, (0, fresh.nbytes), (layer_count, size_bytes, size_bytes), table)
        )
    head_bytes = len(pages.parts) * pages.row_count(copy.extent_tokens) * pages.row_bytes
    layer_bytes = pages.kv_head_count * head_bytes
    begin = pages.first_layer * layer_bytes + pages.first_head * head_bytes
    layers = (len(pages.layer_addresses), layer_bytes, pages.head_count * head_bytes)
    offsets = (copy.offset + begin, held_offset + begin)
    return _errors(pages, differences(number, memory, offsets, layers, table))


def _errors(pages: Pages, found: NDArray[np.float64]) -> Comparison:
    layers = enumerate(found.tolist(), pages.first_layer)
    return Comparison(layers={layer: LayerError(mean, most) for layer, (mean, most) in layers})


def _tokens(pages: Pages, part: KvPart, memory: Any, offset: int, tokens: tuple[int, int, int]) -> NDArray[np.uint8]:
    """The bytes of some tokens of a chunk, of the rank's heads, as `[layer, byte]`.

    `tokens` are the number of tokens of the chunk, the first token that is compared, and the first one behind them. The
    last block may also hold tokens behind the chunk. It is left out if its tiles cannot be split between tokens.
    """
    chunk_tokens, first, stop = tokens
    rows, kept = pages.row_count(part.kept_tokens(chunk_tokens)), part.first_kept(chunk_tokens)
    shape = (len(pages.layer_addresses), pages.head_count, len(pages.parts), rows, pages.row_bytes)
    head_bytes = len(pages.parts) * rows * pages.row_bytes
    strides = (pages.kv_head_count * head_bytes, head_bytes, rows * pages.row_bytes, pages.row_bytes, 1)
    begin = offset + pages.first_layer * strides[0] + pages.first_head * head_bytes
    chunk = np.ndarray(shape, np.uint8, memory, begin, strides)
    block, rest = divmod(stop - kept, pages.row_tokens)
    found = [chunk[..., (first - kept) // pages.row_tokens : block, :]]
    if rest and is_packed(part):
        keys, values = np.split(chunk[:, :, 0, block], 2, axis=-1)
        found.append(keys.reshape(*shape[:2], part.head_size, pages.row_tokens, -1)[:, :, :, :rest])
        found.append(values.reshape(*shape[:2], pages.row_tokens, -1)[:, :, :rest])
    return np.concatenate([one.reshape(shape[0], -1) for one in found], axis=1)


@cache
def _values_of(name: str) -> NDArray[np.float32]:
    """The value of each byte of a dtype."""
    import torch

    values: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    return values
