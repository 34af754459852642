"""Metrics of several tenants: each sees its own, and the operator sees all."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.guarded import guarded, token_of

HELD = 'lmkv_coordinator_chunks{{instance_id="n1"{tenant},tier="host"}} {count}'


async def test_each_tenant_reads_its_own_and_all_are_exported_by_their_names(tmp_path: Path) -> None:
    async with guarded(tmp_path) as fleet:
        for tenant, keys in (("", KEYS[:1]), ("a", KEYS[:2]), ("b", KEYS)):
            await fleet.instance(tenant, "n1", keys)
        for tenant, count in (("", 1), ("a", 2), ("b", 3)):
            async with fleet.http(token_of("reader", tenant)) as http:
                lines = (await http.get("/metrics")).text.splitlines()
            assert [line for line in lines if line.startswith("lmkv_coordinator_chunks{")] == [
                HELD.format(tenant="", count=f"{count}.0")
            ]
        exported = generate_latest(fleet.coordinator.metrics).decode().splitlines()
        assert {line for line in exported if line.startswith("lmkv_coordinator_chunks{")} == {
            HELD.format(tenant="", count="1.0"),
            HELD.format(tenant=',tenant="a"', count="2.0"),
            HELD.format(tenant=',tenant="b"', count="3.0"),
        }
        for name in ("lmkv_coordinator_chunks", "process_open_fds", "rpc_server_call_duration_seconds"):
            assert sum(line.startswith(f"# TYPE {name} ") for line in exported) == 1
        assert sum(line.startswith("process_open_fds") for line in exported) == 1
