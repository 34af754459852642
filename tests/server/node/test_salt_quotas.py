"""A whole node with `max_salt_size`: an engine that floods it with one salt evicts no chunk of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv_server.node.fleet.reports import usages
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.disk.tier import DiskTier
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
        assert f'lmkv_node_salt_quota_bytes{{tier="host"}} {float(QUOTA_CHUNKS * SPEC.chunk_bytes)}' in metrics
        assert f'lmkv_node_salt_evicted_chunks_total{{tier="host"}} {float(400 - QUOTA_CHUNKS)}' in metrics


async def test_without_a_quota_it_evicts_them(tmp_path: Path) -> None:
    async with Node(config(tmp_path, max_salt_size=0)) as node, EngineClient(node) as engine:
        await store(engine, node.pool, *range(8), owner=ONE)
        for first in range(1000, 1400, 8):
            await store(engine, node.pool, *range(first, first + 8), owner=OTHER)
        await until(lambda: node.tier.get(chunk_keys(1399)[0]) is not None)
        assert not any(node.tier.get(key) for key in chunk_keys(*range(8)))


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_salt_that_floods_evicts_no_chunk_of_another_from_disk(tmp_path: Path, codec: str) -> None:
    """The pool has room for sixteen chunks: what it forgets is found on disk."""
    sizes = {"max_local_cpu_size": f"{16 * SPEC.chunk_bytes}B", "max_salt_size": 0}
    disk = {"local_disk": (str(tmp_path / "disk"),), "max_local_disk_size": f"{64 * SPEC.chunk_bytes}B"}
    quota = {"max_salt_disk_size": f"{24 * SPEC.chunk_bytes}B", "local_disk_codec": codec}
    async with Node(config(tmp_path, **sizes, **disk, **quota)) as node, EngineClient(node) as engine:
        tier = node.tiers[0]
        assert isinstance(tier, DiskTier)
        (before,) = [usage for usage in usages(node.tier, node.tiers) if usage.tier == "disk"]
        assert (before.salt_quota_bytes, before.salt_count) == (24 * SPEC.chunk_bytes, 0), "shown from the start"
        for numbers, owner in ((range(4), ONE), *((range(n, n + 4), OTHER) for n in range(1000, 1100, 4))):
            await store(engine, node.pool, *numbers, owner=owner)
            await until(lambda numbers=numbers: all(tier.has(key) for key in chunk_keys(*numbers)))  # type: ignore[misc]
        assert not any(node.tier.get(key) for key in chunk_keys(*range(4)))
        assert all(tier.has(key) for key in chunk_keys(*range(4)))
        assert not tier.has(chunk_keys(1000)[0])
        (usage,) = [usage for usage in usages(node.tier, node.tiers) if usage.tier == "disk"]
        assert usage.salt_count == 2
        assert usage.max_salt_used_bytes <= usage.salt_quota_bytes == 24 * SPEC.chunk_bytes
        assert 'lmkv_node_salts{tier="disk"} 2.0' in generate_latest(node.metrics.registry).decode()


def test_a_quota_that_is_larger_than_the_disk_or_for_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_salt_disk_size of 2 GiB is more than the disk tier, max_local_disk"):
        NodeConfig(
            runtime_dir=str(tmp_path),
            local_disk=(str(tmp_path / "disk"),),
            max_local_disk_size=1.0,
            max_salt_disk_size=2.0,
        )
    with pytest.raises(ConfigError, match="max_salt_remote_size is for the store of remote_url, and there is none"):
        NodeConfig(runtime_dir=str(tmp_path), max_salt_remote_size=2.0)


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
