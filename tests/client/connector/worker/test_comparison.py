"""Comparisons of chunks: the errors of layers, of the heads that a rank has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lmkv_client.connector.worker.comparison import READERS, compare, layer_error
from lmkv_kernels import ChunkCopy, token_rows

LAYERS, HEADS, TOKENS, SIZE = 3, 4, 16, 8


def extents(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with a chunk twice; and its two extents as `[extent, layer, head, part, token, element]`."""
    values = torch.randn(LAYERS, HEADS, 2, TOKENS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool = torch.stack([values, values]).contiguous()
    return pool.view(torch.uint8).flatten(), pool


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_only_the_heads_and_layers_of_the_rank_are_compared(name: str, dtype: torch.dtype) -> None:
    memory, pool = extents(dtype)
    pool[0, 1, 2] *= -1  # the third head of the second layer
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


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_bytes_are_read_as_numbers_of_eight_bits(name: str, dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(READERS[name](raw.numpy()), raw.view(dtype).float().numpy())


def test_numbers_that_are_not_finite_differ_without_bound_from_those_that_are() -> None:
    fresh = np.ones(8, np.float32)
    for value in (np.nan, np.inf, -np.inf):
        held = fresh.copy()
        held[3] = value
        assert layer_error(fresh, held) == layer_error(held, fresh) == (math.inf, math.inf)
        assert layer_error(held, held) == (0, 0)


def test_one_flipped_bit_is_in_the_largest_error_and_not_in_the_mean() -> None:
    fresh = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    held = fresh.copy()
    held.view(np.uint32)[7] ^= 1 << 23
    error = layer_error(fresh, held)
    assert error.mean < 0.01
    assert error.most > 0.1


def test_layers_of_zeros_are_equal() -> None:
    assert layer_error(np.zeros(8, np.float32), np.zeros(8, np.float32)) == (0, 0)
