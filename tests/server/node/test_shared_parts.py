"""Chunks of several parts that nodes share: through a coordinator from pool to pool, and through a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2_grpc

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.rpc.messages import by_keys
from lmkv.spec import PartItem
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2_grpc, chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import ClearRequest, MoveRequest, MoveResult, PinRequest
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.remote.store import HEADER_BYTES, object_name
from lmkv_server.node.tiers.remote.tier import RemoteTier
from tests.server.node.hybrid_engine import FULL, HYBRID, PROMPT, STATE, HybridEngine, engine_at_node, item_key, places
from tests.server.node.remote_parts import AWS, S3Server
from tests.server.node.whole_nodes import until_free
from tests.support.operations import wait_for_operation
from tests.support.redis_server import RedisServer
from tests.waiting import WAIT_SECONDS, eventually, until

Pair = tuple[tuple[Node, HybridEngine], tuple[Node, HybridEngine]]


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[tuple[Coordinator, Pair]]:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        more: dict[str, Any] = {
            "coordinator_address": (coordinator.address,),
            "coordinator_timeout": WAIT_SECONDS,  # on a busy machine a lookup takes longer than engines would wait
            "enable_p2p": True,
        }
        async with engine_at_node(folder, "holder", **more) as holder, engine_at_node(folder, "asker", **more) as asker:
            yield coordinator, (holder, asker)


async def known(engine: HybridEngine) -> list[tuple[str, int]]:
    """What a node would answer."""
    request = pb.EngineServiceLookupRequest(fingerprint=HYBRID.fingerprint, chunk_keys=PROMPT)
    return places(await engine.stub.Lookup(request, timeout=WAIT_SECONDS))


async def test_a_hit_at_a_peer_is_loaded_from_there(runtime_dir: Path) -> None:
    async with two_nodes(runtime_dir) as (_, ((_, holding), (asker, asking))):
        await holding.store_hits(3, 5)
        await eventually(lambda: known(asking), [("peers", 8)])
        found = await asking.find("1")
        assert (found.hit_chunk_count, found.peer_instance_id) == (5, "holder")
        assert await asking.load("1", found) == 8
        assert [chunk.holds for chunk in asker.tier] == [1] * 8
        await asking.release("1")
        found = await asking.find("2")
        assert (len(found.own), places(found)) == (8, [])
        await asking.release("2")
        assert await until_free(asker)


async def test_a_peer_that_lacks_a_state_has_a_shorter_hit(runtime_dir: Path) -> None:
    async with two_nodes(runtime_dir) as (_, ((holder, holding), (_, asking))):
        await holding.store_hits(3, 5)
        await eventually(lambda: known(asking), [("peers", 8)])
        holder.tier.drop([item_key(STATE, 4)])
        await eventually(lambda: known(asking), [("peers", 6)])
        assert (await asking.find("1")).hit_chunk_count == 3


async def test_pool_and_peer_make_a_hit_together(runtime_dir: Path) -> None:
    async with two_nodes(runtime_dir) as (_, ((_, holding), (asker, asking))):
        await holding.store_hits(5)
        await asking.store_items([PartItem(FULL, 0), PartItem(FULL, 2), PartItem(STATE, 4)])
        await eventually(lambda: known(asking), [("peers", 1), ("own", 1), ("peers", 4), ("own", 1)])
        found = await asking.find("1")
        assert (found.hit_chunk_count, len(found.own)) == (5, 1)
        assert await asking.load("1", found) == 8
        await asking.release("1")
        assert await until_free(asker)


async def test_a_copy_brings_every_part_that_a_hit_needs(runtime_dir: Path) -> None:
    async with two_nodes(runtime_dir) as (coordinator, ((_, holding), (asker, asking))):
        await holding.store_hits(4)
        await eventually(lambda: known(asking), [("peers", 7)])
        positions = [chunk_pb2.Position(instance_id=one, tier=HOST) for one in ("holder", "asker")]
        request = MoveRequest(
            prompt=by_keys(PROMPT[:4]), old_position=positions[0], new_position=positions[1], copy=True
        )
        async with rpc.open_channel(coordinator.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            operation = await cache.Move(request)
            waited = await wait_for_operation(operations, operation.name)
        result = MoveResult()
        assert waited.response.Unpack(result)
        assert (result.chunk_count, result.token_count) == (7, 4 * HYBRID.chunk_size)
        assert len(asker.tier) == 7
        assert (await asking.find("1")).hit_chunk_count == 4


async def test_every_part_that_a_hit_needs_is_pinned_and_cleared(runtime_dir: Path) -> None:
    async with two_nodes(runtime_dir) as (coordinator, ((holder, holding), (_, asking))):
        await holding.store_hits(2, 4)
        await eventually(lambda: known(asking), [("peers", 7)])
        request = PinRequest(
            prompt=by_keys(PROMPT[:4]), position=chunk_pb2.Position(instance_id="holder"), request_id="r"
        )
        async with rpc.open_channel(coordinator.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            pin = (await cache.Pin(request)).pin
            assert (pin.chunk_count, pin.token_count) == (7, 4 * HYBRID.chunk_size)
            assert {chunk.key for chunk in holder.tier if chunk.pins} == set(HYBRID.item_keys(HYBRID.items(4), PROMPT))
            operation = await cache.Clear(ClearRequest(prompt=by_keys(PROMPT), instance_id="holder"))
            await wait_for_operation(operations, operation.name)
        assert {chunk.key for chunk in holder.tier} == set(HYBRID.item_keys(HYBRID.items(4), PROMPT))


# ---- a store


async def ready(node: Node) -> None:
    (remote,) = (tier for tier in node.stores if isinstance(tier, RemoteTier))
    await until(lambda: remote.usable)


def stored(*hits: int) -> set[str]:
    keys = {key for count in hits for key in HYBRID.item_keys(HYBRID.items(count), PROMPT)}
    return {object_name(HYBRID.fingerprint, key) for key in keys}


async def test_what_one_node_has_put_another_loads(runtime_dir: Path) -> None:
    with RedisServer() as redis:
        more: dict[str, Any] = {"remote_url": redis.url, "remote_lookup_timeout": 20.0}
        async with engine_at_node(runtime_dir, "a", **more) as (node, engine):
            await ready(node)
            await engine.store_hits(3, 6)
            await until(lambda: redis.names() == stored(3, 6))
        async with engine_at_node(runtime_dir, "b", **more) as (node, engine):
            await ready(node)
            await engine.store_items([PartItem(FULL, 1)])
            await until(lambda: node.tier.get(item_key(FULL, 1)))
            found = await engine.find("1")
            assert (found.hit_chunk_count, places(found)) == (6, [("remote", 1), ("own", 1), ("remote", 7)])
            assert await engine.load("1", found) == 9
            await engine.release("1")
            assert await until_free(node)
            redis.replace(
                object_name(HYBRID.fingerprint, item_key(STATE, 5)), bytes(HEADER_BYTES + HYBRID.part_bytes(FULL))
            )
            node.tier.drop([chunk.key for chunk in node.tier])
        async with engine_at_node(runtime_dir, "c", **more) as (node, engine):
            await ready(node)
            found = await engine.find("1")
            assert (found.hit_chunk_count, places(found)) == (3, [("remote", 6)])


async def test_nodes_share_a_bucket_too(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    with S3Server() as s3:
        more: dict[str, Any] = {
            "remote_url": s3.url,
            "remote_endpoint_url": s3.endpoint_url,
            "remote_lookup_timeout": 20.0,
        }
        async with engine_at_node(runtime_dir, "a", **more) as (node, engine):
            await ready(node)
            await engine.store_hits(3, 6)
            await until(lambda: s3.names() == stored(3, 6))
        async with engine_at_node(runtime_dir, "b", **more) as (node, engine):
            await ready(node)
            found = await engine.find("1")
            assert (found.hit_chunk_count, places(found)) == (6, [("remote", 9)])
            assert await engine.load("1", found) == 9
