"""What a node measures, and its `/metrics`."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv_server.node.metrics import MAX_CONCURRENT_REQUESTS, TIER_COUNTERS, TIER_GAUGES, TIER_USAGES
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.base import TierStats, TierUsage
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS

SPEC = small_spec()


def node_config(runtime_dir: Path, **settings: object) -> NodeConfig:
    values = {"instance_id": "n", "runtime_dir": str(runtime_dir), "max_local_cpu_size": "16MB", "metrics_port": 0}
    return NodeConfig(**(values | settings))  # type: ignore[arg-type]


async def scrape(port: int | None) -> dict[str, float]:
    """Samples by name, or by name and the values of labels besides `instance_id`, which is `n`."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert {sample.labels.pop("instance_id") for sample in samples} == {"n"}
    return {"/".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


async def test_a_node_reports_its_chunks_and_counters(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir)) as node, EngineClient(node) as engine:
        await engine.store(chunk_keys(1, 2))
        await engine.lookup("a", chunk_keys(1, 2, 3))
        await engine.lookup("b", chunk_keys(9))
        now = await scrape(node.metrics_port)
    assert now["lmkv_node_pool_capacity_bytes"] == node.tier.size_bytes
    assert now["lmkv_node_pool_used_bytes"] == 2 * SPEC.chunk_bytes
    assert now["lmkv_node_chunks"] == 2
    assert now["lmkv_node_engines"] == 1
    assert now["lmkv_node_lookups_total"] == 2
    assert now["lmkv_node_lookup_asked_chunks_total"] == 4
    assert now["lmkv_node_lookup_found_chunks_total/own"] == 2
    assert now["lmkv_node_lookup_found_chunks_total/peers"] == 0
    assert now["lmkv_node_coordinators_connected"] == 0
    assert now["lmkv_node_tier_read_chunks_total/peers"] == 0
    assert now["process_resident_memory_bytes"] > 0


async def test_the_documentation_lists_every_metric_of_the_node(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "tiers" / "plugin")
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = {re.sub("_total$", "", name) for name in re.findall(r"`(lmkv_node_[a-z_]+)", page)}
    disk = {"local_disk": str(runtime_dir / "disk"), "max_local_disk_size": "16MB"}
    warm = {"persist_pool": True, "pool_path": str(runtime_dir / "pool")}
    remote = {"remote_url": "redis://127.0.0.1:1"}  # where no server listens
    plugin = {"tiers": [{"name": "example", "folder": str(runtime_dir / "example")}]}
    quotas = {"max_salt_size": "1MB", "max_salt_disk_size": "1MB", "max_salt_remote_size": "1MB"}
    async with Node(node_config(runtime_dir, **disk, **warm, **remote, **plugin, **quotas)) as node:
        families = {family.name for family in node.metrics.collect()}
    assert listed == families


def test_every_number_of_a_tier_is_a_metric() -> None:
    assert [field.name for field in fields(TierUsage)] == list(TIER_USAGES)
    assert {field.name for field in fields(TierStats)} == TIER_COUNTERS.keys() | TIER_GAUGES.keys()


async def test_a_node_without_peers_reports_nothing_about_them(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, enable_p2p=False)) as node:
        now = await scrape(node.metrics_port)
    assert "lmkv_node_chunks" in now
    assert not {name for name in now if name.startswith("lmkv_node_tier") or "grants" in name}


async def test_by_default_a_node_serves_no_metrics(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, metrics_port="off")) as node:
        assert node.metrics_port is None


async def test_a_port_in_use_is_refused_by_name(runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"metrics_port: cannot listen on 127.0.0.1:"):
            await Node(node_config(runtime_dir, metrics_port=taken.getsockname()[1])).__aenter__()


async def test_connections_that_send_nothing_take_no_place_from_others(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir)) as node, asyncio.timeout(WAIT_SECONDS):
        port = node.metrics_port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * MAX_CONCURRENT_REQUESTS)]
        assert "lmkv_node_chunks" in await scrape(port)
        assert await silent[0][0].read() == b"", "the oldest was closed"
        for _, writer in silent:
            writer.close()
