"""What each role may call: the only such table. HTTP paths and pages stand for RPCs, and so for rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """What a token is for."""

    ENGINE = "engine"
    """Nodes, and the engines and proxies that ask for them."""
    OPERATOR = "operator"
    """Who acts on the fleet: people, and routers that move chunks."""
    READER = "reader"
    """Who looks: dashboards, Prometheus."""
    ADMIN = "admin"
    """Who may do all that the others may; without a tenant of its own, for any tenant that it names."""


_NODES = frozenset({Role.ENGINE, Role.ADMIN})
_OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
_READERS = frozenset({Role.READER, Role.OPERATOR, Role.ADMIN})
_ALL = frozenset(Role)

UNAUTHENTICATED_METHODS = frozenset(
    {"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "grpc.health.v1.Health/List"}
)
"""What probes call, without a token. It tells nothing but that somebody serves."""

ROLES: Mapping[str, frozenset[Role]] = {
    "lmkv.v1.CacheService/Lookup": _ALL,
    "lmkv.v1.CacheService/LookupStream": _ALL,
    "lmkv.v1.CacheService/Move": _OPERATORS,
    "lmkv.v1.CacheService/Pin": _OPERATORS,
    "lmkv.v1.CacheService/Unpin": _OPERATORS,
    "lmkv.v1.CacheService/ListPins": _READERS,
    "lmkv.v1.CacheService/Clear": _OPERATORS,
    "lmkv.v1.CacheService/Watch": _READERS,
    "lmkv.v1.RegistryService/Register": _NODES,
    "lmkv.v1.RegistryService/Report": _NODES,
    "lmkv.v1.RegistryService/Deregister": _NODES,
    "lmkv.v1.RegistryService/ListInstances": _READERS,
    "lmkv.v1.RegistryService/LocateInstance": _ALL,
    "lmkv.v1.PeerService/Init": _NODES,
    "lmkv.v1.PeerService/Acquire": _NODES,
    "lmkv.v1.PeerService/Allocate": _NODES,
    "lmkv.v1.PeerService/Commit": _NODES,
    "lmkv.v1.PeerService/Release": _NODES,
    # Served on a unix socket that only the node's own user can open; a gate that lets more in has yet to be built.
    "lmkv.v1.EngineService/Attach": _NODES,
    "lmkv.v1.EngineService/Lookup": _NODES,
    "lmkv.v1.EngineService/Load": _NODES,
    "lmkv.v1.EngineService/Lend": _NODES,
    "lmkv.v1.EngineService/Release": _NODES,
    "google.longrunning.Operations/GetOperation": _READERS,
    "google.longrunning.Operations/ListOperations": _READERS,
    "google.longrunning.Operations/WaitOperation": _READERS,
    "google.longrunning.Operations/CancelOperation": _OPERATORS,
    "google.longrunning.Operations/DeleteOperation": _OPERATORS,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}
"""Roles by `SERVICE/METHOD`. What is neither here nor in `UNAUTHENTICATED_METHODS` nobody may call."""
