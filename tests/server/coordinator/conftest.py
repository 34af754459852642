"""A coordinator and stubs that call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator


@pytest.fixture
def lease_ttl() -> float:
    """Long enough for any test that does not report; tests of leases parametrize it."""
    return 30.0


@pytest.fixture
async def coordinator(lease_ttl: float) -> AsyncIterator[Coordinator]:
    async with Coordinator(port=0, lease_ttl=lease_ttl, cluster_secret="hush") as serving:
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
    return registry_service_pb2_grpc.RegistryServiceStub(channel)


@pytest.fixture
def cache(channel: grpc.aio.Channel) -> Any:
    return cache_service_pb2_grpc.CacheServiceStub(channel)
