"""Models whose layers vLLM splits into KV-cache groups of several kinds, and how these read their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK = 32
CHUNK = 64
HAS_GROUPS = hasattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens")
"""Whether lmkv serves more than one KV-cache group of full attention under this vLLM: since 0.32."""


def require_groups() -> None:
    """Skips the test under a vLLM without what such groups need."""
    if not HAS_GROUPS:
        pytest.skip("vLLM 0.31: one KV-cache group of full attention")


def full(block_size: int = BLOCK) -> KVCacheSpec:
    """Layers that attend to every token."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def sliding(window: int, block_size: int = BLOCK) -> KVCacheSpec:
    """Layers that attend to the last `window` tokens."""
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=window
    )


def local(span: int) -> KVCacheSpec:
    """Layers that attend to the tokens since the last multiple of `span`."""
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=span
    )


def states(block_size: int = CHUNK) -> KVCacheSpec:
    """Recurrent layers: Mamba-1, Mamba-2, GDN and short convolutions look the same to the scheduler."""
    return MambaSpec(
        block_size=block_size, shapes=((2, 64), (3, 8)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align"
    )


@dataclass(frozen=True)
class SimulatedModel:
    """The groups of one model, in vLLM's order."""

    caches: tuple[KVCacheSpec, ...]
    kv_format: str = "native"

    @property
    def has_states(self) -> bool:
        """Whether layers are recurrent."""
        return any(isinstance(cache, MambaSpec) for cache in self.caches)


PLAIN = SimulatedModel((full(),))
MODELS = {
    "full and a window shorter than a block": SimulatedModel((full(), sliding(20))),
    "full and a window of a chunk": SimulatedModel((sliding(CHUNK), full())),
    "full and a window that ends inside a chunk": SimulatedModel((full(), sliding(CHUNK + 40))),
    "full and a window, token by token": SimulatedModel((full(), sliding(CHUNK + 41)), kv_format="token_major"),
    "full and a short window, token by token": SimulatedModel((full(), sliding(11)), kv_format="token_major"),
    "gemma3: windows in two groups": SimulatedModel((sliding(2 * CHUNK), sliding(2 * CHUNK), full())),
    "two windows": SimulatedModel((sliding(40), full(), sliding(3 * CHUNK + 1))),
    "llama4: local chunks": SimulatedModel((local(2 * CHUNK), local(2 * CHUNK), full())),
    "local chunks no longer than a chunk": SimulatedModel((local(CHUNK), full())),
    "old mistral: all layers slide": SimulatedModel((sliding(100),)),
    "all layers slide, in two ways": SimulatedModel((sliding(40), sliding(3 * CHUNK))),
    "states": SimulatedModel((states(), states(), full(CHUNK))),
    "states with smaller blocks": SimulatedModel((states(BLOCK), full(CHUNK))),
    "states and a window": SimulatedModel((states(), full(CHUNK), sliding(2 * CHUNK, CHUNK))),
    "only states": SimulatedModel((states(),)),
}


def kv_cache_config(model: SimulatedModel, vllm_config: VllmConfig, block_count: int) -> KVCacheConfig:
    """What vLLM would make of the groups of this model, with `block_count` pages. Adapts vLLM's configuration to it."""
    if model != PLAIN:
        require_groups()
    groups = [KVCacheGroupSpec([f"layer.{index}"], cache) for index, cache in enumerate(model.caches)]
    result = KVCacheConfig(num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=groups)
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks = block_count
    cache_config.block_size = min(cache.block_size for cache in model.caches)
    cache_config.mamba_cache_mode = "align" if model.has_states else "none"
    alignment, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(result, vllm_config)
    if HAS_GROUPS:
        result.hash_block_size = hash_block_size
        result.cache_hit_alignment_tokens = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            result, vllm_config, alignment, hash_block_size
        )
    return result


def oldest_read(cache: KVCacheSpec, at: int) -> int:
    """The oldest token whose KV the token at this position reads."""
    if isinstance(cache, SlidingWindowSpec):
        return max(0, at + 1 - int(cache.sliding_window))
    if isinstance(cache, ChunkedLocalAttentionSpec):
        return at - at % int(cache.attention_chunk_size)
    return 0


def slots_per_page(caches: Sequence[KVCacheSpec]) -> list[int]:
    """Slots of a page of each group: a state needs one."""
    return [1 if isinstance(cache, MambaSpec) else cache.block_size for cache in caches]
