"""The objects that SGLang 0.5.23 passes to a linker, with the fields that lmkv uses: for tests without SGLang.

`tests/sglang/test_linker_contract.py` compares them with SGLang's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from tests.client.sglang.contract import HEADS, LATENT, LAYERS, PAGE_SIZE, PAGES, SIZE, slots

PADDING = PAGE_SIZE
"""Slots of a KV cache before those of its first page: requests never have them."""


class Component(IntEnum):
    """`ComponentType`."""

    FULL = 0
    SWA = 1


class MHATokenToKVPool:
    """A KV cache with heads: the fields of SGLang's class of this name."""

    def __init__(self, seed: int = 0, *, slot_count: int = PAGES * PAGE_SIZE + PADDING) -> None:
        """Random elements; zeros with a negative seed."""
        self.k_buffer = buffers(seed, (slot_count, HEADS, SIZE))
        self.v_buffer = buffers(seed + 100 if seed >= 0 else seed, (slot_count, HEADS, SIZE))
        self.k_scale_buffer: torch.Tensor | None = None


class MLATokenToKVPool:
    """A KV cache of latents."""

    def __init__(self, seed: int = 0) -> None:
        self.kv_buffer = buffers(seed, (PAGES * PAGE_SIZE + PADDING, 1, LATENT))


def buffers(seed: int, shape: Sequence[int]) -> list[torch.Tensor]:
    if seed < 0:
        return [torch.zeros(*shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


@dataclass(kw_only=True)
class ServerArgsFields:
    served_model_name: str = "tiny"


@dataclass(kw_only=True)
class Allocator:
    """What knows the KV cache."""

    pool: Any

    def get_kvcache(self) -> Any:
        return self.pool


@dataclass(kw_only=True)
class LinkerParamsFields:
    """The fields of `CacheInitParams`."""

    token_to_kv_pool_allocator: Allocator
    page_size: int = PAGE_SIZE
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    mtp_draft_device_pools: tuple[object, ...] = ()
    sidecar_draft_device_pools: tuple[object, ...] = ()
    mtp_draft_mamba_pools: tuple[object, ...] = ()


@dataclass(kw_only=True)
class TransferFields:
    """The fields of `PoolTransfer`."""

    name: str = "kv"
    keys: list[str] | None = None
    device_indices: torch.Tensor | None = field(default=None)


def lookup_of(names: Sequence[str]) -> list[TransferFields]:
    """What SGLang passes to `lookup`."""
    return [TransferFields(keys=list(names))]


def copy_of(names: Sequence[str], pages: Sequence[int]) -> list[TransferFields]:
    """What SGLang passes to `load` and `offload`."""
    return [TransferFields(keys=list(names), device_indices=slots(pages))]
