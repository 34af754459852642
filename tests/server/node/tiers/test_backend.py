"""Health of a backend: late calls, and what follows their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from lmkv_server.node.tiers.backend import BackendHealth, BackendTimes
from tests.waiting import WAIT_SECONDS, until


class Backend:
    """A backend whose calls wait until they are released, and its health."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.error: OSError | None = None
        self.closed_count = 0
        self.health = BackendHealth("tier", "backend", self, {"call": 1}, BackendTimes(retry_seconds=3600.0))

    async def open(self) -> None:
        self.health.opened()

    def lost(self) -> None:
        self.closed_count += 1

    def call(self) -> str:
        assert self.released.wait(WAIT_SECONDS)
        if self.error:
            raise self.error
        return "answer"


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    backend = Backend()
    opening = asyncio.create_task(backend.health.keep_open())
    await until(lambda: backend.health.usable)
    yield backend
    backend.released.set()
    opening.cancel()
    await backend.health.aclose()


async def test_a_late_call_suspends_the_backend_and_its_end_wakes_who_waits_for_work(backend: Backend) -> None:
    health = backend.health
    assert await health.run_within(0.01, "call", backend.call) is None
    assert not health.usable
    assert health.stats().late_lookups == 1
    health.work.clear()
    backend.released.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await health.work.wait()
    assert health.usable
    assert await health.run_within(WAIT_SECONDS, "call", backend.call) == "answer"


async def test_a_late_call_that_fails_closes_the_backend(backend: Backend) -> None:
    backend.error = OSError("gone")
    assert await backend.health.run_within(0.01, "call", backend.call) is None
    backend.released.set()
    await until(lambda: backend.closed_count == 1)
    assert not backend.health.usable
