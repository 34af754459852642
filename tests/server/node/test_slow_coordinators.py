"""Coordinators and stores that answer late, or come back: what a lookup is worth decides whether it waits for them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.node_parts import node_config
from tests.support.redis_server import RedisServer
from tests.support.slow_wire import SlowWire
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually, until

SPEC = small_spec()
KEYS = chunk_keys(*range(8))
OWN, BEYOND = KEYS[:3], KEYS[3:]
LATE_SECONDS = 0.3
"""How late answers are: more than `coordinator_timeout` and `remote_lookup_timeout`."""
WORTH_SECONDS = WAIT_SECONDS
"""The worth of an answer about a long prompt; less would make the test depend on the speed of this machine."""


class Asking:
    """An engine and its node."""

    def __init__(self, engine: EngineClient, node: Node) -> None:
        self.engine = engine
        self.node = node
        self._number = 0

    async def found(self, budget_seconds: float = 0.0) -> int:
        """How many of the chunks beyond the pool an engine is offered to which the answer is worth this time."""
        self._number += 1
        found = await self.engine.lookup(str(self._number), KEYS, budget_seconds=budget_seconds)
        assert len(found.own) == len(OWN), "what the node holds itself is always found"
        await self.engine.release(str(self._number))
        return absent_count(found)

    async def long_prompt(self) -> int:
        """As `found`, of a prompt that takes long to compute."""
        return await self.found(WORTH_SECONDS)


async def asking(stack: AsyncExitStack, runtime_dir: Path, **settings: object) -> Asking:
    """Starts the engine, and its node, which has the first chunks."""
    node = await stack.enter_async_context(Node(node_config(runtime_dir, "asker", **settings)))
    engine = await stack.enter_async_context(EngineClient(node, "asking", SPEC))
    await engine.store(OWN)
    await until(lambda: all(node.tier.get(key) for key in OWN))
    return Asking(engine, node)


async def holder(stack: AsyncExitStack, runtime_dir: Path, **settings: object) -> Node:
    """Another node, which has all chunks."""
    node = await stack.enter_async_context(Node(node_config(runtime_dir, "holder", **settings)))
    engine = await stack.enter_async_context(EngineClient(node, "storing", SPEC))
    await engine.store(KEYS)
    await until(lambda: all(node.tier.get(key) for key in KEYS))
    return node


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def slow(runtime_dir: Path) -> AsyncIterator[Asking]:
    """A node whose coordinator is far away."""
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        await holder(stack, runtime_dir, coordinator_address=(coordinator.address,))
        wire = stack.enter_context(SlowWire(coordinator.port))
        settings = {"coordinator_address": (wire.address,), "coordinator_timeout": 0.05}
        slow = await asking(stack, runtime_dir, **settings)
        await eventually(slow.long_prompt, len(BEYOND))
        wire.seconds = LATE_SECONDS
        yield slow


async def test_a_long_prompt_waits_for_a_slow_coordinator_and_a_short_one_does_not(slow: Asking) -> None:
    assert await slow.found() == 0
    assert await slow.long_prompt() == len(BEYOND)
    assert await slow.found(LATE_SECONDS / 10) == 0
    assert await slow.long_prompt() == len(BEYOND), "right behind one that has waited in vain"


async def test_short_prompts_beside_it_do_not_cost_a_long_one_its_hit(slow: Asking) -> None:
    request = pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=KEYS)
    long = asyncio.create_task(slow.long_prompt())
    await asyncio.gather(*(slow.engine.stub.Lookup(request, timeout=WAIT_SECONDS) for _ in range(8)))
    assert slow.node.fleet.stats().lookup_failures, "their time was over"
    assert await long == len(BEYOND)


async def test_a_long_prompt_waits_for_a_slow_store_and_a_short_one_does_not(
    runtime_dir: Path, redis: RedisServer
) -> None:
    async with AsyncExitStack() as stack:
        await holder(stack, runtime_dir, remote_url=redis.url)
        await until(lambda: len(redis.names()) == len(KEYS))
        wire = stack.enter_context(SlowWire(redis.port))
        slow = await asking(stack, runtime_dir, remote_url=f"redis://{wire.address}/0")
        wire.seconds = LATE_SECONDS
        assert await slow.found() == 0
        assert await slow.long_prompt() == len(BEYOND), "right behind one that has waited in vain"


async def test_a_store_behind_a_slow_coordinator_has_its_share_of_the_time(
    runtime_dir: Path, redis: RedisServer
) -> None:
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        await holder(stack, runtime_dir, remote_url=redis.url)
        await until(lambda: len(redis.names()) == len(KEYS))
        wire = stack.enter_context(SlowWire(coordinator.port))
        settings = {"coordinator_address": (wire.address,), "coordinator_timeout": 0.05}
        slow = await asking(stack, runtime_dir, remote_url=redis.url, remote_lookup_timeout=20.0, **settings)
        wire.seconds = 3600.0  # it does not answer at all
        assert await slow.found(4 * LATE_SECONDS) == len(BEYOND)


# --- A coordinator that comes back -------------------------------------------------------------------------------


@pytest.fixture
async def restarting(runtime_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[Asking, Node, CoordinatorProcess]]:
    """A coordinator of its own process, two nodes, and the one that asks."""
    async with AsyncExitStack() as stack:
        coordinator = CoordinatorProcess(tmp_path)
        stack.callback(coordinator.stop)
        coordinator.start()
        await asyncio.to_thread(coordinator.wait_ready)
        address = (coordinator.address,)
        holding = await holder(stack, runtime_dir, coordinator_address=address)
        asker = await asking(stack, runtime_dir, coordinator_address=address, coordinator_timeout=LATE_SECONDS)
        await eventually(asker.long_prompt, len(BEYOND))
        yield asker, holding, coordinator


async def test_peers_hit_as_soon_as_a_killed_coordinator_has_both_nodes_again(
    restarting: tuple[Asking, Node, CoordinatorProcess],
) -> None:
    asker, holding, coordinator = restarting
    coordinator.kill()
    for _ in range(5):
        assert await asker.long_prompt() == 0
    coordinator.start()
    await asyncio.to_thread(coordinator.wait_ready)
    fleets = (asker.node.fleet, holding.fleet)
    await until(lambda: all(one.state.is_synced for fleet in fleets for one in fleet.sessions))
    assert await asker.long_prompt() == len(BEYOND)


async def test_peers_hit_with_the_first_answer_of_a_coordinator_that_was_frozen(
    restarting: tuple[Asking, Node, CoordinatorProcess],
) -> None:
    asker, _, coordinator = restarting
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        assert await asker.found() == 0
        assert not asker.node.fleet.connected
        assert await asker.found() == 0, "not asked again"
        assert asker.node.fleet.stats().lookup_failures == 1
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    await until(lambda: asker.node.fleet.connected)
    assert await asker.long_prompt() == len(BEYOND)
