"""Comparisons of chunks: the errors of layers, of the heads that a rank has."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lmkv.spec import KvPart
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from lmkv_client.connector.messages import AuditedExtent, ExtentChecksum
from lmkv_client.connector.vllm_api import cpu_store_kv
from lmkv_client.connector.worker.comparison import compare
from lmkv_kernels import ChunkCopy, gather, token_rows, whole_tiles

LAYERS, HEADS, TOKENS, SIZE = 3, 4, 16, 8


def extents(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with a chunk twice; and its two extents as `[extent, layer, head, part, token, element]`."""
    values = torch.randn(LAYERS, HEADS, 2, TOKENS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool = torch.stack([values, values]).contiguous()
    return pool.view(torch.uint8).flatten(), pool


def audited(offset: int, token_count: int, computed_count: int) -> AuditedExtent:
    held = ExtentChecksum(offset=offset, size_bytes=0, checksum=0)
    return AuditedExtent(held=held, token_count=token_count, computed_count=computed_count)


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
        part = KvPart(layer_count=LAYERS, kv_head_count=HEADS, head_size=SIZE, kv_dtype=name)
        found = compare(pages, part, memory.numpy(), copy, audited(size, TOKENS, TOKENS))
        wrong = {layer for layer, error in found.layers.items() if error.mean > 0}
        assert list(found.layers) == layers
        assert wrong == ({1} if first_head == 2 else set())
        if wrong:
            assert found.worst.mean == pytest.approx(math.sqrt(2), rel=0.2), "half of the rank's numbers are negative"


SPAN = 6
"""Tokens that a layer with a window reads, one less than these before its own."""


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("computed", [9, TOKENS])
def test_a_chunk_of_which_fewer_tokens_are_computed_is_compared_in_these(computed: int, has_window: bool) -> None:
    part = KvPart(layer_count=LAYERS, kv_head_count=HEADS, head_size=SIZE, kv_dtype="float32")
    if has_window:
        part = replace(part, rule=PART_RULE_LAST, span=SPAN)
    values = torch.randn(LAYERS, HEADS, 2, 12, SIZE)
    for wrong_token, is_found in ((None, False), (8, True), (10, computed > 10), (2, not has_window)):
        held = values[:, :, :, part.first_kept(12) :].clone()
        computed_count = min(computed, 12)
        fresh = values[:, :, :, part.first_kept(computed_count) : computed_count].clone()
        if wrong_token is not None and wrong_token >= part.first_kept(12):
            held[1, 2, :, wrong_token - part.first_kept(12)] += 1
        memory = torch.cat([fresh.flatten(), held.flatten()]).view(torch.uint8).numpy()
        pages = token_rows([torch.zeros(1, HEADS, TOKENS, 2 * SIZE) for _ in range(LAYERS)], 0, HEADS)
        kept = part.kept_tokens(computed_count)
        copy = ChunkCopy(offset=0, extent_tokens=kept, token_count=kept, block_ids=[0])
        found = compare(pages, part, memory, copy, audited(fresh.numel() * 4, 12, computed_count))
        assert {layer for layer, error in found.layers.items() if error.most > 0} == ({1} if is_found else set())


@pytest.mark.parametrize("isa", ["vec", "vec16", "another"])
def test_what_lies_behind_a_chunk_in_its_last_block_of_native_tiles_is_not_compared(isa: str) -> None:
    """The blocks have other tokens there. Of an unknown packing only whole blocks are compared."""
    heads, size, block = 2, 32, 32
    part = KvPart(
        layer_count=1, kv_head_count=heads, head_size=size, kv_dtype="float32", tile_isa=f"{isa}-x", block_size=block
    )
    values = torch.randn(2, 3 * block, heads, size)
    for token_count, wrong_token, is_found in (
        (block + 7, None, False),
        (block + 7, 3, True),
        (block + 7, block + 6, isa != "another"),
        (block + 7, block + 7, False),
        (7, 6, isa != "another"),
    ):
        chunks, computed_count = [], token_count
        for number, tokens in enumerate((token_count, 2 * block)):
            own = values.clone()
            own[:, computed_count:] += number  # other tokens follow
            if number and wrong_token is not None:
                own[0, wrong_token] += 1
            tiles = torch.zeros(4, heads, block, 2 * size)
            halves = tiles.view(4, heads, 2 * block, size).chunk(2, dim=2)
            slots = torch.arange(3 * block) + block
            cpu_store_kv(own[0], own[1], halves, slots, isa if isa != "another" else "vec")
            pages = whole_tiles([tiles], 0, heads)
            chunk = torch.zeros(pages.extent_bytes(tokens), dtype=torch.uint8).numpy()
            ids = range(1, 1 + -(-tokens // block))
            copy = ChunkCopy(offset=0, extent_tokens=tokens, token_count=tokens, block_ids=list(ids))
            gather(pages, chunk, [copy])
            chunks.append(chunk)
        fresh, held = chunks
        memory = np.concatenate([fresh, held])
        copy = ChunkCopy(offset=0, extent_tokens=token_count, token_count=token_count, block_ids=[1])
        found = compare(pages, part, memory, copy, audited(fresh.size, 2 * block, token_count))
        assert any(error.most > 0 for error in found.layers.values()) == is_found
        assert bool(found.layers) == (token_count >= block or isa != "another")
