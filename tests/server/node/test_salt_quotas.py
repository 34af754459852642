"""A whole node with `max_salt_size`: an engine that floods it with one salt evicts no chunk of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient
from tests.server.node.whole_nodes import SPEC, store

POOL_CHUNKS, QUOTA_CHUNKS = 64, 16
ONE, OTHER = b"1" * 16, b"2" * 16


def config(folder: Path, **more: object) -> NodeConfig:
    settings: dict[str, Any] = {
        "instance_id": "n",
        "runtime_dir": str(folder),
        "max_local_cpu_size": f"{POOL_CHUNKS * SPEC.chunk_bytes}B",
        "max_salt_size": f"{QUOTA_CHUNKS * SPEC.chunk_bytes}B",
        "enable_p2p": False,
    }
    return NodeConfig(**(settings | more))


async def test_a_salt_that_floods_evicts_no_chunk_of_another(tmp_path: Path) -> None:
    async with Node(config(tmp_path)) as node, EngineClient(node) as engine:
        working_set = range(8)
        await store(engine, node.pool, *working_set, owner=ONE)
        for first in range(1000, 1400, 8):
            await store(engine, node.pool, *range(first, first + 8), owner=OTHER)
        last = chunk_keys(1399)[0]
        await until(lambda: node.tier.get(last) is not None)
        assert all(node.tier.get(key) for key in chunk_keys(*working_set))
        assert node.tier.quotas is not None
        assert node.tier.quotas.used_bytes(OTHER) == QUOTA_CHUNKS * SPEC.chunk_bytes
        metrics = generate_latest(node.metrics.registry).decode()
        assert f"lmkv_node_salt_quota_bytes {float(QUOTA_CHUNKS * SPEC.chunk_bytes)}" in metrics
        assert f"lmkv_node_salt_evicted_chunks_total {float(400 - QUOTA_CHUNKS)}" in metrics


async def test_without_a_quota_it_evicts_them(tmp_path: Path) -> None:
    async with Node(config(tmp_path, max_salt_size=0)) as node, EngineClient(node) as engine:
        await store(engine, node.pool, *range(8), owner=ONE)
        for first in range(1000, 1400, 8):
            await store(engine, node.pool, *range(first, first + 8), owner=OTHER)
        await until(lambda: node.tier.get(chunk_keys(1399)[0]) is not None)
        assert not any(node.tier.get(key) for key in chunk_keys(*range(8)))


def test_a_quota_that_is_larger_than_the_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_salt_size of 6 GiB is more than the pool, max_local_cpu_size of 5 GiB"):
        NodeConfig(runtime_dir=str(tmp_path), max_local_cpu_size=5.0, max_salt_size=6.0)


async def test_a_commit_whose_owner_is_no_key_ends_the_stream(tmp_path: Path) -> None:
    async with Node(config(tmp_path)) as node, EngineClient(node) as engine:
        (extent,) = await engine.reserve(1)
        await engine.say(commit=[engine.commit(chunk_keys(1)[0], extent, owner=b"short")])
        error = await engine.ending()
        assert error
        assert error.reason == "BAD_CHUNK_KEY"
