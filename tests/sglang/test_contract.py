"""What lmkv relies on in SGLang: fields, signatures, the layouts of host pools, and the names of pages."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import hicache_storage, utils
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.shm import HiCacheShm
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs

from lmkv.keys import as_tokens, page_keys, page_seed, root_key
from lmkv_client.sglang import LmkvStorage
from lmkv_client.sglang.host_pool import pool_tensors
from lmkv_client.sglang.sglang_api import WEIGHT_UPDATES, HiCacheStorage, served_model
from tests.client.sglang.contract import (
    HEADS,
    LATENT,
    LAYERS,
    MLA_SHAPES,
    PAGE_SIZE,
    PAGES,
    SHAPES,
    SIZE,
    StorageConfigFields,
    page_hashes,
)

TOKENS = list(range(1000, 1000 + 3 * PAGE_SIZE))


def test_the_factory_makes_the_backend() -> None:
    assert issubclass(LmkvStorage, hicache_storage.HiCacheStorage)
    made = StorageBackendFactory._load_backend_class("lmkv_client.sglang", "LmkvStorage", "lmkv")
    assert made is LmkvStorage
    assert not inspect.isabstract(LmkvStorage)


def test_the_configuration_has_the_fields_that_are_used() -> None:
    theirs = {field.name for field in dataclasses.fields(hicache_storage.HiCacheStorageConfig)}
    assert {field.name for field in dataclasses.fields(StorageConfigFields)} <= theirs


@pytest.mark.parametrize(
    "name",
    [
        *("register_mem_pool_host", "register_mem_host_pool_v2", "batch_exists_v2", "batch_get_v2", "batch_set_v2"),
        *("batch_exists", "batch_get_v1", "batch_set_v1", "get", "batch_get", "set", "batch_set", "exists", "clear"),
    ],
)
def test_calls_have_the_parameters_that_sglang_passes(name: str) -> None:
    theirs = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
    assert list(inspect.signature(getattr(LmkvStorage, name)).parameters) == theirs


def test_a_call_has_at_most_128_pages() -> None:
    assert getattr(hicache_storage, "STORAGE_BATCH_SIZE", 128) == 128


def test_the_backend_shm_stores_nothing() -> None:
    """It only places the host pool in shared memory: a hit in it cannot be measured (docs/performance/sglang.md)."""
    storage = HiCacheShm(None)
    key = page_hashes(TOKENS)[0]
    assert storage.set(key, torch.ones(1))
    assert not storage.exists(key)
    assert storage.get(key) is None
    assert storage.batch_exists_v2([key]).kv_hit_pages == 0


@pytest.mark.parametrize("salt", ["", "tenant-a", "größe"])
def test_pages_have_the_names_that_lmkv_computes(salt: str) -> None:
    seed = utils.storage_namespace_seed(None, salt or None)
    names = utils.get_hash_str(TOKENS, seed, page_size=PAGE_SIZE)
    assert page_seed(salt).hex() == (seed or "")
    assert names == page_hashes(TOKENS, page_seed(salt))
    _, last = page_keys(as_tokens(TOKENS), root_key(bytes(16)), PAGE_SIZE, page_seed(salt))
    assert last.hex() == names[-1]


def bare_pool(kind: type[Any], layout: str) -> Any:
    """A host pool that has what `init_kv_buffer` reads, and no device pool."""
    pool: Any = object.__new__(kind)
    sizes = {"layer_num": LAYERS, "page_num": PAGES, "page_size": PAGE_SIZE, "size": PAGES * PAGE_SIZE}
    heads = {"head_num": HEADS, "head_dim": SIZE, "kv_cache_dim": LATENT, "dtype": torch.bfloat16}
    memory = {"device": "cpu", "pin_memory": False, "allocator": get_allocator_from_storage("default")}
    for name, value in {**sizes, **heads, **memory, "layout": layout, "_transfer_device": torch.device("cpu")}.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize("layout", SHAPES)
def test_pools_have_the_layouts_that_lmkv_knows(layout: str) -> None:
    pool = bare_pool(MHATokenToKVPoolHost, layout)
    pool.kv_buffer = pool.init_kv_buffer()
    assert tuple(pool.kv_buffer.shape) == (2, *SHAPES[layout])
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    if layout in ("layer_first", "page_first", "page_first_direct"):
        check_page(pool, is_mla=False)


@pytest.mark.parametrize("layout", MLA_SHAPES)
def test_pools_of_latents_have_the_layouts_that_lmkv_knows(layout: str) -> None:
    pool = bare_pool(MLATokenToKVPoolHost, layout)
    pool.kv_buffer = pool.init_kv_buffer()
    assert tuple(pool.kv_buffer.shape) == MLA_SHAPES[layout]
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    check_page(pool, is_mla=True)


def test_a_pool_that_only_numbers_pages_has_no_tensors() -> None:
    assert LogicalHostPool(4 * PAGE_SIZE, PAGE_SIZE).kv_buffer is None


def test_the_server_has_the_arguments_that_decide_about_the_identity() -> None:
    used = {"model_path", "revision", "quantization", "kv_cache_dtype", "speculative_draft_model_path"}
    assert used <= set(ServerArgs.__annotations__)


def test_outside_of_a_server_the_model_is_the_folder_that_is_named() -> None:
    assert served_model("organization/model").path == "organization/model"


def test_weights_are_changed_by_the_methods_that_are_watched() -> None:
    changing = {
        name for name in vars(WeightUpdater) if "weights_from" in name and not name.startswith(("_", "receive"))
    }
    assert changing <= set(WEIGHT_UPDATES)
    assert all(callable(getattr(WeightUpdater, name)) for name in WEIGHT_UPDATES)


def check_page(pool: Any, *, is_mla: bool) -> None:
    """Compares a page as SGLang reads it by slots with the views by page."""
    page = 5
    theirs = pool.get_data_page(page * PAGE_SIZE, flat=False)
    orders = {"layer_first": (1, 0, 2, 3, 4), "page_first": (2, 0, 1, 3, 4)}  # to [layer, part, token, head, element]
    if is_mla:
        theirs = theirs.transpose(0, 1) if pool.layout == "page_first" else theirs.reshape(LAYERS, PAGE_SIZE, 1, LATENT)
        theirs = theirs.unsqueeze(1)
    elif pool.layout in orders:
        theirs = theirs.permute(*orders[pool.layout])
    else:
        theirs = theirs.squeeze(1).transpose(0, 1)
    tensors = pool_tensors(pool, is_mla=is_mla)
    ours = torch.stack([torch.stack([layer[page] for layer in part]) for part in tensors], dim=1).transpose(2, 3)
    assert torch.equal(ours, theirs)
