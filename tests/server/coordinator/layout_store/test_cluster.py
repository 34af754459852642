"""Coordinators that share a layout map on a cluster of three: each of its processes is killed, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.rpc.messages import by_keys
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.layout_store.records import SHARD_COUNT, ChunkOwner
from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.layout_store.parts import RedisCluster, chunks_of, connected, knows, until
from tests.server.coordinator.layout_store.scripted_node import ScriptedNode

NODES = 6
CHUNKS = 200

pytestmark = pytest.mark.timeout(600)  # a cluster takes its time to notice that a process is gone, or back


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path) as started:
        yield started


def map_ids(coordinators: list[Coordinator]) -> set[str]:
    return {coordinator.shared.map_id for coordinator in coordinators if coordinator.shared}


class Load:
    """Nodes that gain and lose chunks, and lookups that all have to be answered."""

    def __init__(self, nodes: list[ScriptedNode], coordinators: list[Coordinator]) -> None:
        self._nodes = nodes
        self._coordinators = coordinators
        self._random = random.Random(1)  # no secret
        self.answers = 0

    async def change(self) -> None:
        for number in range(1 << 30):
            node = self._random.choice(self._nodes)
            node.admit(chunks_of(f"{node.instance_id} {number}", 5))
            node.evict(self._random.sample(list(node.chunks), min(5, len(node.chunks))))
            await asyncio.sleep(0.002)

    async def look_up(self, coordinator: Coordinator) -> None:
        async with rpc.open_channel(coordinator.address) as channel:
            cache = cache_service_pb2_grpc.CacheServiceStub(channel)
            while True:
                await cache.Lookup(cache_service_pb2.LookupRequest(prompt=by_keys(KEYS)), timeout=60)
                self.answers += 1
                await asyncio.sleep(0.005)

    async def run(self) -> None:
        """Lasts until it is cancelled; raises what a lookup is refused with."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.change())
            for coordinator in self._coordinators:
                group.create_task(self.look_up(coordinator))


async def test_the_shards_are_spread_over_the_cluster(cluster: RedisCluster) -> None:
    store = await connected(cluster.url)
    terms = [await store.next_term(ChunkOwner("", f"node-{number}")) for number in range(50)]
    assert all(terms)
    await store.aclose()
    counts = [sum(":id" in name for name in server.names()) for server in cluster.servers]
    assert sum(counts) == SHARD_COUNT
    assert all(counts)


async def test_each_process_of_the_cluster_is_killed_under_load_and_nothing_is_lost(cluster: RedisCluster) -> None:
    async with AsyncExitStack() as stack:
        coordinators = [
            await stack.enter_async_context(
                Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=10, layout_map_url=cluster.url))
            )
            for _ in range(3)
        ]
        addresses = [coordinator.address for coordinator in coordinators]
        nodes = []
        for number in range(NODES):
            order = addresses[number % 3 :] + addresses[: number % 3]
            name = f"node-{number}"
            nodes.append(await stack.enter_async_context(ScriptedNode(name, order, chunks_of(name, CHUNKS))))
        load = Load(nodes, coordinators)
        for server in cluster.servers:
            await until(lambda: len(map_ids(coordinators)) == 1 and "" not in map_ids(coordinators), "it is shared")
            before = map_ids(coordinators)
            running = asyncio.create_task(load.run())
            answered = load.answers
            server.kill()
            await until(lambda: map_ids(coordinators) == {""}, "it is noticed")  # awaited here
            server.start()
            await until(
                lambda: len(map_ids(coordinators)) == 1 and not map_ids(coordinators) & (before | {""}),  # noqa: B023
                "it is shared again, as another map",
            )
            await until(lambda: load.answers > answered)  # noqa: B023 # awaited here
            assert not running.done(), "a lookup was not answered"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for coordinator in coordinators:
                for node in nodes:
                    await until(
                        lambda: knows(coordinator, node.instance_id, node.chunks),  # noqa: B023 # awaited here
                        f"{coordinator.address} knows {node.instance_id}; streams were {node.stream_kinds}",
                    )
        for node in nodes:
            assert sum(kinds[-1] == "home" for kinds in node.stream_kinds.values()) == 1
            assert [kinds[-1] for kinds in node.stream_kinds.values()].count("elsewhere") == 2
