"""A task that is cancelled while it waits for the store ends, at every await of a call."""

from __future__ import annotations

import asyncio

import pytest

from lmkv.config.remote_url import parse_remote_url
from lmkv.runtime.signals import fast_loop
from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient
from tests.server.node.disk_parts import WAIT_SECONDS
from tests.support.redis_server import RedisServer

STEPS = 60
"""Steps of the loop at each of which a task is cancelled: a call takes fewer."""
ROUNDS = 20


@pytest.fixture
def server() -> RedisServer:
    return RedisServer()


async def ask_for_ever(store: ValkeyClient) -> None:
    """Never ends by itself."""
    while True:
        await store.tail(0)


async def end_at_every_step(url: str) -> list[int]:
    """The steps at which a task was cancelled and did not end."""
    store = ValkeyClient(parse_remote_url(url), held_seconds=60.0)
    await store.connect()
    ignored = []
    for steps in ROUNDS * [*range(STEPS)]:
        asking = asyncio.create_task(ask_for_ever(store))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=WAIT_SECONDS)
        if not asking.done():
            ignored.append(steps)
            break
    while not asking.done():
        asking.cancel()
        await asyncio.sleep(0)
    await store.aclose()
    return ignored


def test_a_task_that_is_cancelled_in_a_call_ends(server: RedisServer) -> None:
    with server, asyncio.Runner(loop_factory=fast_loop()) as runner:
        assert not runner.run(end_at_every_step(server.url))
