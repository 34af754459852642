"""Whole nodes that share a store: what one stores the others load, whatever becomes of it and of the store."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2_grpc
from prometheus_client import generate_latest

from lmkv import rpc
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.rpc.messages import by_keys
from lmkv.tiers import HOST, REMOTE
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import MoveRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.remote.tier import RemoteTier
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient, absent_count, runs
from tests.server.node.node_parts import NodeProcess
from tests.server.node.remote_parts import AWS, S3Server, SharedFolder, names_of
from tests.server.node.whole_nodes import SPEC, load, mapped, store, until_free
from tests.support.operations import wait_for_operation
from tests.support.redis_server import RedisServer
from tests.waiting import WAIT_SECONDS, eventually, is_listening


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def settings(folder: Path, instance_id: str, url: str, **more: object) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "runtime_dir": str(folder),
        "max_local_cpu_size": "16MB",
        "remote_url": url,
        "remote_lookup_timeout": 20.0,  # a busy machine is no dead store
        "enable_p2p": False,
        "coordinator_timeout": 20.0,
    } | more


def remote_tier(node: Node) -> RemoteTier:
    """The node's remote tier."""
    (tier,) = (tier for tier in node.stores if isinstance(tier, RemoteTier))
    return tier


AtNode = tuple[Node, EngineClient]


@asynccontextmanager
async def engine_at_node(folder: Path, instance_id: str, url: str, **more: object) -> AsyncIterator[AtNode]:
    async with Node(NodeConfig(**settings(folder, instance_id, url, **more))) as node, EngineClient(node) as engine:
        remote = remote_tier(node)
        await until(lambda: remote.usable)
        yield node, engine


async def test_what_a_killed_node_has_put_another_loads(runtime_dir: Path, redis: RedisServer) -> None:
    node = NodeProcess(runtime_dir, (), settings(runtime_dir, "a", redis.url))
    try:
        await until(lambda: is_listening(node.socket))
        async with EngineClient(node.socket) as engine:
            with mapped(engine) as attached:
                await store(engine, attached.pool, 0, 1, 2, 3)
            await until(lambda: redis.names() == names_of(0, 1, 2, 3))
    finally:
        node.stop(signal.SIGKILL)
    async with engine_at_node(runtime_dir, "b", redis.url) as (survivor, engine):
        found = await engine.lookup("1", chunk_keys(0, 1, 2, 3, 4), reserve_count=5)
        assert (len(found.own), runs(found)) == (0, {"remote": 4})
        assert found.peer_instance_id == ""
        assert len(await engine.hear("credits")) == 1, "each chunk that is found makes it one fewer"
        assert await load(engine, survivor.pool, "1", 0, 4) == [0, 1, 2, 3]
        await engine.release("1")
        found = await engine.lookup("2", chunk_keys(0, 1, 2, 3))
        assert (len(found.own), absent_count(found)) == (4, 0), "they are in memory now"
        assert survivor.service.lookups.stats().found_chunks["remote"] == 4


NETWORK_OF_ITS_OWN = (
    *("unshare", "--user", "--map-root-user", "--net"),
    *("sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
)


@pytest.fixture
def _network_namespaces() -> None:
    if subprocess.run([*NETWORK_OF_ITS_OWN, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests make network namespaces")


@pytest.mark.usefixtures("_network_namespaces")
async def test_nodes_without_a_network_between_them_share_a_folder(runtime_dir: Path) -> None:
    with SharedFolder() as folder:
        config = settings(runtime_dir, "", folder.url, max_remote_size=1)
        nodes = [
            NodeProcess(runtime_dir, (), config | {"instance_id": name}, within=NETWORK_OF_ITS_OWN) for name in "abc"
        ]
        try:
            for node in nodes:
                node.ready()
            for number, node in enumerate(nodes[:2]):  # each stores what the other has, and more
                async with EngineClient(node.socket) as engine:
                    with mapped(engine) as attached:
                        await store(engine, attached.pool, *range(2 + 2 * number))
                    await until(lambda count=2 + 2 * number: folder.names() >= names_of(*range(count)))  # type: ignore[misc]
                node.stop(signal.SIGKILL)
            async with EngineClient(nodes[2].socket) as engine:
                with mapped(engine) as attached:
                    assert absent_count(await engine.lookup("1", chunk_keys(*range(5)))) == 4
                    assert await load(engine, attached.pool, "1", 0, 4) == [0, 1, 2, 3]
            assert nodes[2].stop() == 0
            assert folder.names() == names_of(*range(4))
        finally:
            for node in nodes:
                node.process.kill()


async def test_nodes_share_a_bucket_too(runtime_dir: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    with S3Server() as s3:
        more = {"remote_endpoint_url": s3.endpoint_url}
        async with engine_at_node(runtime_dir, "a", s3.url, **more) as (node, engine):
            await store(engine, node.pool, 0, 1)
            await until(lambda: s3.names() == names_of(0, 1))
        async with engine_at_node(runtime_dir, "b", s3.url, **more) as (node, engine):
            assert absent_count(await engine.lookup("1", chunk_keys(0, 1))) == 2
            assert await load(engine, node.pool, "1", 0, 2) == [0, 1]


async def test_a_prompt_may_be_in_memory_on_disk_and_in_the_store(runtime_dir: Path, redis: RedisServer) -> None:
    disk = {"local_disk": f"{runtime_dir}/disk", "max_local_disk_size": "64MB"}
    async with engine_at_node(runtime_dir, "a", redis.url, **disk) as (node, engine):
        assert node.disk
        await store(engine, node.pool, 0, 1, 2, 3, 4, 5)
        await until(lambda: redis.names() == names_of(*range(6)))
        await node.disk.writer.flush()
        node.tier.drop(chunk_keys(2, 3, 4, 5))
        node.disk.forget(chunk_keys(4, 5))
        found = await engine.lookup("1", chunk_keys(*range(6)))
        assert (len(found.own), runs(found)) == (2, {"disk": 2, "remote": 2})
        request = pb.EngineServiceLookupRequest(fingerprint=engine.spec.fingerprint, chunk_keys=chunk_keys(*range(7)))
        asked = await engine.stub.Lookup(request, timeout=WAIT_SECONDS)
        assert (asked.own_chunk_count, runs(asked)) == (2, {"disk": 2, "remote": 2})
        counts = node.service.lookups.stats().found_chunks
        assert (counts["own"], counts["disk"], counts["remote"]) == (2, 2, 2)
        assert await load(engine, node.pool, "1", 2, 4) == [2, 3, 4, 5]


async def test_a_load_of_what_is_gone_says_how_far_it_came(runtime_dir: Path, redis: RedisServer) -> None:
    async with engine_at_node(runtime_dir, "a", redis.url) as (node, engine):
        await store(engine, node.pool, 0, 1, 2)
        await until(lambda: redis.names() == names_of(0, 1, 2))
        node.tier.drop(chunk_keys(0, 1, 2))
        assert absent_count(await engine.lookup("1", chunk_keys(0, 1, 2))) == 3
        with redis.client() as client:
            client.delete(*names_of(1))
        assert await load(engine, node.pool, "1", 0, 3) == [0]
        await engine.release("1")
        assert await until_free(node)


async def test_a_dead_store_is_a_miss(runtime_dir: Path, redis: RedisServer) -> None:
    async with engine_at_node(runtime_dir, "a", redis.url) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await until(lambda: redis.names() == names_of(0, 1))
        node.tier.drop(chunk_keys(0, 1))
        assert absent_count(await engine.lookup("1", chunk_keys(0, 1))) == 2
        redis.kill()
        assert await load(engine, node.pool, "1", 0, 2) == []
        await engine.release("1")
        assert absent_count(await engine.lookup("2", chunk_keys(0, 1))) == 0
        await store(engine, node.pool, 0)
        assert len((await engine.lookup("3", chunk_keys(0, 1))).own) == 1


async def test_what_the_store_would_take_longer_for_than_computing_is_refused(
    runtime_dir: Path, redis: RedisServer
) -> None:
    async with engine_at_node(runtime_dir, "a", redis.url) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await until(lambda: redis.names() == names_of(0, 1))
        node.tier.drop(chunk_keys(0, 1))
        for _ in range(2):  # a measured store: 1 MiB took ten seconds
            remote_tier(node).reader._bandwidth.record_read(16 << 20, 160.0, time.monotonic())
        found = await engine.lookup("1", chunk_keys(0, 1), prefill_tokens_per_second=10**9)
        assert (absent_count(found), found.refused_chunk_count) == (0, 2)
        found = await engine.lookup("2", chunk_keys(0, 1), prefill_tokens_per_second=1)
        assert (absent_count(found), found.refused_chunk_count) == (2, 0)


async def test_a_reset_forgets_what_all_share(runtime_dir: Path, redis: RedisServer) -> None:
    async with engine_at_node(runtime_dir, "a", redis.url) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await until(lambda: redis.names() == names_of(0, 1))
        await engine.say(reset=True)
        assert await engine.hear("reset") == [2]
        assert absent_count(await engine.lookup("1", chunk_keys(0, 1))) == 0
        await until(lambda: redis.names() == set())


async def test_metrics_describe_the_store(runtime_dir: Path, redis: RedisServer) -> None:
    async with engine_at_node(runtime_dir, "a", redis.url) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await until(lambda: remote_tier(node).stats().written_chunks == 2)
        shown = generate_latest(node.metrics.registry).decode()
        assert 'lmkv_node_tier_written_chunks_total{tier="remote"} 2.0' in shown
        assert 'lmkv_node_tier_down_backends{tier="remote"} 0.0' in shown
        redis.kill()
        await engine.lookup("1", chunk_keys(5))
        shown = generate_latest(node.metrics.registry).decode()
        assert 'lmkv_node_tier_down_backends{tier="remote"} 1.0' in shown


# ---- with a coordinator


@asynccontextmanager
async def fleet(folder: Path, url: str) -> AsyncIterator[tuple[Coordinator, AtNode, AtNode]]:
    """A coordinator, and two nodes that share a store."""
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        more = {"coordinator_address": coordinator.address, "enable_p2p": True}
        async with (
            engine_at_node(folder, "a", url, **more) as first,
            engine_at_node(folder, "b", url, **more) as second,
        ):
            yield coordinator, first, second


async def ended(operations: Any, operation: Any) -> Any:
    return await wait_for_operation(operations, operation.name)


@pytest.mark.parametrize(("tier", "left", "count"), [(REMOTE, 3, 3), (HOST, 0, 3), ("", 0, 3)])
async def test_a_clear_drops_from_the_tier_that_it_names_or_from_all(
    runtime_dir: Path, redis: RedisServer, tier: str, left: int, count: int
) -> None:
    async with fleet(runtime_dir, redis.url) as (coordinator, (node, storing), _):
        await store(storing, node.pool, 0, 1, 2)
        await until(lambda: redis.names() == names_of(0, 1, 2))
        async with rpc.open_channel(coordinator.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            clear = cache_service_pb2.ClearRequest(instance_id="a", tier=tier, all=True)
            end = await ended(operations, await cache.Clear(clear, timeout=WAIT_SECONDS))
        result = cache_service_pb2.ClearResult()
        assert end.response.Unpack(result)
        assert result.chunk_count == count
        assert len(node.tier) == left
        assert redis.names() == (names_of(0, 1, 2) if tier == HOST else set())


async def test_a_move_to_the_store_is_refused(runtime_dir: Path, redis: RedisServer) -> None:
    async with fleet(runtime_dir, redis.url) as (coordinator, _, _), rpc.open_channel(coordinator.address) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        move = MoveRequest(
            prompt=by_keys(chunk_keys(0)),
            old_position=Position(instance_id="a"),
            new_position=Position(instance_id="b", tier=REMOTE),
        )
        with pytest.raises(grpc.aio.AioRpcError, match="'b' has no chunks of its own in 'remote'"):
            await cache.Move(move, timeout=WAIT_SECONDS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_a_peer_had_that_answers_no_more_comes_from_the_store(
    runtime_dir: Path, redis: RedisServer, how: signal.Signals
) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        more = {"coordinator_address": coordinator.address, "enable_p2p": True}
        process = NodeProcess(runtime_dir, (), settings(runtime_dir, "a", redis.url, **more))
        try:
            await until(lambda: is_listening(process.socket))
            async with engine_at_node(runtime_dir, "b", redis.url, **more) as (node, engine):
                async with EngineClient(process.socket) as storing:
                    with mapped(storing) as attached:
                        await store(storing, attached.pool, 0, 1, 2)
                    await until(lambda: redis.names() == names_of(0, 1, 2))
                    numbers = itertools.count()

                    async def source() -> str:
                        found = await engine.lookup(str(next(numbers)), chunk_keys(0, 1, 2))
                        if found.peer_instance_id != "a":
                            await engine.release(found.lookup_id)
                        return found.peer_instance_id

                    await eventually(source, "a")  # once the coordinator has heard
                process.process.send_signal(how)
                assert await load(engine, node.pool, str(next(numbers) - 1), 0, 3) == [0, 1, 2]
        finally:
            process.stop(signal.SIGKILL)


async def test_what_peers_do_not_have_any_more_comes_from_the_store(runtime_dir: Path, redis: RedisServer) -> None:
    async with fleet(runtime_dir, redis.url) as (_, (holder, storing), (asker, asking)):
        await store(storing, holder.pool, 0, 1, 2, 3)
        await until(lambda: redis.names() == names_of(0, 1, 2, 3))
        holder.tier.drop(chunk_keys(2, 3))
        found = await asking.lookup("1", chunk_keys(0, 1, 2, 3, 4))
        assert absent_count(found) == 4
        assert await load(asking, asker.pool, "1", 0, 4) == [0, 1, 2, 3]
        assert await until_free(holder)
        assert SPEC.chunk_bytes * 4 <= asker.tier.chunk_bytes
