"""The table of roles, held against what the protos say there is to call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.longrunning import operations_pb2
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from lmkv.auth.roles import CLIENT_RPC, ENGINES_RPC, ROLES, UNAUTHENTICATED_METHODS, Role
from lmkv.ext_proc import external_processor_pb2
from lmkv.internal.v1 import lookup_service_pb2, report_service_pb2
from lmkv.v1 import cache_service_pb2, engine_service_pb2, peer_service_pb2, registry_service_pb2
from lmkv_server.coordinator.http.access import rpc_of
from lmkv_server.http.access import VIEW_RPC

SERVED = (
    cache_service_pb2,
    registry_service_pb2,
    lookup_service_pb2,
    report_service_pb2,
    peer_service_pb2,
    engine_service_pb2,
    operations_pb2,
)
PICKER = external_processor_pb2


def methods(file: FileDescriptor) -> set[str]:
    return {
        f"{service.full_name}/{method.name}" for service in file.services_by_name.values() for method in service.methods
    }


def test_every_rpc_is_in_the_table_and_nothing_else() -> None:
    served = set().union(
        *(methods(module.DESCRIPTOR) for module in (*SERVED, PICKER)), methods(reflection_pb2.DESCRIPTOR)
    )
    assert served | {CLIENT_RPC, ENGINES_RPC} == ROLES.keys()


def test_only_probes_need_no_token() -> None:
    assert methods(health_pb2.DESCRIPTOR) == UNAUTHENTICATED_METHODS
    assert not UNAUTHENTICATED_METHODS & ROLES.keys()


def test_an_admin_may_call_everything_and_every_rpc_is_somebodys() -> None:
    assert all(Role.ADMIN in roles for roles in ROLES.values())


@pytest.mark.parametrize("act", ["Move", "Pin", "Unpin", "Hint", "Clear", "Drain"])
def test_who_only_looks_and_who_only_stores_may_not_act_on_the_fleet(act: str) -> None:
    assert ROLES[f"lmkv.v1.CacheService/{act}"] == {Role.OPERATOR, Role.ADMIN}


def test_clients_of_a_proxy_may_call_nothing_else() -> None:
    assert {rpc for rpc, roles in ROLES.items() if Role.CLIENT in roles} == {CLIENT_RPC}


def test_memory_is_described_to_nodes_only() -> None:
    assert ROLES["lmkv.v1.PeerService/Init"] == {Role.ENGINE, Role.ADMIN}


def test_the_table_in_the_documentation_is_this_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text()
    rows = dict(re.findall(r"^\| `(engine|reader|operator|client|admin)` \| [^|]*\| ([^|]*)\|$", page, re.MULTILINE))
    assert rows.keys() == set(Role)
    named = {
        role: {rpc for rpc in ROLES for name in re.findall(r"`([^`]+)`", row) if stands_for(name, rpc)}
        for role, row in rows.items()
    }
    named["operator"] |= named["reader"]
    named["admin"] = set(ROLES)
    assert named == {role: {rpc for rpc, roles in ROLES.items() if role in roles} for role in Role}


def stands_for(name: str, rpc: str) -> bool:
    """Whether `SERVICE/METHOD` or `SERVICE/*`, without the package, is an RPC, or one of the service."""
    short = rpc.rpartition(".")[2]
    return short == name or (name.endswith("/*") and short.startswith(name[:-1]))


def test_engines_neither_list_instances_nor_read_metrics() -> None:
    assert ROLES["lmkv.v1.RegistryService/ListInstances"] == {Role.READER, Role.OPERATOR, Role.ADMIN}
    assert rpc_of("/metrics") == VIEW_RPC == "lmkv.v1.RegistryService/ListInstances"
