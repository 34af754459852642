"""The SDK over two real coordinators, one of which is lost: questions are asked of the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import InstanceNotFound, Unreachable
from lmkv_client import Coordinator
from lmkv_client.coordinator import LookupStream
from lmkv_client.sync import Coordinator as SyncCoordinator
from lmkv_server.coordinator import coordinator as server
from tests.server.node.ordering import until
from tests.waiting import eventually


class Two:
    """Two coordinators, of which the first can go."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self) -> None:
        self.first = await self._stack.enter_async_context(server.Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        self.second = await self._stack.enter_async_context(
            server.Coordinator(CoordinatorConfig(port=0, http_port=OFF))
        )
        self.addresses = self.first.address, self.second.address


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        both = Two(stack)
        await both.start()
        yield both


async def test_the_first_is_asked_until_it_is_gone_and_then_the_second(two: Two) -> None:
    async with Coordinator(*two.addresses) as coordinator:
        assert await coordinator.instances() == []
        assert coordinator.address == two.first.address
        await two.first.aclose()
        assert await coordinator.instances() == []
        assert coordinator.address == two.second.address
        assert await coordinator.pins() == []
        assert await coordinator.operations() == []
        await two.second.aclose()
        with pytest.raises(Unreachable, match="no coordinator responds"):
            await coordinator.instances()


async def test_an_error_of_a_live_coordinator_does_not_fail_over(two: Two) -> None:
    async with Coordinator(*two.addresses) as coordinator:
        with pytest.raises(InstanceNotFound):
            await coordinator.clear(everything=True, instance_id="unknown")
        assert coordinator.address == two.first.address


async def test_a_watch_restarts_at_the_other_coordinator(two: Two) -> None:
    async with Coordinator(*two.addresses) as coordinator:
        updates = coordinator.watch(retry_seconds=60)
        first = await anext(updates)
        await two.first.aclose()
        second = await anext(updates)
        assert (first.reset, second.reset) == (True, True)
        await updates.aclose()


async def test_a_stream_of_lookups_continues_at_the_other(two: Two) -> None:
    async with Coordinator(*two.addresses) as coordinator, coordinator.lookup_stream() as stream:
        assert not (await stream.lookup([1] * 256)).holders
        await two.first.aclose()
        await until(lambda: not stream._stream.is_open)
        assert not (await stream.lookup([1] * 256)).holders


async def test_one_that_is_silent_is_left_after_its_time(two: Two) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never reads
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with Coordinator(address, two.second.address, timeout_seconds=1.0) as coordinator:
            assert await coordinator.instances() == []
            assert coordinator.address == two.second.address


async def test_threads_fail_over_too(two: Two) -> None:
    def ask() -> str:
        with SyncCoordinator("127.0.0.1:1", two.second.address) as coordinator:
            assert coordinator.instances() == []
            return coordinator.address

    assert await asyncio.to_thread(ask) == two.second.address


async def test_a_stream_of_lookups_leaves_one_that_is_silent(two: Two) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never reads
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        coordinator = Coordinator(address, two.second.address, timeout_seconds=0.5)
        async with coordinator, coordinator.lookup_stream() as stream:
            with pytest.raises(Unreachable, match="deadline exceeded"):
                await stream.lookup([1] * 256)
            assert coordinator.address == two.second.address
            await eventually(lambda: answers(stream), True)


async def answers(stream: LookupStream) -> bool:
    """Whether a lookup is answered."""
    try:
        return not (await stream.lookup([1] * 256)).holders
    except Unreachable:  # a busy machine may take longer
        return False
