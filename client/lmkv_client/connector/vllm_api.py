"""Everything that the connector imports from vLLM, and what lmkv does where a supported version lacks it.

No other module of `lmkv_client` imports vLLM, except `lmkv_client.plugin`: vLLM loads that before anything else and
in each of its processes, so it imports two names when it is called. An import contract in `pyproject.toml` checks this.

| name | module in vLLM | used for |
|---|---|---|
| `KVConnectorBase_V1`, `KVConnectorRole` | `distributed.kv_transfer.kv_connector.v1` | the connector and its roles |
| `SupportsHMA` | `distributed.kv_transfer.kv_connector.v1.base` | vLLM keeps several KV-cache groups |
| `KVConnectorTransferResults` | the same | failed loads, by request |
| `KVConnectorMetadata`, `KVConnectorWorkerMetadata` | the same | messages between the connector's two sides |
| `KVConnectorStats`, `KVConnectorPromMetrics` | `distributed.kv_transfer.kv_connector.v1.metrics` | statistics |
| `VllmConfig`, `ModelConfig`, `LoadConfig`, `LoRAConfig` | `config` | what the engine is |
| `envs` | `envs` | environment variables that change what it computes |
| `KVCacheConfig`, `KVQuantMode`, the `...Spec` classes | `v1.kv_cache_interface` | KV-cache groups and their kinds |
| `get_tensor_model_parallel_rank`, `get_pp_group` | `distributed.parallel_state` | the ranks of a worker |
| `get_pp_indices` | `distributed.utils` | the layers of a pipeline stage |
| `Request`, `RequestStatus` | `v1.request` | requests |
| `SchedulerOutput` | `v1.core.sched.output` | what a step computes, and the blocks of its requests |
| `KVCacheBlocks` | `v1.core.kv_cache_manager` | the blocks that a load fills |
| `KVConnectorOutput` | `v1.outputs` | the workers' reports |
| `LoRARequest` | `lora.request` | adapters in keys |
| `BlockStored`, `BlockRemoved`, `KVCacheEvent`, `MEDIUM_...` | `distributed.kv_events` | KV events |
| `generate_block_hash_extra_keys`, `maybe_convert_block_hash`, `to_event_extra_keys` | `v1.core.kv_cache_utils` | \
hashes in KV events |
| `adapter_pages` | `v1.core.kv_cache_utils._gen_lora_extra_hash_keys` | which adapters share pages in vLLM |
| `init_logger` | `logger` | logs |
| `attention_isa` | `v1.attention.backends.cpu_attn._get_attn_isa` | the format of pages on CPUs |
| `engine_core` | `v1.engine.core.EngineCore` | changes of weights, which have no hook |
| `cpu_store_kv` | `_custom_ops.cpu_attn_reshape_and_cache` | a trial of that format |

All are in each supported version, except:

| name | since | without it |
|---|---|---|
| `CacheHitSource` (`v1.metrics.cache_hit_source`) | 0.32 | None; vLLM does not ask for sources of hits |
| `EngineCore.set_weight_version` | 0.32 | versions of weights are named in the configuration only |
| `KVCacheConfig.cache_hit_alignment_tokens` | 0.32 | models with other groups than one of full attention are refused |
| `Request.kv_hints` | 0.32 | None; hints are read from `kv_transfer_params` only |
| `KVCacheConfig.hash_block_size` | 0.32 | blocks of one group are hashed whole |

`client/lmkv_client/vllm_contract.py` lists the attributes and signatures that lmkv relies on and names each that a
version of vLLM does not have: `make verify-vllm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm import __version__ as VLLM_VERSION  # noqa: N812  # a constant here
from vllm import envs
from vllm.config import LoadConfig, LoRAConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    _gen_lora_extra_hash_keys,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31
    CacheHitSource = None

if TYPE_CHECKING:
    import torch

__all__ = [
    "FIRST_WITH_GROUPS",
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "VLLM_VERSION",
    "AttentionSpec",
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVQuantMode",
    "LoRAConfig",
    "LoRARequest",
    "LoadConfig",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModelConfig",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "SupportsHMA",
    "VllmConfig",
    "adapter_pages",
    "attention_isa",
    "cpu_store_kv",
    "engine_core",
    "envs",
    "generate_block_hash_extra_keys",
    "get_pp_group",
    "get_pp_indices",
    "get_tensor_model_parallel_rank",
    "hash_block_size",
    "hit_alignment",
    "init_logger",
    "maybe_convert_block_hash",
    "processed_tokens",
    "to_event_extra_keys",
]

FIRST_WITH_GROUPS = "0.32"
"""The first version of vLLM under which lmkv serves more than one KV-cache group of full attention."""


def hit_alignment(kv_cache_config: KVCacheConfig) -> int | None:
    """Tokens of which every prefix-cache hit is a multiple; 0 if there is no such number, None before vLLM 0.32."""
    if not hasattr(kv_cache_config, "cache_hit_alignment_tokens"):
        return None
    return kv_cache_config.cache_hit_alignment_tokens or 0


def processed_tokens(request: Request) -> int:
    """Tokens of a request whose KV the steps that have ended have computed or loaded."""
    count: int = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, count)


def hash_block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of each of `Request.block_hashes`."""
    first: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return getattr(kv_cache_config, "hash_block_size", None) or first


def engine_core() -> Any:
    """vLLM's class of the process that schedules."""
    from vllm.v1.engine.core import EngineCore  # needed in that process only

    return EngineCore


def adapter_pages(lora: LoRARequest) -> tuple[Any, ...]:
    """The values by which vLLM distinguishes pages of a LoRA adapter: its name, and since 0.32 its path too."""
    return tuple(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))


def attention_isa(vllm_config: VllmConfig, head_size: int, block_size: int) -> str:
    """The kernel that vLLM's CPU attention chooses, by its name for it."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # needed on CPUs only

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa: str = _get_attn_isa(dtype, block_size, head_size, cache_dtype)
    return isa


def cpu_store_kv(
    keys: torch.Tensor, values: torch.Tensor, pages: Sequence[torch.Tensor], slots: torch.Tensor, isa: str
) -> None:
    """Stores keys and values as vLLM's CPU attention does, in its pages for keys and its pages for values."""
    from vllm import _custom_ops  # needed on CPUs only

    key_pages, value_pages = pages
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, isa)
