"""Pickers in front of scripted engines, and a gateway that calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest

from lmkv.config import PickerConfig
from lmkv_server.proxy.engines import Resolve, resolve
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.picker.selection import address_of
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import MakeEngine, make_engine, stack
from tests.server.proxy.picker.published import Gateway
from tests.server.proxy.picker.watched_client import WatchedClient
from tests.server.proxy.scripted_engine import ScriptedEngine

__all__ = ["make_engine", "stack"]  # fixtures of the proxy's tests

MakePicker = Callable[..., Awaitable["Front"]]


class Front:
    """A picker with a gateway, and a client of its HTTP port."""

    def __init__(self, picker: Picker, channel: grpc.aio.Channel, clients: Sequence[WatchedClient]) -> None:
        """`clients` has the picker's client of the coordinators, if its policy needs one."""
        self.picker = picker
        self.channel = channel
        self.gateway = Gateway(channel)
        self._clients = clients

    @property
    def client(self) -> WatchedClient:
        """The picker's client of the coordinators."""
        (client,) = self._clients
        return client

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.picker.metrics.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def in_flight(self, engine: ScriptedEngine) -> int:
        """Requests that the picker counts at an engine."""
        (found,) = (one for one in self.picker.engines if address_of(one) == host_port(engine))
        return found.in_flight_count

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """A page of the HTTP port."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return await client.get(f"http://127.0.0.1:{self.picker.metrics_port}{path}", headers=headers)


def host_port(engine: ScriptedEngine) -> str:
    """The endpoint of an engine."""
    return f"127.0.0.1:{engine.port}"


@pytest.fixture
def make_picker(make_engine: MakeEngine, stack: AsyncExitStack) -> MakePicker:
    """Starts a picker before the given engines, and waits until all are healthy."""

    async def make(
        engines: list[ScriptedEngine],
        *,
        urls: Sequence[str] = (),
        healthy: bool = True,
        resolve: Resolve = resolve,
        **settings: Any,
    ) -> Front:
        defaults: dict[str, Any] = {
            "port": 0,
            "metrics_port": 0,
            "health_interval": 0.05,
            "stop_timeout": 0.0,
            "lookup_timeout": 20.0,
        }
        if "coordinator_address" not in settings:
            defaults["policy"] = "least_loaded"
        config = PickerConfig(**{**defaults, "engines": tuple(urls or (engine.url for engine in engines))} | settings)
        clients: list[WatchedClient] = []

        def open_client(*arguments: Any) -> WatchedClient:
            clients.append(WatchedClient(*arguments))
            return clients[-1]

        picker = await stack.enter_async_context(Picker(config, open_client=open_client, resolve=resolve))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(picker.address))
        front = Front(picker, channel, clients)
        if healthy:
            await until(lambda: len(picker.engines) == len(engines) and all(one.is_healthy for one in picker.engines))
        return front

    return make
