"""A log that the store has dropped is noticed, however the store's clock stands: all followers load again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.layout_store.records import ChunkOwner
from tests.server.coordinator.cases import CHUNKS
from tests.server.coordinator.layout_store.parts import chunks_of, knows, until
from tests.server.coordinator.layout_store.scripted_node import ScriptedNode
from tests.support.redis_server import RedisServer

LOG = f"lmkv:{{{ChunkOwner('', 'a').shard}}}:log"
HOUR_MS = 3_600_000


@pytest.fixture
async def pair(server: RedisServer) -> AsyncIterator[list[Coordinator]]:
    """Two coordinators that share a map."""
    async with AsyncExitStack() as stack:
        made = [
            Coordinator(
                CoordinatorConfig(
                    port=0, http_port=OFF, lease_ttl=10.0, cluster_secret="hush", layout_map_url=server.url
                )
            )
            for _ in range(2)
        ]
        for one in made:
            await stack.enter_async_context(one)
        yield made


async def all_know(node: ScriptedNode, coordinators: list[Coordinator]) -> None:
    """Waits until each knows what the node holds."""
    for one in coordinators:
        await until(lambda at=one: knows(at, "a", node.chunks), "both know it")  # type: ignore[misc]


@pytest.mark.parametrize("clock_ahead_ms", [0, HOUR_MS])
async def test_a_dropped_log_is_noticed(pair: list[Coordinator], server: RedisServer, clock_ahead_ms: int) -> None:
    """`clock_ahead_ms`: so far the clock of the store was ahead when the log was written, and is no more."""
    async with ScriptedNode("a", [one.address for one in pair], CHUNKS) as node:
        await all_know(node, pair)
        with server.client() as client:
            newest = int(client.xinfo_stream(LOG)["last-generated-id"].partition(b"-")[0])
            client.execute_command("XSETID", LOG, f"{newest + clock_ahead_ms}-1000")
            node.admit(chunks_of("before", 10))
            await all_know(node, pair)
            client.delete(LOG)
            node.admit(chunks_of("after", 10))
            node.evict(list(chunks_of("before", 5)))
            await all_know(node, pair)
            assert client.xlen(LOG)
        node.admit(chunks_of("last", 10))
        await all_know(node, pair)


async def test_a_dropped_log_makes_followers_load_once(pair: list[Coordinator], server: RedisServer) -> None:
    other = pair[1].shared
    assert other is not None
    async with ScriptedNode("a", [one.address for one in pair], CHUNKS) as node:
        await all_know(node, pair)
        before = other.stats().load_count
        with server.client() as client:
            client.delete(LOG)
        await until(lambda: other.stats().load_count == before + 1)
        node.admit(chunks_of("more", 10))
        await all_know(node, pair)
        assert other.stats().load_count == before + 1
