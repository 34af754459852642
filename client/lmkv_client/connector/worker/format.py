"""In which format an engine's KV is kept, and its pages in that format.

Native tiles are the engine's blocks as they are. Token-major chunks have each token's key and value side by side: what
an engine of any block size and page layout can make of its own, provided that lmkv knows how it keeps a block. vLLM's
layouts on GPUs are known; how its CPU attention packs a block is tried out before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from lmkv.errors import ConfigError
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.kv_layout import LayerGroup
from lmkv_client.connector.vllm_api import AttentionSpec, cpu_store_kv
from lmkv_kernels import ChunkCopy, Pages, gather, packed_rows, token_rows, whole_states, whole_tiles

TRIAL_BLOCKS = 3


def make_pages(tensors: Sequence[torch.Tensor], spec: KvSpec, group: LayerGroup, *, first_head: int) -> Pages:
    """The pages of one rank's layers of a KV-cache group, for chunks of this spec.

    `tensors` are `[blocks, heads, block size, content]` per layer, or `[blocks, 1, 1, state]`. Raises `ValueError` if
    the pages cannot be had.
    """
    part = spec.parts[group.part]
    make: Callable[..., Pages] = whole_tiles
    if part.rule == PART_RULE_END:
        make = partial(whole_states, chunk_tokens=spec.chunk_size)
    elif spec.format != NATIVE_TILES:
        is_packed = tensors[0].device.type == "cpu"
        make = packed_rows if is_packed else partial(token_rows, part_count=1 if part.mla else 2)
    pages = make(tensors, first_head, part.kv_head_count, first_layer=group.first_layer, layer_count=part.layer_count)
    size_bytes, expected = pages.extent_bytes(part.kept_tokens(spec.chunk_size)), spec.part_bytes(group.part)
    if size_bytes != expected:
        raise ValueError(
            f"a chunk of this engine's pages has {size_bytes} bytes, and its KvSpec says {expected}: "
            "its layers are not all alike, or keep something besides keys and values"
        )
    if part.rule != PART_RULE_END and pages.block_tokens != group.block_size:
        raise ValueError(
            f"the attention kernels use blocks of {pages.block_tokens} tokens, and the engine's have "
            f"{group.block_size}: set its --block-size to {pages.block_tokens}"
        )
    return pages


def check_packing(isa: str, cache: AttentionSpec) -> None:
    """Tries out whether this engine's CPU attention packs a block as `packed_rows` has it.

    vLLM stores some random keys and values, and they are read back. Raises `ConfigError` if they are not the same.
    """

    heads, size, tokens = 2, cache.head_size, TRIAL_BLOCKS * cache.block_size
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(tokens, heads, size, generator=generator).to(cache.dtype) for _ in range(2))
    pages_memory = torch.zeros(TRIAL_BLOCKS + 1, heads, cache.block_size, 2 * size, dtype=cache.dtype)
    # As vLLM's CPU attention divides it up.
    halves = pages_memory.view(TRIAL_BLOCKS + 1, heads, 2 * cache.block_size, size).chunk(2, dim=2)
    block_ids = list(range(TRIAL_BLOCKS, 0, -1))
    slots = torch.tensor([block * cache.block_size + slot for block in block_ids for slot in range(cache.block_size)])
    try:
        cpu_store_kv(keys, values, halves, slots, isa)
        pages = packed_rows([pages_memory], 0, heads)
    except (RuntimeError, ValueError) as error:
        raise _unknown(isa, str(error)) from None
    chunk = torch.zeros(pages.extent_bytes(tokens), dtype=torch.uint8)
    copy = ChunkCopy(offset=0, extent_tokens=tokens, token_count=tokens, block_ids=block_ids)
    gather(pages, chunk.numpy(), [copy])
    expected = torch.stack([keys, values]).permute(2, 0, 1, 3).contiguous()  # [head, part, token, element]
    if not torch.equal(chunk, expected.view(torch.uint8).flatten()):
        raise _unknown(isa, "keys and values were not where they should be")


def _unknown(isa: str, why: str) -> ConfigError:
    return ConfigError(
        f"kv_format: how the CPU attention's kernel {isa!r} packs a block is not known to this version of lmkv "
        f"({why}); use kv_format native",
        key="kv_format",
    )
