"""A node that stays without engines takes copies of chunks of any spec, for others and for engines that come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import KvSpecMismatch
from lmkv_client import Coordinator as CoordinatorClient
from lmkv_client.commands.fleet import instance_row
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.server.node.prompts import SIZE, SPEC, hit_tokens, prompt, store_prompt
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually

OTHER = small_spec(model_name="other", model_id="other")
TOKENS = prompt(2 * SIZE + 9)
HOLDER, STANDBY = "holder", "standby"


class Fleet:
    """A node with an engine that has stored a prompt, and one without any engine."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    async def start(self) -> None:
        enter = self._stack.enter_async_context
        self._coordinator = await enter(Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        self.client = await enter(CoordinatorClient(self._coordinator.address))
        self.holder, self.standby = [await enter(Node(self._config(name))) for name in (HOLDER, STANDBY)]
        self.storing = await enter(EngineClient(self.holder))
        await store_prompt(self.storing, self.holder.pool, TOKENS)
        await eventually(lambda: self.matched(HOLDER), len(TOKENS))
        await eventually(lambda: self.shown(STANDBY), ("any, as standby", "0, standby"))

    def _config(self, name: str) -> NodeConfig:
        return node_config(
            self._folder, name, coordinator_address=(self._coordinator.address,), coordinator_timeout=WAIT_SECONDS
        )

    async def matched(self, instance_id: str) -> int:
        """Tokens of the prompt that an instance holds, as the coordinator knows."""
        found = await self.client.lookup(TOKENS, model_name=SPEC.model_name)
        return next((one.matched_token_count for one in found.holders if one.instance_id == instance_id), 0)

    async def shown(self, instance_id: str) -> tuple[str, str]:
        """Models and engines of an instance, as `lmkv instances` shows them."""
        rows = [instance_row(one) for one in await self.client.instances() if one.instance_id == instance_id]
        return (rows[0][2], rows[0][4]) if rows else ("", "")


@pytest.fixture
async def fleet(runtime_dir: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(runtime_dir, stack)
        await fleet.start()
        yield fleet


@pytest.mark.parametrize("copy", [False, True])
async def test_a_standby_node_takes_what_is_moved_or_copied_there(fleet: Fleet, copy: bool) -> None:
    move = fleet.client.copy if copy else fleet.client.move
    operation = await move(TOKENS, source=HOLDER, destination=STANDBY)
    await operation.wait()
    await eventually(lambda: fleet.matched(STANDBY), len(TOKENS))
    await eventually(lambda: fleet.matched(HOLDER), len(TOKENS) if copy else 0)
    assert (await fleet.shown(STANDBY))[1] == "0, standby"
    assert await hit_tokens(fleet.storing, fleet.holder.pool, "1", TOKENS) == len(TOKENS), "peers fetch it from there"
    async with EngineClient(fleet.standby, "late") as engine:
        assert await hit_tokens(engine, fleet.standby.pool, "1", TOKENS) == len(TOKENS)


async def test_a_drain_has_a_standby_node_as_its_destination(fleet: Fleet) -> None:
    operation = await fleet.client.drain(HOLDER)
    await operation.wait()
    await eventually(lambda: fleet.matched(STANDBY), len(TOKENS))


async def test_a_node_with_engines_of_another_model_takes_nothing(fleet: Fleet) -> None:
    async with EngineClient(fleet.standby, "other", OTHER):
        await eventually(lambda: fleet.shown(STANDBY), ("other (float32)", "1"))
        with pytest.raises(KvSpecMismatch):
            await fleet.client.move(TOKENS, source=HOLDER, destination=STANDBY, model_name=SPEC.model_name)
    assert fleet.standby.engines.spec(SPEC.fingerprint) is None


async def test_a_node_that_ends_soon_without_engines_is_no_standby_node(fleet: Fleet) -> None:
    ending = asyncio.create_task(fleet.standby.linger())
    await eventually(lambda: ends(fleet), True)  # the expected value
    with pytest.raises(KvSpecMismatch):
        await fleet.client.move(TOKENS, source=HOLDER, destination=STANDBY, model_name=SPEC.model_name)
    ending.cancel()


async def ends(fleet: Fleet) -> bool:
    """Whether `lmkv instances` shows that the node ends."""
    return "ends in" in (await fleet.shown(STANDBY))[1]
