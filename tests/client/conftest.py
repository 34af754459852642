"""A real coordinator for the SDK and the commands, and a fleet that tests script: real orders, invented chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from lmkv import cli, rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_client import Coordinator as Client
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import clears, drains
from tests.server.coordinator.cases import CHUNKS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.specs import LLAMA

RunCommand = Callable[..., Awaitable[int]]


class Fleet:
    """A coordinator, and two instances: `a` holds the prompt of the cases, `b` holds nothing."""

    def __init__(self, address: str, a: ScriptedInstance, b: ScriptedInstance) -> None:
        self.address = address
        self.a = a
        self.b = b

    async def holders(self) -> dict[str, int]:
        """The matched tokens of the cases' prompt, by instance."""
        async with Client(self.address) as coordinator:
            answer = await coordinator.lookup(PROMPT)
        return {holder.instance_id: holder.matched_token_count for holder in answer.holders}

    def pause(self) -> None:
        """Has the instances hold back orders until `resume`."""
        for instance in (self.a, self.b):
            instance.going.clear()

    def resume(self) -> None:
        for instance in (self.a, self.b):
            instance.going.set()


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    for module in (clears, drains):  # the coordinator has started just now, and its instances have joined
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=30.0, cluster_secret="hush"))
        )
        channel = await stack.enter_async_context(rpc.open_channel(coordinator.address))
        known: dict[str, ScriptedInstance] = {}
        a = await stack.enter_async_context(ScriptedInstance(channel, known, "a", LLAMA, CHUNKS))
        b = await stack.enter_async_context(ScriptedInstance(channel, known, "b", LLAMA))
        monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", coordinator.address)
        yield Fleet(coordinator.address, a, b)


@pytest.fixture
def run_command() -> RunCommand:
    """Runs a command line in a thread of its own, since commands have their own event loop; returns its exit code."""

    async def run(*argv: str) -> int:
        return await asyncio.to_thread(cli.main, argv)

    return run
