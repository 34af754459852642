"""Pages: made from tensors, and refused where they contradict themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from lmkv_kernels import Pages, packed_rows, separate_rows, token_rows, whole_states, whole_tiles
from lmkv_kernels.pages import TilePart
from tests.kernels.layouts import LAYOUTS, kv_cache

PAGES = Pages(
    layer_addresses=(4096, 8192),
    block_count=8,
    block_stride_bytes=256,
    head_stride_bytes=128,
    rows_per_block=4,
    row_bytes=16,
    element_bytes=2,
    parts=(TilePart(offset=0, row_stride=32, element_stride=2), TilePart(offset=16, row_stride=32, element_stride=2)),
    head_count=2,
    first_head=2,
    kv_head_count=4,
)
"""Two heads of four tokens with a key and a value of eight elements each."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "uint8", "float8_e4m3fn"])
def test_tensors_of_any_dtype_become_whole_tiles(dtype: str) -> None:
    tensors = [torch.zeros(6, 2, 4, 16, dtype=getattr(torch, dtype)) for _ in range(3)]
    element = tensors[0].element_size()
    tile = 4 * 16 * element
    pages = whole_tiles(tensors, 2, 4)
    assert pages == Pages(
        layer_addresses=tuple(tensor.data_ptr() for tensor in tensors),
        block_count=6,
        block_stride_bytes=2 * tile,
        head_stride_bytes=tile,
        rows_per_block=1,
        row_tokens=4,
        row_bytes=tile,
        element_bytes=element,
        parts=(TilePart(offset=0, row_stride=tile, element_stride=element),),
        head_count=2,
        first_head=2,
        kv_head_count=4,
    )
    assert pages.block_tokens == 4
    assert pages.extent_bytes(5) == 3 * 4 * 2 * tile  # the second block whole


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_token_rows_are_found_in_every_layout(layout: str) -> None:
    _, tensors = kv_cache(0, (3, 6, 2, 4, 16), layout, torch.bfloat16)
    pages = token_rows(tensors, 0, 2)
    assert [part.offset for part in pages.parts] == [0, 16]
    assert (pages.row_bytes, pages.rows_per_block, pages.block_tokens) == (16, 4, 4)
    base = tensors[1].data_ptr()
    for block, head, token, element in [(5, 1, 3, 15), (2, 0, 1, 7)]:
        part, offset = divmod(element, 8)
        place = pages.layer_addresses[1] + block * pages.block_stride_bytes + head * pages.head_stride_bytes
        place += pages.parts[part].offset + token * pages.parts[part].row_stride + 2 * offset
        assert place - base == tensors[1][block, head, token, element].data_ptr() - base
    assert pages.extent_bytes(5) == 3 * 2 * 2 * 5 * 16


def test_a_latent_is_one_part() -> None:
    pages = token_rows([torch.zeros(4, 1, 8, 72, dtype=torch.bfloat16)], 0, 1, part_count=1)
    assert (len(pages.parts), pages.row_bytes) == (1, 144)


def test_packed_keys_lie_with_the_tokens_innermost() -> None:
    pages = packed_rows([torch.zeros(4, 2, 32, 16)], 0, 2)
    assert pages.parts == (
        TilePart(offset=0, row_stride=4, element_stride=128),
        TilePart(offset=32 * 8 * 4, row_stride=32, element_stride=4),
    )
    assert not pages.is_contiguous(pages.parts[0])
    assert pages.is_contiguous(pages.parts[1])


def test_one_head_and_one_block_may_have_any_stride() -> None:
    tensor = torch.zeros(5, 1, 4, 16).as_strided((5, 1, 4, 16), (64, 1, 16, 1))
    assert whole_tiles([tensor], 0, 1).block_stride_bytes == 256
    tensor = torch.zeros(1, 2, 4, 16).as_strided((1, 2, 4, 16), (1, 64, 16, 1))
    assert whole_tiles([tensor], 0, 2).block_count == 1


def test_tensors_that_cannot_be_moved_are_refused() -> None:
    good = torch.zeros(4, 2, 8, 16)
    bad = {
        "its content is not contiguous": good.transpose(2, 3),
        "shape": good[0],
        "another layout than": torch.zeros(4, 2, 8, 32),
        "meta": torch.zeros(4, 2, 8, 16, device="meta"),
    }
    for words, tensor in bad.items():
        with pytest.raises(ValueError, match=words):
            token_rows([good, tensor], 0, 2)
    with pytest.raises(ValueError, match="empty"):
        whole_tiles([], 0, 2)
    with pytest.raises(ValueError, match="not among the model's 2"):
        whole_tiles([good], 1, 2)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        whole_tiles([torch.zeros(4, 1, 3, 1, dtype=torch.uint8)], 0, 1)
    with pytest.raises(ValueError, match="cannot be 2 parts"):
        token_rows([torch.zeros(4, 1, 8, 15)], 0, 1)
    by_token = torch.zeros(4, 8, 2, 16).transpose(1, 2)  # heads inside tokens
    for make in (whole_tiles, packed_rows):
        with pytest.raises(ValueError, match="strides"):
            make([by_token], 0, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_addresses": ()}, "layer_addresses is empty"),
        ({"layer_addresses": (4096, 4100)}, r"layer_addresses\[1\]"),
        ({"layer_addresses": (0, 8)}, r"layer_addresses\[0\]"),
        ({"row_bytes": 0}, "row_bytes must be positive"),
        ({"row_bytes": 12}, "row_bytes is 12, not a multiple of 8"),
        ({"row_tokens": 0}, "row_tokens must be positive"),
        ({"element_bytes": 3}, "element_bytes must be 1, 2, 4 or 8, not 3"),
        ({"parts": ()}, "1 to 2 parts, not 0"),
        ({"parts": PAGES.parts * 2}, "1 to 2 parts, not 4"),
        ({"parts": (TilePart(offset=4, row_stride=32, element_stride=2),)}, r"parts\[0\].offset is 4"),
        ({"parts": (TilePart(offset=0, row_stride=20, element_stride=2),)}, r"parts\[0\].row_stride is 20"),
        (
            {"parts": (TilePart(offset=0, row_stride=64, element_stride=4),)},
            r"parts\[0\] has gaps between elements both",
        ),
        ({"head_count": 0}, "head_count"),
        ({"first_head": 3}, "heads 3 to 4"),
        ({"first_head": -1}, "heads -1"),
        ({"first_layer": 1}, r"layers 1 to 2 \(first_layer, layer_addresses\) are not among a chunk's 2"),
        ({"first_layer": 2, "layer_count": 3}, "layers 2 to 3 .* are not among a chunk's 3"),
        ({"first_layer": -1, "layer_count": 3}, "layers -1 to 0"),
        ({"layer_count": 1}, "layers 0 to 1 .* are not among a chunk's 1"),
        ({"block_count": 0}, "block_count"),
        ({"block_stride_bytes": 128}, "stride_bytes 128 makes tiles overlap"),
        ({"head_stride_bytes": 120}, "head_stride_bytes 120 makes tiles overlap"),
        ({"block_stride_bytes": 248}, "block_stride_bytes 248 makes tiles overlap"),
        ({"block_stride_bytes": -256}, "block_stride_bytes"),
        ({"row_bytes": 32}, "overlap"),
        (
            {
                "parts": (
                    TilePart(offset=0, row_stride=2, element_stride=8),
                    TilePart(offset=32, row_stride=16, element_stride=2),
                )
            },
            "offset 32 makes parts overlap: it must be at least 64",
        ),
    ],
)
def test_pages_that_contradict_themselves_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PAGES, **change)  # type: ignore[arg-type]


def test_an_extent_holds_all_layers_all_heads_of_the_model_and_all_parts() -> None:
    assert PAGES.extent_bytes(3) == 2 * 4 * 2 * 3 * 16


def test_an_extent_holds_layers_whose_pages_are_elsewhere_too() -> None:
    pages = dataclasses.replace(PAGES, first_layer=3, layer_count=5)
    assert pages.extent_bytes(3) == 5 * 4 * 2 * 3 * 16
    assert (pages.first_chunk_head, PAGES.first_chunk_head) == (3 * 4 + 2, 2)
    assert (pages.lacks_layers, PAGES.lacks_layers) == (True, False)


@pytest.mark.parametrize("make", [whole_tiles, token_rows, packed_rows])
def test_tensors_may_be_some_layers_of_a_chunk(make: Callable[..., Pages]) -> None:
    tensors = [torch.zeros(4, 2, 8, 16) for _ in range(2)]
    alone, among = make(tensors, 0, 2), make(tensors, 0, 2, first_layer=1, layer_count=4)
    assert among == dataclasses.replace(alone, first_layer=1, layer_count=4)
    with pytest.raises(ValueError, match=r"layers 3 to 4 .* are not among a chunk's 4"):
        make(tensors, 0, 2, first_layer=3, layer_count=4)


def test_a_state_is_one_row_without_the_padding_of_its_page() -> None:
    memory = torch.zeros(6, 2, 4096, dtype=torch.int8)  # the pages of two layers follow each other, block by block
    tensors = [memory[:, layer, :1000].view(6, 1, 1, 1000) for layer in range(2)]
    pages = whole_states(tensors, 1, 2, chunk_tokens=256, first_layer=2, layer_count=5)
    assert pages == Pages(
        layer_addresses=(memory.data_ptr(), memory.data_ptr() + 4096),
        block_count=6,
        block_stride_bytes=8192,
        head_stride_bytes=6 * 8192,
        rows_per_block=1,
        row_tokens=256,
        row_bytes=1000,
        element_bytes=1,
        parts=(TilePart(offset=0, row_stride=1000, element_stride=1),),
        head_count=1,
        first_head=1,
        kv_head_count=2,
        first_layer=2,
        layer_count=5,
    )
    assert pages.extent_bytes(256) == 5 * 2 * 1000
    for shape in ((6, 2, 1, 500), (6, 1, 2, 500)):
        with pytest.raises(ValueError, match=r"not \[blocks, 1, 1, state\]"):
            whole_states([torch.zeros(shape, dtype=torch.int8)], 0, 1, chunk_tokens=256)
    with pytest.raises(ValueError, match="1004, not a multiple of 8"):
        whole_states([torch.zeros(6, 1, 1, 1004, dtype=torch.int8)], 0, 1, chunk_tokens=256)


def test_keys_and_values_at_one_distance_are_parts_of_one_tile() -> None:
    memory = torch.zeros(2, 3, 4, 8, 2, 16)  # keys and values, layers, blocks, tokens, heads
    keys, values = ([memory[part, layer].transpose(1, 2) for layer in range(3)] for part in range(2))
    (pages,) = separate_rows(keys, values, first_head=1, kv_head_count=4)
    assert pages.parts == (
        TilePart(offset=0, row_stride=2 * 16 * 4, element_stride=4),
        TilePart(offset=memory[0].numel() * 4, row_stride=2 * 16 * 4, element_stride=4),
    )
    assert (pages.first_head, pages.head_count, pages.kv_head_count) == (1, 2, 4)


def test_keys_and_values_anywhere_are_pages_by_head() -> None:
    memory = torch.zeros(4, 4, 2, 8, 16)
    keys, values = [memory[1], memory[2]], [memory[3], memory[0]]
    pages = separate_rows(keys, values, 1, 3, first_layer=1, layer_count=4)
    assert [(one.first_head, one.head_count, one.kv_head_count) for one in pages] == [
        (2, 1, 6),
        (3, 1, 6),
        (4, 1, 6),
        (5, 1, 6),
    ]
    assert [one.layer_addresses[0] for one in pages] == [
        memory[part, 0, head].data_ptr() for head in range(2) for part in (1, 3)
    ]
    assert {one.extent_bytes(256) for one in pages} == {4 * 3 * 2 * 256 * 16 * 4}


def test_values_must_be_laid_out_as_keys_are() -> None:
    keys = [torch.zeros(4, 2, 8, 16)]
    for values in ([torch.zeros(4, 2, 8, 8)], [torch.zeros(4, 8, 2, 16).transpose(1, 2)], 2 * keys, []):
        with pytest.raises(ValueError, match=r"layout|empty"):
            separate_rows(keys, values)
