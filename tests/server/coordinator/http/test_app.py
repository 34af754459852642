"""What probes and Prometheus ask."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmkv.v1 import registry_service_pb2
from lmkv.v1.registry_service_pb2 import InstanceStats
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import CHUNKS, PROMPT
from tests.server.coordinator.scripted_instance import Make, until
from tests.support.node_stub import registration


async def scraped(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, in the order of the labels' names."""
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(sample.name, *sample.labels.values()): sample.value for one in families for sample in one.samples}


async def test_it_is_alive_at_once_and_not_ready_before_the_map_is_whole(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    early = await http.get("/readyz")
    assert early.status_code == 503
    assert "being rebuilt" in early.json()["detail"]


@pytest.mark.parametrize("lease_ttl", [0.3])
async def test_it_is_ready_once_all_instances_could_have_joined(http: httpx.AsyncClient) -> None:
    while (response := await http.get("/readyz")).status_code != 200:
        assert response.status_code == 503
    assert response.json() == {"status": "ok"}


async def test_it_names_whom_it_waits_for(http: httpx.AsyncClient, registry: Any) -> None:
    said = registry_service_pb2.Instance(instance_id="late", epoch=1, peer_address="127.0.0.1:7000")
    await registry.Register(registration(said), timeout=60)
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["detail"] == "the layout map is being rebuilt: waiting for late"


async def test_metrics_describe_fleet_and_work(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS), make("b"):
        for tokens in (PROMPT, [7]):
            await http.post("/lookup", json={"tokens": tokens})
        move = {"old_position": ["a", "host"], "new_position": ["b", "host"], "tokens": PROMPT, "copy": True}
        event_id = (await http.post("/move", json=move)).json()["event_id"]
        wait = {"name": event_id}
        assert (await http.post("/google.longrunning.Operations/WaitOperation", json=wait)).json()["done"]
        await http.post("/pin", json={"instance_id": "a", "tokens": PROMPT})
        await http.get("/nowhere")
        await http.get("/nowhere/else")
        samples = await scraped(http)
    name = "lmkv_coordinator_"
    assert samples[f"{name}instances", "true"] == 2
    assert samples[f"{name}instances", "false"] == 0
    assert samples[(f"{name}layout_partial",)] == 1
    assert samples[(f"{name}layout_keys",)] == 3
    assert samples[f"{name}chunks", "a", "host"] == 3
    assert samples[f"{name}tier_capacity_bytes", "a", "host"] == 1 << 30
    assert samples[f"{name}pins", "a"] == 1
    assert samples[f"{name}pins", "b"] == 0
    assert samples[(f"{name}lookup_seconds_count",)] == 2
    assert samples[f"{name}lookup_seconds_bucket", "+Inf"] == 2
    assert samples[(f"{name}lookup_seconds_sum",)] > 0
    assert samples[(f"{name}lookup_hits_total",)] == 1
    assert samples[(f"{name}reports_total",)] >= 4
    assert samples[f"{name}operations_ended_total", "copy", "done"] == 1
    assert samples[f"{name}operations_running", "move"] == 0
    assert samples[(f"{name}watchers",)] == 0
    assert samples[f"{name}http_requests_total", "200", "/lookup"] == 2
    assert samples[f"{name}http_requests_total", "404", "other"] == 2
    assert samples[("process_resident_memory_bytes",)] > 0


async def test_every_metric_is_documented_with_its_labels(http: httpx.AsyncClient, make: Make) -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "metrics.md").read_text()
    async with make("a", CHUNKS):
        await http.post("/lookup", json={"tokens": PROMPT})
        families = list(text_string_to_metric_families((await http.get("/metrics")).text))
    own = [family for family in families if family.name.startswith("lmkv_coordinator_")]
    assert len(own) >= 12
    for family in own:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        row = next((line for line in page.splitlines() if re.match(rf"\| `{name}[`{{]", line)), None)
        assert row is not None, family.name
        assert row.endswith(f"| {family.documentation} |")
        assert ("(histogram)" in row) == (family.type == "histogram")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(re.findall(r"\w+", row.partition("{")[2].partition("}")[0])), row


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
