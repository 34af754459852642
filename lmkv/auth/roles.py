"""Which roles may call which RPC. HTTP paths and pages map to RPCs, and use the same table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """The role of a token."""

    ENGINE = "engine"
    """Nodes, engines and proxies."""
    OPERATOR = "operator"
    """People who operate the fleet, and routers that move chunks."""
    READER = "reader"
    """Read-only access: dashboards, Prometheus."""
    CLIENT = "client"
    """Prompts through a proxy or picker with a `cache_salt_policy`; nothing else."""
    ADMIN = "admin"
    """Everything that the other roles may do; without a tenant of its own, for any tenant that it names."""


_NODES = frozenset({Role.ENGINE, Role.ADMIN})
_OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
_READERS = frozenset({Role.READER, Role.OPERATOR, Role.ADMIN})
_CLIENTS = frozenset({Role.CLIENT, Role.ADMIN})
_ALL = frozenset(Role) - {Role.CLIENT}

CLIENT_RPC = "lmkv.proxy.OpenAI/Request"
"""Stands for all requests to engines, which are HTTP."""

ENGINES_RPC = "lmkv.proxy.Engines/Change"
"""Stands for adding, draining and removing engines at a proxy, which is HTTP."""

UNAUTHENTICATED_METHODS = frozenset(
    {"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "grpc.health.v1.Health/List"}
)
"""RPCs that health probes call without a token."""

ROLES: Mapping[str, frozenset[Role]] = {
    "lmkv.v1.CacheService/Lookup": _ALL,
    "lmkv.v1.CacheService/LookupStream": _ALL,
    "lmkv.v1.CacheService/Explain": _READERS,
    "lmkv.v1.CacheService/Move": _OPERATORS,
    "lmkv.v1.CacheService/Pin": _OPERATORS,
    "lmkv.v1.CacheService/Unpin": _OPERATORS,
    "lmkv.v1.CacheService/ListPins": _READERS,
    "lmkv.v1.CacheService/Hint": _OPERATORS,
    "lmkv.v1.CacheService/Clear": _OPERATORS,
    "lmkv.v1.CacheService/Drain": _OPERATORS,
    "lmkv.v1.CacheService/Watch": _READERS,
    "lmkv.v1.RegistryService/Register": _NODES,
    "lmkv.v1.RegistryService/Deregister": _NODES,
    "lmkv.v1.RegistryService/ListInstances": _READERS,
    "lmkv.v1.RegistryService/LocateInstance": _ALL,
    "lmkv.internal.v1.ReportService/Report": _NODES,
    "lmkv.internal.v1.LookupService/Lookup": _NODES,
    "lmkv.internal.v1.LookupService/LookupStream": _NODES,
    "lmkv.v1.PeerService/Init": _NODES,
    "lmkv.v1.PeerService/Acquire": _NODES,
    "lmkv.v1.PeerService/Allocate": _NODES,
    "lmkv.v1.PeerService/Commit": _NODES,
    "lmkv.v1.PeerService/Release": _NODES,
    # Served on a unix socket that only the node's own user can open.
    "lmkv.v1.EngineService/Attach": _NODES,
    "lmkv.v1.EngineService/Lookup": _NODES,
    "lmkv.v1.EngineService/Load": _NODES,
    "lmkv.v1.EngineService/Lend": _NODES,
    "lmkv.v1.EngineService/Release": _NODES,
    # Of the endpoint picker; a gateway calls it for each request.
    "envoy.service.ext_proc.v3.ExternalProcessor/Process": _ALL,
    CLIENT_RPC: _CLIENTS,
    ENGINES_RPC: _OPERATORS,
    "google.longrunning.Operations/GetOperation": _READERS,
    "google.longrunning.Operations/ListOperations": _READERS,
    "google.longrunning.Operations/WaitOperation": _READERS,
    "google.longrunning.Operations/CancelOperation": _OPERATORS,
    "google.longrunning.Operations/DeleteOperation": _OPERATORS,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}
"""Roles by `SERVICE/METHOD`. A method that is neither here nor in `UNAUTHENTICATED_METHODS` is denied to all."""
