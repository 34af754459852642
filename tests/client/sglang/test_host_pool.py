"""Pages of SGLang's host pools: of every layout the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lmkv.errors import ConfigError
from lmkv_client.sglang.host_pool import layer_tensors, make_pages, page_numbers, pool_tensors
from lmkv_kernels import ChunkCopy, Pages, gather, scatter
from tests.client.sglang.contract import (
    HEADS,
    LATENT,
    LAYERS,
    MLA_SHAPES,
    PAGE_SIZE,
    PAGES,
    SHAPES,
    SIZE,
    HostPoolFields,
    host_pool,
    slots,
)

CHOSEN = [5, 2]
"""Pages that are copied, in this order."""


def canonical(pool: HostPoolFields, page: int, *, is_mla: bool) -> torch.Tensor:
    """One page as `[layer, head, part, token, element]`, by the words of the layouts."""
    parts = [pool.kv_buffer] if is_mla else [pool.kv_buffer[0], pool.kv_buffer[1]]
    rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
    orders = {  # to [layer, token, head, element]
        "layer_first": lambda part: part[:, rows],
        "page_first": lambda part: part[rows].permute(1, 0, 2, 3),
        "page_first_direct": lambda part: part[page],
        "page_head": lambda part: part[page].permute(2, 1, 0, 3),
    }
    return torch.stack([orders[pool.layout](part) for part in parts]).permute(1, 3, 0, 2, 4).contiguous()


def copies(part_count: int) -> tuple[int, list[ChunkCopy]]:
    """Bytes of a page, and the copies of the chosen pages to consecutive extents."""
    size = LAYERS * PAGE_SIZE * 2 * (HEADS * SIZE * 2 if part_count == 2 else LATENT)
    return size, [
        ChunkCopy(offset=index * size, extent_tokens=PAGE_SIZE, token_count=PAGE_SIZE, block_ids=[page])
        for index, page in enumerate(CHOSEN)
    ]


def as_whole(tensors: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(list(part)) for part in tensors]


@pytest.mark.parametrize(
    ("layout", "is_mla"), [*((layout, False) for layout in SHAPES), *((layout, True) for layout in MLA_SHAPES)]
)
def test_layers_are_views_of_the_pool_in_one_order(layout: str, is_mla: bool) -> None:
    pool = host_pool(layout, is_mla=is_mla)
    tensors = pool_tensors(pool, is_mla=is_mla)
    assert [len(part) for part in tensors] == [LAYERS] * (1 if is_mla else 2)
    shape = (PAGES, 1, PAGE_SIZE, LATENT) if is_mla else (PAGES, HEADS, PAGE_SIZE, SIZE)
    assert all(tuple(tensor.shape) == shape for part in tensors for tensor in part)
    for page in (0, PAGES - 1):
        found = torch.stack([part[:, page] for part in as_whole(tensors)]).permute(1, 2, 0, 3, 4)
        assert torch.equal(found, canonical(pool, page, is_mla=is_mla))
    tensors[0][1][3, 0, 5].fill_(7)
    assert int((pool.kv_buffer == 7).sum()) >= (LATENT if is_mla else SIZE), "they are views"


@pytest.mark.parametrize("layout", SHAPES)
def test_chunks_have_the_same_bytes_whatever_the_layout(layout: str) -> None:
    """As `lmkv_client.engine` copies: keys and values are two sets of pages, each with a share of the chunk."""
    pool = host_pool(layout)
    size, wanted = copies(2)
    memory = np.zeros(len(CHOSEN) * size, np.uint8)
    for pages in make_pages(pool_tensors(pool, is_mla=False)):
        gather(pages, memory, wanted)
    expected = torch.cat([canonical(pool, page, is_mla=False).flatten() for page in CHOSEN])
    assert np.array_equal(memory, expected.view(torch.uint8).numpy())
    back = host_pool(layout, seed=-1)
    for pages in make_pages(pool_tensors(back, is_mla=False)):
        scatter(pages, memory, wanted)
    for page in range(PAGES):
        own = canonical(back, page, is_mla=False)
        assert torch.equal(own, canonical(pool, page, is_mla=False)) if page in CHOSEN else not own.any()


@pytest.mark.parametrize("layout", MLA_SHAPES)
def test_latents_are_one_part_of_one_head(layout: str) -> None:
    pool = host_pool(layout, is_mla=True)
    size, wanted = copies(1)
    (pages,) = make_pages(pool_tensors(pool, is_mla=True))
    assert isinstance(pages, Pages)
    memory = np.zeros(len(CHOSEN) * size, np.uint8)
    gather(pages, memory, wanted)
    expected = torch.cat([canonical(pool, page, is_mla=True).flatten() for page in CHOSEN])
    assert np.array_equal(memory, expected.view(torch.uint8).numpy())


def test_a_layout_that_is_not_known_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match="--hicache-mem-layout page_first_kv_split"):
        layer_tensors(torch.zeros(1), "page_first_kv_split", PAGE_SIZE)


def test_slots_are_the_pages_that_they_fill() -> None:
    assert page_numbers(slots([4, 0, 23]).tolist(), PAGE_SIZE, 3) == [4, 0, 23]
    assert page_numbers([], PAGE_SIZE, 0) == []


@pytest.mark.parametrize(
    ("chosen", "page_count"), [(list(range(15)), 1), (list(range(1, 17)), 1), (list(range(32)), 1)]
)
def test_slots_that_are_no_whole_pages_are_refused(chosen: list[int], page_count: int) -> None:
    with pytest.raises(ValueError, match="page"):
        page_numbers(chosen, PAGE_SIZE, page_count)
