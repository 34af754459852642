"""Scripted engines, and proxies in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from lmkv.config import ProxyConfig
from lmkv_server.proxy.proxy import Proxy
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.scripted_engine import ScriptedEngine
from tests.waiting import WAIT_SECONDS

MakeEngine = Callable[..., Awaitable[ScriptedEngine]]
MakeProxy = Callable[..., Awaitable["Front"]]

QUICK = {"health_interval": 0.05, "health_timeout": WAIT_SECONDS, "stats_interval": 3600.0, "stop_timeout": 0.0}
"""A check of a busy engine is late and does not fail: some tests set an interval after which there is no other one."""


class Front:
    """A proxy with a client."""

    def __init__(self, proxy: Proxy, client: httpx.AsyncClient) -> None:
        self.proxy = proxy
        self.client = client

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """One request."""
        return await self.client.post(path, json=body, headers=headers)

    async def counts(self, name: str, value: float, **labels: str) -> None:
        """Waits until the sum of a metric's samples that have these labels is `value`: it is counted after the fact."""
        await until(lambda: self.metric(name, **labels) == value)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.proxy.metrics.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def all_healthy(self) -> None:
        """Waits until all engines are healthy."""
        await until(lambda: all(engine.is_healthy for engine in self.proxy.pools.engines))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Starts a scripted engine; with an id it has a node."""
    engines: list[ScriptedEngine] = []

    async def make(instance_id: str = "", other_paths: tuple[str, ...] = ()) -> ScriptedEngine:
        engines.append(ScriptedEngine(instance_id))
        engines[-1].other_paths = other_paths
        await engines[-1].start()
        return engines[-1]

    yield make
    await asyncio.gather(*(engine.stop() for engine in engines))


@pytest.fixture
def make_proxy(make_engine: MakeEngine, stack: AsyncExitStack) -> MakeProxy:
    """Starts a proxy before the given engines, and waits until all are healthy."""

    async def make(
        prefillers: list[ScriptedEngine] | None = None,
        decoders: list[ScriptedEngine] | None = None,
        engines: Sequence[ScriptedEngine | str] | None = None,
        **settings: Any,
    ) -> Front:
        if engines is not None:
            urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
            settings |= {"mode": "route", "engines": urls}
        else:
            settings["prefiller_port"] = [engine.port for engine in prefillers or ()]
            settings["decoder_port"] = [engine.port for engine in decoders or ()]
        proxy = await stack.enter_async_context(Proxy(ProxyConfig(port=0, **(QUICK | settings))))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60))
        front = Front(proxy, client)
        await front.all_healthy()
        return front

    return make


@pytest.fixture
async def prefiller(make_engine: MakeEngine) -> ScriptedEngine:
    return await make_engine("p-1")


@pytest.fixture
async def decoder(make_engine: MakeEngine) -> ScriptedEngine:
    return await make_engine("d-1")


@pytest.fixture
async def front(prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy) -> Front:
    """One prefill engine and one decode engine behind a proxy."""
    return await make_proxy([prefiller], [decoder])
