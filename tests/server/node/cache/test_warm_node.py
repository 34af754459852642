"""Whole nodes whose pool outlives them: what was stored is found again, and never wrong bytes."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.warm_parts import POOL_CHUNKS, SPEC, a_node, held, mapped, pool_path, settings, store, verified
from tests.waiting import eventually


async def test_what_was_stored_before_a_clean_stop_is_found_again(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        assert await store(engine, node.pool, 0, 1, 2) == 3
        assert await held(engine, node.pool, 0, 1, 2) == [0, 1, 2]
    async with a_node(runtime_dir) as (node, engine):
        assert len((await engine.lookup("1", chunk_keys(0, 1, 2, 3))).own) == 3
        assert await held(engine, node.pool, *range(5)) == [0, 1, 2]
        assert await store(engine, node.pool, 3) == 1
    async with a_node(runtime_dir) as (node, engine):
        assert await held(engine, node.pool, *range(5)) == [0, 1, 2, 3]
        assert node.warm
        assert (node.warm.stats().found_chunks, node.warm.stats().damaged_chunks) == (4, 0)
        assert node.warm.stats().found_bytes == 4 * SPEC.chunk_bytes


async def test_what_was_evicted_dropped_or_never_committed_is_not_found(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        for number in range(POOL_CHUNKS + 10):
            assert await store(engine, node.pool, number) == 1
        assert len(await engine.reserve(3)) == 3
        left = await held(engine, node.pool, *range(POOL_CHUNKS + 10))
        await until(lambda: not any(chunk.holds for chunk in node.tier))
        assert node.tier.drop(chunk_keys(left[-1])) == 1
    async with a_node(runtime_dir) as (node, engine):
        assert await held(engine, node.pool, *range(POOL_CHUNKS + 10)) == left[:-1]


async def test_the_oldest_go_first_and_heads_of_prompts_last_as_before(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        for first in range(0, POOL_CHUNKS, 4):
            assert await store(engine, node.pool, *range(first, first + 4)) == 4
    async with a_node(runtime_dir) as (node, engine):
        assert len(await engine.reserve(2)) == 2
        gone = set(range(POOL_CHUNKS)) - set(await held(engine, node.pool, *range(POOL_CHUNKS)))
        assert gone == {2, 3}, "the tail of the oldest prompt"


async def test_a_damaged_chunk_is_a_miss_and_its_room_is_used_again(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, *range(10))
        extent = (await engine.lookup("1", chunk_keys(4))).own[0].extent
    with pool_path(runtime_dir).open("r+b") as file:
        file.seek(extent.offset + 1000)
        byte = file.read(1)
        file.seek(extent.offset + 1000)
        file.write(bytes([byte[0] ^ 1]))
    async with a_node(runtime_dir) as (node, engine):
        assert await held(engine, node.pool, *range(10)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert node.warm
        assert (node.warm.stats().found_chunks, node.warm.stats().damaged_chunks) == (9, 1)
        assert node.tier.used_bytes == 9 * SPEC.chunk_bytes
    async with a_node(runtime_dir) as (node, _):
        assert node.warm
        assert (node.warm.stats().found_chunks, node.warm.stats().damaged_chunks) == (9, 0), "it is reported once"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_local_cpu_size": 2 * POOL_CHUNKS * SPEC.chunk_bytes / 2**30}, "another size"),
        ({}, "damaged, or of another version"),
    ],
)
async def test_a_pool_that_does_not_fit_is_not_used_and_the_log_says_why(
    runtime_dir: Path, more: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
    if not more:
        with pool_path(runtime_dir).open("r+b") as file:
            file.seek(POOL_CHUNKS * SPEC.chunk_bytes)
            file.write(b"x")
    with caplog.at_level(logging.INFO):
        async with a_node(runtime_dir, **more) as (node, engine):
            assert await held(engine, node.pool, 0, 1) == []
            assert await store(engine, node.pool, 2) == 1
    assert [record.message for record in caplog.records if reason in record.message]
    async with a_node(runtime_dir, **more) as (node, engine):
        assert await held(engine, node.pool, 0, 1, 2) == [2]


async def test_a_node_that_shall_not_keep_its_pool_leaves_none(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0)
    assert pool_path(runtime_dir).exists()
    async with a_node(runtime_dir, persist_pool=False) as (node, engine):
        assert not pool_path(runtime_dir).exists()
        assert await held(engine, node.pool, 0) == []
    assert not pool_path(runtime_dir).exists()


async def test_without_a_path_the_pool_is_the_instances_own_in_shared_memory(runtime_dir: Path) -> None:
    values = {"instance_id": f"warm-{os.getpid()}", "pool_path": ""}
    path = NodeConfig(**settings(runtime_dir, **values)).kept_pool_path
    assert str(path) == f"/dev/shm/lmkv-{os.getuid()}-warm-{os.getpid()}.pool"
    async with a_node(runtime_dir, **values) as (node, engine):
        await store(engine, node.pool, 0)
        assert path.exists()
        (runtime_dir / "other").mkdir()
        with pytest.raises(ConfigError, match=rf"^pool_path: another node uses {path}; give each node its own"):
            async with Node(NodeConfig(**settings(runtime_dir / "other", **values))):
                pass
    async with a_node(runtime_dir, **values) as (node, engine):
        assert await held(engine, node.pool, 0) == [0]
    async with a_node(runtime_dir, **values, persist_pool=False):
        assert not path.exists()


async def test_nothing_is_stored_until_workers_of_the_earlier_life_let_go(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        worker = await mapped(engine)
        await store(engine, worker.pool, 0, 1)
    with worker:
        async with a_node(runtime_dir) as (node, engine):
            assert await held(engine, node.pool, 0, 1) == [0, 1], "what is there can be used at once"
            assert await store(engine, node.pool, 2) == 0
            assert "lmkv_node_pool_sealed 1.0" in shown(node)
            worker.pool.buffer[40 * SPEC.chunk_bytes] = 1  # it may still write to what it was granted
            worker.close()
            await until(lambda: not node.tier.sealed)
            assert await store(engine, node.pool, 2) == 1
            assert "lmkv_node_pool_sealed 0.0" in shown(node)


def shown(node: Node) -> str:
    return generate_latest(node.metrics.registry).decode()


async def test_metrics_count_hits(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        assert "lmkv_node_warm_chunks_total 0.0" in shown(node)
    async with a_node(runtime_dir) as (node, engine):
        for line in (
            "lmkv_node_warm_chunks_total 2.0",
            f"lmkv_node_warm_bytes_total {float(2 * SPEC.chunk_bytes)}",
            "lmkv_node_warm_damaged_chunks_total 0.0",
            "lmkv_node_warm_waiting_chunks 0.0",
            "lmkv_node_chunks 2.0",
        ):
            assert line in shown(node)
    async with a_node(runtime_dir, persist_pool=False) as (node, engine):
        assert "lmkv_node_warm" not in shown(node)


async def test_recovered_chunks_are_reported_before_any_engine_attaches(runtime_dir: Path) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        more = {"coordinator_address": coordinator.address, "enable_p2p": True}
        async with a_node(runtime_dir, **more) as (node, engine):
            await store(engine, node.pool, 0, 1, 2)
        async with (
            a_node(runtime_dir / "asker", **more, instance_id="asker") as (_, asking),
            Node(NodeConfig(**settings(runtime_dir, **more))) as node,
        ):
            assert node.warm
            await verified(node.warm)
            numbers = itertools.count()

            async def found() -> int:
                return absent_count(await asking.lookup(str(next(numbers)), chunk_keys(0, 1, 2)))

            await eventually(found, 3)  # once the coordinator knows


async def test_an_engine_that_reattaches_to_a_running_node_hits_at_once(runtime_dir: Path) -> None:
    async with a_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await engine.aclose()
        async with EngineClient(node, "another") as another:
            assert await held(another, node.pool, 0, 1) == [0, 1]
