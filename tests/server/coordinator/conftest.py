"""Stubs that call a coordinator, and a fleet whose coordinator asks for tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv.v1 import cache_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.guarded import Guarded, guarded
from tests.support.node_stub import NodeStub


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
async def fleet(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A coordinator that asks for tokens, with tenants; tests add instances."""
    async with guarded(tmp_path) as made:
        yield made
