"""A coordinator and stubs that call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.spec import KvSpec
from lmkv.v1 import cache_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance
from tests.support.node_stub import NodeStub
from tests.support.specs import LLAMA


@pytest.fixture
def lease_ttl() -> float:
    """Long enough for any test that does not report; tests of leases parametrize it."""
    return 30.0


@pytest.fixture
async def coordinator(lease_ttl: float) -> AsyncIterator[Coordinator]:
    async with Coordinator(
        CoordinatorConfig(port=0, http_port=OFF, lease_ttl=lease_ttl, cluster_secret="hush")
    ) as serving:
        yield serving


@pytest.fixture
async def channel(coordinator: Coordinator) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.open_channel(coordinator.address) as opened:
        yield opened


@pytest.fixture
async def boundless(coordinator: Coordinator) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of a client that does not know lmkv's message limit."""
    async with grpc.aio.insecure_channel(coordinator.address) as opened:
        yield opened


@pytest.fixture
def registry(channel: grpc.aio.Channel) -> Any:
    return NodeStub(channel)


@pytest.fixture
def cache(channel: grpc.aio.Channel) -> Any:
    return cache_service_pb2_grpc.CacheServiceStub(channel)


@pytest.fixture
def make(channel: grpc.aio.Channel) -> Make:
    """Makes instances that know each other; enter them to join."""
    fleet: dict[str, ScriptedInstance] = {}

    def make_instance(
        name: str, chunks: Any = (), spec: KvSpec = LLAMA, served: dict[str, str] | None = None
    ) -> ScriptedInstance:
        return ScriptedInstance(channel, fleet, name, spec, chunks, served)

    return make_instance
