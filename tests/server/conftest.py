"""What tests of servers share: a coordinator, and instances that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.spec import KvSpec
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import clears, drains
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance
from tests.support.specs import LLAMA


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of these tests join before they are asked for, but the coordinator has started just now."""
    for module in (clears, drains):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)


@pytest.fixture
def lease_ttl() -> float:
    """Long enough for any test that does not report; tests of leases parametrize it."""
    return 30.0


@pytest.fixture
def coordinator_options() -> dict[str, Any]:
    """Further configuration of `coordinator`; tests and packages override it."""
    return {}


@pytest.fixture
async def coordinator(lease_ttl: float, coordinator_options: dict[str, Any]) -> AsyncIterator[Coordinator]:
    """A coordinator in this process."""
    options: dict[str, Any] = {"http_port": OFF, "cluster_secret": "hush"}
    async with Coordinator(
        CoordinatorConfig(port=0, lease_ttl=lease_ttl, **(options | coordinator_options))
    ) as serving:
        yield serving


@pytest.fixture
async def channel(coordinator: Coordinator) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.open_channel(coordinator.address) as opened:
        yield opened


@pytest.fixture
def make(channel: grpc.aio.Channel) -> Make:
    """Makes instances that know each other; enter them to join."""
    fleet: dict[str, ScriptedInstance] = {}

    def make_instance(
        name: str, chunks: Any = (), spec: KvSpec = LLAMA, served: dict[str, str] | None = None
    ) -> ScriptedInstance:
        return ScriptedInstance(channel, fleet, name, spec, chunks, served)

    return make_instance
