"""Pages: made from tensors, and refused where tiles cannot be moved whole."""

from __future__ import annotations

import dataclasses

import pytest

import lmkv_kernels
from lmkv_kernels import BlockCopy, Pages, pages_from_tensors
from tests.kernels.layouts import random_bytes

torch = pytest.importorskip("torch")

PAGES = Pages(
    layer_addresses=(4096, 8192),
    block_stride_bytes=128,
    head_stride_bytes=64,
    tile_bytes=64,
    head_count=2,
    first_head=2,
    kv_head_count=4,
    block_count=8,
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "uint8", "float8_e4m3fn"])
def test_tensors_of_any_dtype_become_pages(dtype: str) -> None:
    tensors = [torch.zeros(6, 2, 4, 16, dtype=getattr(torch, dtype)) for _ in range(3)]
    pages = pages_from_tensors(tensors, 2, 4)
    element = tensors[0].element_size()
    assert pages == Pages(
        layer_addresses=tuple(tensor.data_ptr() for tensor in tensors),
        block_stride_bytes=2 * 4 * 16 * element,
        head_stride_bytes=4 * 16 * element,
        tile_bytes=4 * 16 * element,
        head_count=2,
        first_head=2,
        kv_head_count=4,
        block_count=6,
    )


def test_layers_of_one_allocation_and_heads_outside_blocks_work() -> None:
    backing = torch.arange(3 * 2 * 6 * 4 * 16, dtype=torch.int32).view(3, 2, 6, 4, 16)  # [layer, head, block, ...]
    tensors = [layer.transpose(0, 1) for layer in backing]
    pages = pages_from_tensors(tensors, 0, 2)
    assert (pages.block_stride_bytes, pages.head_stride_bytes, pages.tile_bytes) == (256, 6 * 256, 256)
    pool = random_bytes(1, pages.extent_bytes(2))
    lmkv_kernels.gather(pages, pool, [BlockCopy(offset=0, extent_block_count=2, block_ids=[5, 1])])
    expected = backing[:, :, [5, 1]].contiguous().numpy().tobytes()
    assert pool.tobytes() == expected


def test_one_head_and_one_block_may_have_any_stride() -> None:
    tensor = torch.zeros(5, 1, 4, 16).as_strided((5, 1, 4, 16), (64, 1, 16, 1))
    assert pages_from_tensors([tensor], 0, 1).block_stride_bytes == 256
    tensor = torch.zeros(1, 2, 4, 16).as_strided((1, 2, 4, 16), (1, 64, 16, 1))
    assert pages_from_tensors([tensor], 0, 2).block_count == 1


def test_tensors_that_cannot_be_moved_by_tiles_are_refused() -> None:
    good = torch.zeros(4, 2, 8, 16)
    bad = {
        "tiles of shape": good.transpose(2, 3),
        "shape": good[0],
        "laid out unlike": torch.zeros(4, 2, 8, 32),
        "on meta": torch.zeros(4, 2, 8, 16, device="meta"),
    }
    for words, tensor in bad.items():
        with pytest.raises(ValueError, match=words):
            pages_from_tensors([good, tensor], 0, 2)
    with pytest.raises(ValueError, match="empty"):
        pages_from_tensors([], 0, 2)
    with pytest.raises(ValueError, match="not among the model's 2"):
        pages_from_tensors([good], 1, 2)
    with pytest.raises(ValueError, match="must be a multiple of 8, not 3"):
        pages_from_tensors([torch.zeros(4, 1, 3, 1, dtype=torch.uint8)], 0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_addresses": ()}, "layer_addresses is empty"),
        ({"layer_addresses": (4096, 4100)}, r"layer_addresses\[1\]"),
        ({"layer_addresses": (0, 8)}, r"layer_addresses\[0\]"),
        ({"tile_bytes": 0}, "tile_bytes must be positive"),
        ({"tile_bytes": 60}, "tile_bytes must be a multiple of 8"),
        ({"head_count": 0}, "head_count"),
        ({"first_head": 3}, "heads 3 to 4"),
        ({"first_head": -1}, "heads -1"),
        ({"block_count": 0}, "block_count"),
        ({"block_stride_bytes": 64}, "overlap"),
        ({"head_stride_bytes": 56}, "head_stride_bytes 56 makes tiles overlap"),
        ({"block_stride_bytes": 120}, "block_stride_bytes 120 makes tiles overlap"),
        ({"block_stride_bytes": -128}, "block_stride_bytes"),
    ],
)
def test_pages_that_contradict_themselves_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PAGES, **change)  # type: ignore[arg-type]


def test_an_extent_holds_all_layers_and_all_heads_of_the_model() -> None:
    assert PAGES.extent_bytes(3) == 2 * 4 * 3 * 64
