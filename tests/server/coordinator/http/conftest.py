"""A coordinator that speaks HTTP, a client of it, and nodes that hold what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from lmkv_server.coordinator.coordinator import Coordinator


@pytest.fixture
async def coordinator(lease_ttl: float) -> AsyncIterator[Coordinator]:
    ports = {"http_port": 0}
    async with Coordinator(port=0, http_ports=ports, lease_ttl=lease_ttl, cluster_secret="hush") as serving:
        yield serving


@pytest.fixture
async def http(coordinator: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{coordinator.http_address}", trust_env=False, timeout=10) as client:
        yield client
