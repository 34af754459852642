"""A tier of another package: installed, configured and used without a change to lmkv."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from lmkv import rpc
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.resolve import load as load_config
from lmkv.errors import ConfigError
from lmkv.tiers import HOST
from lmkv.units import format_bytes
from lmkv.v1 import registry_service_pb2_grpc
from lmkv.v1.registry_service_pb2 import ListInstancesRequest
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient, runs
from tests.server.node.whole_nodes import SPEC, load, store, until_free
from tests.support.encryption_keys import write_keys
from tests.waiting import WAIT_SECONDS, eventually

PACKAGE = Path(__file__).parent / "plugin"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package, installed."""
    monkeypatch.syspath_prepend(PACKAGE)


def config(folder: Path, instance_id: str, **more: object) -> NodeConfig:
    values: dict[str, object] = {
        "instance_id": instance_id,
        "runtime_dir": str(folder),
        "max_local_cpu_size": "16MB",
        "enable_p2p": False,
        "tiers": [{"name": "example", "folder": str(folder / "shared")}],
    }
    return NodeConfig(**(values | more))  # type: ignore[arg-type]


@pytest.mark.usefixtures("package")
async def test_what_host_memory_evicts_is_found_and_loaded_from_the_tier(runtime_dir: Path) -> None:
    async with Node(config(runtime_dir, "n")) as node, EngineClient(node) as engine:
        await store(engine, node.pool, 0, 1, 2, 3)
        (tier,) = node.stores
        await until(lambda: tier.stats().written_chunks == 4)
        evicting = [node.tier.reserve(SPEC.chunk_bytes) for _ in range(node.pool.size_bytes // SPEC.chunk_bytes)]
        assert len(node.tier) == 0, "all were evicted"
        for reserved in evicting:
            assert reserved
            node.tier.give_back(reserved.offset)
        found = await engine.lookup("1", chunk_keys(0, 1, 2, 3, 4))
        assert (len(found.own), runs(found)) == (0, {"example": 4})
        assert await load(engine, node.pool, "1", 0, 4) == [0, 1, 2, 3]
        await engine.release("1")
        assert tier.stats().read_chunks == 4
        metrics = generate_latest(node.metrics.registry).decode()
        assert 'lmkv_node_lookup_found_chunks_total{tier="example"} 4.0' in metrics
        assert 'lmkv_node_tier_read_chunks_total{tier="example"} 4.0' in metrics
        assert 'lmkv_node_tier_down_backends{tier="example"} 0.0' in metrics
        assert await until_free(node)


@pytest.mark.usefixtures("package")
async def test_the_tier_encrypts_with_the_nodes_keys(runtime_dir: Path) -> None:
    keys = {"encryption_key_file": write_keys(runtime_dir / "keys", "a")}
    async with Node(config(runtime_dir, "a", **keys)) as first, EngineClient(first) as engine:
        await store(engine, first.pool, 0, 1)
        (tier,) = first.stores
        await until(lambda: tier.stats().written_chunks == 2)
        clear = [bytes(first.pool.buffer[chunk.offset :][:64]) for chunk in first.tier]
    written = [path.read_bytes() for path in (runtime_dir / "shared").iterdir()]
    assert len(written) == 2
    assert not any(part in whole for part in clear for whole in written)
    async with Node(config(runtime_dir, "b", **keys)) as second, EngineClient(second) as engine:
        assert runs(await engine.lookup("1", chunk_keys(0, 1))) == {"example": 2}
        assert await load(engine, second.pool, "1", 0, 2) == [0, 1]
    async with Node(config(runtime_dir, "c")) as third, EngineClient(third) as engine:
        assert runs(await engine.lookup("1", chunk_keys(0, 1))) == {}


@pytest.mark.usefixtures("package")
async def test_another_node_finds_it_and_a_reset_removes_it(runtime_dir: Path) -> None:
    async with Node(config(runtime_dir, "a")) as first, EngineClient(first) as engine:
        await store(engine, first.pool, 0, 1)
        (tier,) = first.stores
        await until(lambda: tier.stats().written_chunks == 2)
    async with Node(config(runtime_dir, "b")) as second, EngineClient(second) as engine:
        assert runs(await engine.lookup("1", chunk_keys(0, 1))) == {"example": 2}
        await engine.release("1")
        await engine.say(reset=True)
        await until(lambda: not list((runtime_dir / "shared").iterdir()))


@pytest.mark.usefixtures("package")
async def test_the_fleet_sees_how_full_the_tier_is(runtime_dir: Path) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator:
        settings = config(runtime_dir, "n", coordinator_address=coordinator.address)
        async with Node(settings) as node, EngineClient(node) as engine:
            await store(engine, node.pool, 0, 1, 2)
            (tier,) = node.stores
            await until(lambda: tier.stats().written_chunks == 3)
            used_bytes = tier.stats().written_bytes
            async with rpc.open_channel(coordinator.address) as channel:
                registry: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)

                async def reported() -> list[tuple[str, int, int]]:
                    (instance,) = (await registry.ListInstances(ListInstancesRequest(), timeout=WAIT_SECONDS)).instances
                    return [(one.tier, one.used_bytes, one.chunk_count) for one in instance.tiers]

                host = (HOST, node.tier.used_bytes, 3)
                await eventually(reported, [host, ("example", used_bytes, 3)])
            async with httpx.AsyncClient(timeout=60) as http:
                metrics = (await http.get(f"{coordinator.url}/metrics")).text
            assert f'tier_used_bytes{{instance_id="n",tier="example"}} {float(used_bytes)}' in metrics
            assert 'lmkv_coordinator_chunks{instance_id="n",tier="host"} 3.0' in metrics
            assert 'lmkv_coordinator_chunks{instance_id="n",tier="example"}' not in metrics
            command = [sys.executable, "-m", "lmkv", "instances", "--coordinator", coordinator.address]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            shown, _ = await asyncio.wait_for(process.communicate(), 120)
            assert f"example {format_bytes(used_bytes)}" in shown.decode()
            cleared = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lmkv", "clear", "--all", "--yes", "--tier", "example"),
                *("--coordinator", coordinator.address),
            )
            assert await asyncio.wait_for(cleared.wait(), 120) == 0
            assert (list((runtime_dir / "shared").iterdir()), len(node.tier)) == ([], 3), "only the tier that is named"


@pytest.mark.usefixtures("package")
def test_tiers_are_configured_in_yaml_and_by_environment() -> None:
    written = '[{"name": "example", "folder": "/mnt", "size": 5}]'
    read = load_config(NodeConfig, env={"LMKV_TIERS": written})
    assert [dict(tier) for tier in read.tiers] == [{"name": "example", "folder": "/mnt", "size": "5"}]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        ([None], "must be a list of tiers"),
        ([{"name": "unknown"}], "which is no tier: installed packages offer example"),
        ([{"name": "example"}, {"name": "example"}], "must not name a tier twice"),
        ([{"folder": "/mnt"}], "must be a list of tiers"),
        ("example", "must be a list of tiers"),
    ],
)
def test_what_is_no_list_of_tiers_is_refused(tiers: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NodeConfig(tiers=tiers)  # type: ignore[arg-type]


@pytest.mark.usefixtures("package")
async def test_a_tier_refuses_its_own_options(runtime_dir: Path) -> None:
    with pytest.raises(ConfigError, match="example needs folder"):
        await Node(config(runtime_dir, "n", tiers=[{"name": "example"}])).__aenter__()
