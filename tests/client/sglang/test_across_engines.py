"""Pages of SGLang with `share_across_engines`: engines that know the tokens find them, and it finds their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkv.errors import ConfigError
from lmkv_client.demo.model import TINY, make_model
from lmkv_client.engine import Engine, Written
from lmkv_client.model_identity import WeightsSource, shared_identity
from lmkv_client.sglang import LmkvStorage
from lmkv_client.sglang.kv_spec import identity_across_engines
from lmkv_client.sglang.sglang_api import ModelSource, served_model, used_config
from tests.client.engine.nodes import connector_config, kill_all
from tests.client.sglang.contract import (
    HEADS,
    LAYERS,
    PAGE_SIZE,
    SIZE,
    StorageConfigFields,
    host_pool,
    page_hashes,
    slots,
)
from tests.support.specs import make_spec
from tests.waiting import WAIT_SECONDS

TOKENS = list(range(1000, 1000 + 4 * PAGE_SIZE + 3))
PAGES = [3, 9, 1, 0]


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return served_model(str(make_model(tmp_path / "model", TINY)))


@pytest.fixture
def storage(model: ModelSource, runtime_dir: Path) -> Iterator[LmkvStorage]:
    """A backend that shares, at a node of its own."""
    names = ("instance_id", "runtime_dir", "max_local_cpu_size", "node_linger", "enable_p2p")
    node = connector_config(runtime_dir)
    waits = {"lookup_timeout": WAIT_SECONDS, "load_timeout": WAIT_SECONDS, "node_start_timeout": WAIT_SECONDS}
    settings = {name: getattr(node, name) for name in names} | waits
    extra = {"interface_v1": 1, "lmkv": settings | {"share_across_engines": True}}
    storage = LmkvStorage(StorageConfigFields(model_name=model.path, extra_config=extra), {})
    storage.register_mem_pool_host(host_pool("page_first_direct"))
    yield storage
    storage.close()
    kill_all(runtime_dir)


@pytest.fixture
def other(storage: LmkvStorage, model: ModelSource, runtime_dir: Path) -> Iterator[Engine]:
    """An engine of another kind that knows the tokens, at the same node."""
    identity = shared_identity(model.config, WeightsSource(model=model.path), model_id="", kv_dtype="bfloat16")
    spec = make_spec(
        model_name="another name",
        model_id=identity,
        kv_dtype="bfloat16",
        layer_count=LAYERS,
        kv_head_count=HEADS,
        head_size=SIZE,
        chunk_size=PAGE_SIZE,
        hash_scheme="sha256-pages",
        vocab_size=2000,
    )
    socket = str(connector_config(runtime_dir).engine_socket)
    with Engine.attach(spec, config={"node_address": socket, "node_start_timeout": WAIT_SECONDS}) as engine:
        yield engine


def test_pages_are_found_by_their_tokens(storage: LmkvStorage, other: Engine) -> None:
    pool = host_pool("page_first_direct")
    assert storage.batch_set_v1(page_hashes(TOKENS), slots(PAGES)) == [True] * 4
    with other.lookup(other.keys(TOKENS), tokens=TOKENS, timeout=WAIT_SECONDS) as held:
        extents = list(held.load(timeout=WAIT_SECONDS))
        assert held.token_count == 4 * PAGE_SIZE
        for extent, page in zip(extents, PAGES, strict=True):
            chunk = torch.frombuffer(extent.view, dtype=torch.bfloat16).view(LAYERS, HEADS, 2, PAGE_SIZE, SIZE)
            assert torch.equal(chunk, pool.kv_buffer[:, page].permute(1, 3, 0, 2, 4))


def test_chunks_are_read_as_pages(storage: LmkvStorage, other: Engine) -> None:
    keys = other.keys(TOKENS)
    extents = other.reserve(len(keys), timeout=WAIT_SECONDS)
    for number, extent in enumerate(extents):
        chunk = torch.frombuffer(extent.view, dtype=torch.bfloat16)
        chunk.copy_(torch.from_numpy(np.full(chunk.numel(), number + 1, np.float32)))
    other.commit(Written.chain(keys, extents))
    pool = storage.mem_pool_host
    assert storage.batch_exists(page_hashes(TOKENS)) == 4
    assert storage.batch_get_v1(page_hashes(TOKENS), slots(PAGES)) == [True] * 4
    for number, page in enumerate(PAGES):
        assert (pool.kv_buffer[:, page] == number + 1).all()


def test_what_engines_share_has_no_engine_in_it(model: ModelSource) -> None:
    identity = identity_across_engines(model, used_config(model), model_id="", kv_dtype="float32", shards={})
    assert identity == shared_identity(model.config, WeightsSource(model=model.path), model_id="", kv_dtype="float32")
    named = identity_across_engines(model, used_config(model), model_id="llama@7", kv_dtype="float32", shards={})
    assert named.startswith("shared:")
    assert named != identity


def test_what_other_engines_cannot_read_is_not_shared(model: ModelSource) -> None:
    with pytest.raises(ConfigError, match=r"share_across_engines: each rank .*\(tp 2\)"):
        identity_across_engines(model, used_config(model), model_id="", kv_dtype="float32", shards={"tp": (0, 2)})
    with pytest.raises(ConfigError, match="share_across_engines: KV of fp8_e4m3"):
        identity_across_engines(model, used_config(model), model_id="", kv_dtype="fp8_e4m3", shards={})
    other = served_model("organization/model")
    with pytest.raises(ConfigError, match="share_across_engines: model_type None"):
        identity_across_engines(other, used_config(other), model_id="", kv_dtype="float32", shards={})
