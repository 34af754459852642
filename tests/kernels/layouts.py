"""Random KV-caches for the kernel tests: real tensors of every layout, with poison wherever nothing may be written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lmkv_kernels import ChunkCopy, Pages, packed_rows, token_rows, whole_tiles
from lmkv_kernels.reference import ReferencePages, checksum

Bytes = NDArray[np.uint8]

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 1, 3, 2),
    "LHBNC": (0, 2, 1, 3),
    "BLHNC": (1, 0, 2, 3),
    "BLNHC": (1, 0, 3, 2),
    "BHLNC": (1, 2, 0, 3),
}
"""vLLM's names of page layouts, and the order in which memory has layer, block, head and token, outermost first."""
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank's pages and their plain twin, a pool, and copies between them. `memory` holds all pages."""

    pages: Pages
    twin: ReferencePages
    memory: Bytes
    pool: Bytes
    copies: list[ChunkCopy]

    @property
    def pool_tensor(self) -> Tensor:
        return torch.from_numpy(self.pool)

    def expected_sums(self) -> list[int]:
        """What each copy's words add to its chunk's checksum, of the pool as it is."""
        sums = []
        for copy in self.copies:
            total = 0
            rows, width = self.pages.row_count(copy.extent_tokens), self.pages.row_bytes
            first, count = copy.first_token // self.pages.row_tokens, self.pages.row_count(copy.token_count)
            heads = self.pages.first_head, self.pages.first_head + self.pages.head_count
            for layer in range(self.pages.first_layer, self.pages.first_layer + len(self.pages.layer_addresses)):
                for head in range(*heads):
                    for part in range(len(self.pages.parts)):
                        run = (layer * self.pages.kv_head_count + head) * len(self.pages.parts) + part
                        start = (run * rows + first) * width
                        words = self.pool[copy.offset + start : copy.offset + start + count * width]
                        total += checksum(words.copy(), start // 8)
            sums.append(total % 2**64)
        return sums


def random_bytes(seed: int, size_bytes: int) -> Bytes:
    """Bytes on a 64-byte boundary."""
    raw = np.random.default_rng(seed).integers(0, 256, size_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes]


def kv_cache(
    seed: int,
    shape: tuple[int, int, int, int, int],
    layout: str,
    dtype: torch.dtype,
    gaps: tuple[int, ...] = (0, 0, 0, 0),
) -> tuple[Bytes, list[Tensor]]:
    """Random memory, and in it a cache of `shape` `[layer, block, head, token, content]`, as one tensor per layer.

    `gaps` are elements left out after each layer, block, head and token.
    """
    strides, stride = [0, 0, 0, 0, 1], shape[4]
    for dimension in reversed(LAYOUTS[layout]):
        strides[dimension] = stride = stride + gaps[dimension]
        stride *= shape[dimension]
    memory = random_bytes(seed, stride * dtype.itemsize)
    return memory, list(torch.from_numpy(memory).view(dtype).as_strided(shape, strides).unbind(0))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every layout, dtype and inside of a tile; gaps, any rank's heads, any of a chunk's layers, copies that begin
    anywhere, shuffled blocks."""
    inside = draw(st.sampled_from(["whole", "tokens", "tokens", "packed"]))
    dtype = draw(st.sampled_from(DTYPES))
    step = max(1, 8 // dtype.itemsize)
    part_count = 2 if inside == "packed" else draw(st.sampled_from([1, 2]))
    content = part_count * step * draw(st.one_of(st.integers(1, 6), st.sampled_from([8, 16, 24])))
    block_size = draw(st.integers(1, 9))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    first_head = draw(st.integers(0, 2))
    kv_head_count = first_head + heads + draw(st.integers(0, 2))
    first_layer = draw(st.sampled_from([0, 0, 1, 2]))
    layer_count = first_layer + layers + draw(st.integers(0, 1))
    within = {"first_layer": first_layer, "layer_count": layer_count}
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    if inside != "tokens" and layout in ("LBNHC", "BLNHC"):
        layout = "LBHNC"  # tiles must be contiguous
    gap = st.integers(0, 3).map(lambda count: count * step)
    gaps = (draw(gap), draw(gap), draw(gap), draw(gap) if inside == "tokens" else 0)

    wanted = draw(st.lists(st.tuples(st.integers(1, 20), *[st.integers(0, 20)] * 3), max_size=3))
    plans, block_count, end = [], draw(st.integers(1, 3)), 0
    for count, before, after, slot in wanted:
        if inside == "whole":
            before, slot = before // block_size * block_size, 0
        slot %= block_size
        blocks = -(-(slot + count) // block_size)
        plans.append((count, before, after, slot, blocks))
        block_count += blocks
    shape = (layers, block_count, heads, block_size, content)
    seed = draw(st.integers(0, 2**32 - 1))
    memory, tensors = kv_cache(seed, shape, layout, dtype, gaps)
    if inside == "whole":
        pages = whole_tiles(tensors, first_head, kv_head_count, **within)
    elif inside == "packed":
        pages = packed_rows(tensors, first_head, kv_head_count, **within)
    else:
        pages = token_rows(tensors, first_head, kv_head_count, part_count=part_count, **within)
    twin = ReferencePages(
        tensors=tensors,
        first_head=first_head,
        kv_head_count=kv_head_count,
        inside=inside,  # type: ignore[arg-type]
        part_count=part_count,
        **within,
    )
    ids = draw(st.permutations(range(block_count)))
    copies = []
    for count, before, after, slot, blocks in plans:
        offset = end + 8 * draw(st.integers(0, 3))
        tokens = before + count + after
        copies.append(
            ChunkCopy(
                offset=offset,
                extent_tokens=tokens,
                token_count=count,
                first_token=before,
                first_slot=slot,
                block_ids=tuple(ids[:blocks]),
            )
        )
        ids = ids[blocks:]
        end = offset + pages.extent_bytes(tokens)
    pool = random_bytes(seed + 1, end + 8 * draw(st.integers(0, 3)))
    return Case(pages=pages, twin=twin, memory=memory, pool=pool, copies=copies)


def large_case(*, layer_count: int = 4, head_count: int = 4, chunk_count: int = 4, inside: str = "whole") -> Case:
    """Chunks of 2 blocks with tiles of 32 KiB, enough bytes that several threads are used."""
    shape = (layer_count, 2 * chunk_count, head_count, 128, 128)
    memory, tensors = kv_cache(7, shape, "LBHNC", torch.bfloat16)
    make = {"whole": whole_tiles, "tokens": token_rows, "packed": packed_rows}[inside]
    pages = make(tensors, 0, head_count)
    twin = ReferencePages(tensors=tensors, first_head=0, kv_head_count=head_count, inside=inside)  # type: ignore[arg-type]
    extent = pages.extent_bytes(256)
    copies = [
        ChunkCopy(
            offset=index * extent,
            extent_tokens=256,
            token_count=256,
            block_ids=(2 * chunk_count - 1 - 2 * index, 2 * index),
        )
        for index in range(chunk_count)
    ]
    return Case(pages=pages, twin=twin, memory=memory, pool=random_bytes(8, chunk_count * extent), copies=copies)
