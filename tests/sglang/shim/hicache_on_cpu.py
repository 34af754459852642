"""Shim for CPUs: HiCache's copies between the device's pool and the host pool, when both are host memory.

A plugin of SGLang, found by its entry point. SGLang 0.5.23 has these copies for GPUs only, and pins the host pool and
LoRA adapters by CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def transfer_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots between pools of layers; layout `layer_first`."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of pages of the host pool to the device; layout `page_first_direct`."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def back_up_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies all layers of slots to pages of the host pool; layout `page_first_direct`."""
    pages = dst_indices[::page_size] // page_size
    count = len(src_ptrs) // len(dst_ptrs)
    for index, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[index * count : (index + 1) * count]):
            target[pages, layer] = source[src_indices].view(-1, page_size, *source.shape[1:])


def install() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import mha, mla

    not_pinned = (False, "cpu", "default")
    mha.MHATokenToKVPoolHost.__init__.__defaults__ = not_pinned
    of_latents = mla.MLATokenToKVPoolHost
    of_latents.__init__.__defaults__ = (*not_pinned, *of_latents.__init__.__defaults__[len(not_pinned) :])
    for module in (mha, mla):
        module.transfer_kv_direct = transfer_direct
        module.transfer_kv_per_layer_direct_pf_lf = load_layer
        module.transfer_kv_all_layer_direct_lf_pf = back_up_layers
    make_pool = MLATokenToKVPool.__init__

    def initialize(pool: Any, *args: Any, **settings: Any) -> None:
        attend_to_latents()
        make_pool(pool, *args, **settings)

    MLATokenToKVPool.__init__ = initialize
    leave_memory_unpinned()


def leave_memory_unpinned() -> None:
    """Has torch ignore the wish for memory that CUDA has pinned: there is none."""

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return make(*args, **options)

        return made

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def attend_to_latents() -> None:
    """Has a model with MLA attend to latents in every step: the attention for CPUs reads nothing but the KV cache."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
