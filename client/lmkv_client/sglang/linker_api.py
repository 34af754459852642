"""Imports from SGLang what `LmkvLinker` needs, and declares the parts of SGLang's objects that it uses.

Without SGLang the base class is empty and there is one rank, so that all else of the linker can be tested.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

try:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
except ModuleNotFoundError:

    class UnifiedCacheLinker:  # type: ignore[no-redef]
        """Base class of external linkers."""


__all__ = ["KV", "DeviceTransfer", "LinkerParams", "LinkerRank", "UnifiedCacheLinker", "linker_rank", "other_pools"]

KV = "kv"
"""SGLang's name of the pool of keys and values, or latents: `PoolName.KV`, which is a string."""
FULL = "FULL"
"""Name of the component of the prefix tree that has the pages of that pool."""


class LinkerParams(Protocol):
    """The fields of `CacheInitParams` that are used."""

    token_to_kv_pool_allocator: Any
    page_size: int
    """Tokens of a page."""
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int


class DeviceTransfer(Protocol):
    """The fields of `PoolTransfer` that are used."""

    @property
    def keys(self) -> Sequence[str] | None:
        """Page hashes, 64 hexadecimal digits each."""

    @property
    def device_indices(self) -> torch.Tensor | None:
        """Slots in the pool, int64, `[pages * page size]`; None in lookups."""


@dataclass(kw_only=True, slots=True)
class LinkerRank:
    """The part of the KV cache that this process has: the fields of `StorageConfig`, as storages get them."""

    model_name: str | None
    is_mla_model: bool
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    extra_config: dict[str, Any] | None = None


def linker_rank(server_args: Any, params: LinkerParams, *, is_mla: bool) -> LinkerRank:
    """The rank of this process; outside of SGLang one of one."""
    rank, size = _tensor_parallel()
    return LinkerRank(
        model_name=str(server_args.served_model_name),
        is_mla_model=is_mla,
        tp_rank=rank,
        tp_size=size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
    )


def _tensor_parallel() -> tuple[int, int]:
    """As in HiCache's configuration of storages, so that both find the same pages."""
    try:
        from sglang.srt.layers.dp_attention import is_dp_attention_enabled
        from sglang.srt.runtime_context import get_parallel
    except ModuleNotFoundError:
        return 0, 1
    parallel = get_parallel()
    if is_dp_attention_enabled():
        return parallel.attn_tp_rank, parallel.attn_tp_size
    return parallel.tp_rank, parallel.tp_size


def other_pools(params: LinkerParams, components: Collection[Any]) -> list[str]:
    """Pools of the model that lmkv does not store: names for messages; empty if there is only that of keys and values.

    `components` are those of the prefix tree, `ComponentType`.
    """
    found = [str(getattr(one, "name", one)) for one in components]
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    found += [name for name in drafts if getattr(params, name, ())]
    return sorted(name for name in found if name != FULL)
