"""What the linker relies on in SGLang: how it is made, the methods and fields, and where pages are in a KV cache."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache import linker_factory
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker, UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from lmkv_client.sglang import LmkvLinker, linker_api
from lmkv_client.sglang.linker import BUFFERS, SCALES, device_tensors
from tests.client.sglang.contract import HEADS, LATENT, LAYERS, PAGE_SIZE, SIZE
from tests.client.sglang.device import Component, LinkerParamsFields, ServerArgsFields, TransferFields

METHODS = sorted(UnifiedCacheLinker.__abstractmethods__)


def test_the_factory_makes_the_linker() -> None:
    config = UnifiedCacheLinkerConfig.from_dict(
        {"linker": "LmkvLinker", "linker_module_path": "lmkv_client.sglang", "linker_extra_config": {"model_id": "a"}}
    )
    assert (config.linker, config.linker_module_path) == ("LmkvLinker", "lmkv_client.sglang")
    assert issubclass(LmkvLinker, UnifiedCacheLinker)
    assert not inspect.isabstract(LmkvLinker)
    source = inspect.getsource(linker_factory.create_unified_cache_linker)
    for argument in ("components=components", "extra_config=", "forward_stream=forward_stream"):
        assert argument in source


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_parameters_that_sglang_passes(name: str) -> None:
    theirs = list(inspect.signature(getattr(UnifiedCacheLinker, name)).parameters)
    assert list(inspect.signature(getattr(LmkvLinker, name)).parameters) == theirs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(LinkerParamsFields, CacheInitParams), (TransferFields, PoolTransfer), (ServerArgsFields, ServerArgs)],
)
def test_objects_have_the_fields_that_are_used(ours: Any, theirs: Any) -> None:
    known = {name for one in theirs.__mro__ for name in getattr(one, "__annotations__", {})}
    assert {field.name for field in dataclasses.fields(ours)} <= known


def test_the_pool_and_the_component_of_pages_have_their_names() -> None:
    assert {PoolName.KV: 1}[linker_api.KV] == 1
    assert [one.name for one in ComponentType if one.name == linker_api.FULL] == [Component.FULL.name]


def test_ranks_are_known() -> None:
    assert is_dp_attention_enabled() in (True, False)
    for name in ("tp_rank", "tp_size", "attn_tp_rank", "attn_tp_size"):
        with pytest.raises(
            (ValueError, RuntimeError), match=f"{name}|not published"
        ):  # an unknown name: AttributeError
            getattr(get_parallel(), name)


def test_the_scheduler_asks_for_completed_offloads_at_the_beginning_of_each_pass() -> None:
    """When it does, the linker releases what the last pass has found and not loaded."""
    spec = importlib.util.find_spec("sglang.srt.managers.scheduler")  # to import it warns of what CPUs lack
    assert spec
    assert spec.origin
    scheduler = Path(spec.origin).read_text()
    begin = scheduler.index("def get_next_batch_to_run")
    assert scheduler.index("self._process_hicache_events()", begin) < scheduler.index("get_new_batch_prefill", begin)
    assert scheduler.count("check_hicache_events()") == 1
    assert "num_completed_offloads()" in inspect.getsource(UnifiedRadixCache.check_hicache_events)
    assert inspect.getsource(UnifiedRadixCache).count("linker.num_completed_offloads()") == 1


def test_slots_of_a_load_are_the_requests_own() -> None:
    """So that the linker may copy into them at once."""
    source = inspect.getsource(UnifiedCacheLinkerWrapper.load_back)
    assert source.index("LinkerTransferPhase.LOAD") < source.index("self.cache_linker.load(")


@pytest.mark.parametrize("kind", BUFFERS)
def test_kv_caches_have_the_tensors_that_lmkv_knows(kind: str) -> None:
    """A pool that SGLang itself has made, for CPUs."""
    sizes: dict[str, Any] = {
        "size": 8 * PAGE_SIZE,
        "page_size": PAGE_SIZE,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "MHATokenToKVPool":
        pool = memory_pool.MHATokenToKVPool(**sizes, head_num=HEADS, head_dim=SIZE)
        assert all(hasattr(pool, name) for name in SCALES)
        buffers = [*pool.k_buffer, *pool.v_buffer]
    else:
        pool = memory_pool.MLATokenToKVPool(**sizes, kv_lora_rank=LATENT - 8, qk_rope_head_dim=8)
        buffers = pool.kv_buffer
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape))
    tensors = [layer for part in device_tensors(pool, PAGE_SIZE) for layer in part]
    assert len(tensors) == len(buffers)
    for layer, buffer in zip(tensors, buffers, strict=True):
        for page in (0, 5, 8):
            assert torch.equal(layer[page].transpose(0, 1), buffer[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])
