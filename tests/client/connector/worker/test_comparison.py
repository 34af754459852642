"""Comparisons of chunks: the errors of layers, of the heads that a rank has."""

from __future__ import annotations

import math

import pytest
import torch

from lmkv_client.connector.worker.comparison import compare
from lmkv_kernels import ChunkCopy, token_rows

LAYERS, HEADS, TOKENS, SIZE = 3, 4, 16, 8


def extents(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with a chunk twice; and its two extents as `[extent, layer, head, part, token, element]`."""
    values = torch.randn(LAYERS, HEADS, 2, TOKENS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool = torch.stack([values, values]).contiguous()
    return pool.view(torch.uint8).flatten(), pool


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_only_the_heads_and_layers_of_the_rank_are_compared(name: str, dtype: torch.dtype) -> None:
    memory, pool = extents(dtype)
    pool[0, 1, 2] = (-pool[0, 1, 2].float()).to(dtype)  # the third head of the second layer
    size = memory.numel() // 2
    copy = ChunkCopy(offset=0, extent_tokens=TOKENS, token_count=TOKENS, block_ids=[0])
    for first_head, first_layer, layers in ((0, 0, [0, 1]), (2, 0, [0, 1]), (2, 1, [1, 2])):
        tensors = [torch.zeros(1, 2, TOKENS, 2 * SIZE, dtype=dtype) for _ in layers]
        pages = token_rows(tensors, first_head, HEADS, first_layer=first_layer, layer_count=LAYERS)
        found = compare(pages, name, memory.numpy(), copy, size)
        wrong = {layer for layer, error in found.layers.items() if error.mean > 0}
        assert list(found.layers) == layers
        assert wrong == ({1} if first_head == 2 else set())
        if wrong:
            assert found.worst.mean == pytest.approx(math.sqrt(2), rel=0.2), "half of the rank's numbers are negative"
