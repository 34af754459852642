"""`/history` over HTTP."""

from __future__ import annotations

import time

import httpx

from lmkv.v1.registry_service_pb2 import InstanceStats
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.scripted_instance import Make, until


async def test_samples_of_the_fleet_and_of_an_instance_are_columns(
    http: httpx.AsyncClient, coordinator: Coordinator, make: Make
) -> None:
    services = coordinator.tenants.unnamed
    a = make("a")
    async with a, make("b"):
        services.history.take(services.core.instances, time.time())
        a.stats.CopyFrom(InstanceStats(asked_chunks=8, own_chunks=6))
        await a.report_stats()
        await until(lambda: services.core.instances.named("a", "").stats.asked_chunks == 8)
        services.history.take(services.core.instances, time.time())
        for query in ({}, {"instance_id": "a"}):
            answer = (await http.get("/history", params=query)).json()
            assert answer["asked_chunks"][-2:] == [0, 8]
            assert answer["own_chunks"][-1] == 6
            assert list(answer["used_bytes"]) == ["host"]
            columns = [answer["times"], answer["load_seconds"], answer["used_bytes"]["host"]]
            assert len({len(column) for column in columns}) == 1


async def test_the_history_of_an_unknown_instance_is_an_error(http: httpx.AsyncClient) -> None:
    response = await http.get("/history", params={"instance_id": "unknown"})
    assert response.status_code == 404
    assert "unknown" in response.json()["detail"]
