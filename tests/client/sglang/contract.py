"""The objects that SGLang 0.5.23 passes to a storage backend, with the fields that lmkv uses: for tests without SGLang.

`tests/sglang/test_contract.py` compares them with SGLang's own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from lmkv_client.sglang.linker_api import LinkerRank

LAYERS, PAGES, PAGE_SIZE, HEADS, SIZE = 3, 24, 16, 2, 8
LATENT = 24
"""Elements of a token with MLA."""
SHAPES = {
    "layer_first": (LAYERS, PAGES * PAGE_SIZE, HEADS, SIZE),
    "page_first": (PAGES * PAGE_SIZE, LAYERS, HEADS, SIZE),
    "page_first_direct": (PAGES, LAYERS, PAGE_SIZE, HEADS, SIZE),
    "page_head": (PAGES, HEADS, PAGE_SIZE, LAYERS, SIZE),
}
"""Shape of the keys, and of the values, by layout."""
MLA_SHAPES = {
    "layer_first": (LAYERS, PAGES * PAGE_SIZE, 1, LATENT),
    "page_first": (PAGES * PAGE_SIZE, LAYERS, 1, LATENT),
    "page_first_direct": (PAGES, LAYERS, PAGE_SIZE, 1, LATENT),
}


@dataclass(kw_only=True)
class HostPoolFields:
    """The fields of `HostKVCache`."""

    layout: str
    kv_buffer: torch.Tensor
    page_size: int = PAGE_SIZE
    dtype: torch.dtype = torch.bfloat16


@dataclass(kw_only=True)
class StorageConfigFields(LinkerRank):
    """The fields of `HiCacheStorageConfig`: a linker has the same of itself."""

    model_name: str | None = "tiny"
    is_mla_model: bool = False


def host_pool(layout: str, *, seed: int = 0, is_mla: bool = False) -> HostPoolFields:
    """A pool of a layout, with random bytes; zeros with a negative seed."""
    shape = MLA_SHAPES[layout] if is_mla else (2, *SHAPES[layout])
    buffer = torch.zeros(shape, dtype=torch.bfloat16)
    if seed >= 0:
        buffer.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return HostPoolFields(layout=layout, kv_buffer=buffer)


def slots(pages: Sequence[int]) -> torch.Tensor:
    """The slots of these pages of a pool, as SGLang passes them."""
    return torch.tensor([page * PAGE_SIZE + slot for page in pages for slot in range(PAGE_SIZE)], dtype=torch.int64)


def page_hashes(tokens: Sequence[int], prior: bytes = b"") -> list[str]:
    """SGLang's names of a prompt's full pages: 64 hexadecimal digits each."""
    hashes = []
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        prior = sha256(prior + struct.pack(f"<{PAGE_SIZE}I", *tokens[start : start + PAGE_SIZE])).digest()
        hashes.append(prior.hex())
    return hashes
