"""A node without engines keeps its pool while its engine restarts, and says how long it will."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv_client import Coordinator as CoordinatorClient
from lmkv_client.commands.output import engines
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.linger import MAX_POLL_SECONDS, SHORT_LINGER_SECONDS, WANTED_BYTES, Linger
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.waiting import eventually

LINGER_SECONDS = NodeConfig(instance_id="n").node_linger
SLOWEST_RESTART_SECONDS = 143
"""The longest restart of an engine that was seen to lose the pool of its node when this stayed for a minute."""


class World:
    """A clock, engines and memory."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine_count = 0
        self.available_bytes = 64 * WANTED_BYTES
        self.linger = Linger(
            LINGER_SECONDS,
            lambda: self.engine_count > 0,
            available=lambda: self.available_bytes,
            clock=lambda: self.now,
        )

    def ends_after(self) -> float:
        """The time until the node ends."""
        began = self.now
        while not self.linger.look():
            self.now += MAX_POLL_SECONDS
        return self.now - began


def test_the_pool_is_there_after_every_restart_that_was_seen() -> None:
    world = World()
    assert world.linger.left_seconds > 2 * SLOWEST_RESTART_SECONDS
    world.now += SLOWEST_RESTART_SECONDS
    assert not world.linger.look()
    world.engine_count = 1
    world.now += 10 * LINGER_SECONDS
    assert not world.linger.look()
    world.engine_count = 0
    world.linger.restart()
    assert world.ends_after() == LINGER_SECONDS


def test_memory_that_others_want_is_kept_for_a_minute_only() -> None:
    world = World()
    world.available_bytes = WANTED_BYTES - 1
    assert world.ends_after() == SHORT_LINGER_SECONDS
    world.linger.restart()
    world.linger.look()
    world.available_bytes = WANTED_BYTES
    assert world.ends_after() == LINGER_SECONDS, "there is enough again"
    world.engine_count, world.available_bytes = 1, 0
    assert not world.linger.look(), "engines keep it"


def test_the_log_counts_down(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO):
        world.ends_after()
    times = [message.partition("ending in ")[2].partition(" unless")[0] for message in caplog.messages[:-1]]
    assert times == ["15 m 0 s", "7 m 55 s", "3 m 55 s", "1 m 55 s", "55.00 s"]
    assert caplog.messages[-1] == "ending: no engine for 900 s (node_linger)"


async def test_the_fleet_knows_when_a_node_without_engines_ends(runtime_dir: Path) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        Node(node_config(runtime_dir, "n", coordinator_address=(coordinator.address,), node_linger=900.0)) as node,
    ):
        ending = asyncio.create_task(node.linger())

        async def shown() -> str:
            return " ".join([engines(one).partition(" m ")[0] for one in await client.instances()])

        async with EngineClient(node):
            await eventually(shown, "1")
        await eventually(shown, "0, ends in 14")
        ending.cancel()
