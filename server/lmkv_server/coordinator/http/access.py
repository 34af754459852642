"""The RPC that each path corresponds to. A path needs the role of that RPC, from the table in `lmkv.auth.caller`."""

from __future__ import annotations

from collections.abc import Mapping

from lmkv.auth.caller import ROLES
from lmkv_server.http.guard import VIEW_RPC

_PROBE = "grpc.health.v1.Health/Check"
_LOOKUP = "lmkv.v1.CacheService/Lookup"

RPC_BY_PATH: Mapping[str, str] = {
    "/healthz": _PROBE,
    "/readyz": _PROBE,
    "/grpc_port": _PROBE,
    "/lookup": _LOOKUP,
    "/tokenize": _LOOKUP,
    "/tokenizers": _LOOKUP,
    "/move": "lmkv.v1.CacheService/Move",
    "/clear": "lmkv.v1.CacheService/Clear",
    "/pin": "lmkv.v1.CacheService/Pin",
    "/unpin": "lmkv.v1.CacheService/Unpin",
    "/check_finish": "google.longrunning.Operations/GetOperation",
    "/health": VIEW_RPC,
    "/query_instance": VIEW_RPC,
    "/query_worker_info": VIEW_RPC,
    "/history": VIEW_RPC,
    "/metrics": VIEW_RPC,
    "/openapi.json": VIEW_RPC,
    "/": VIEW_RPC,
    "/docs": VIEW_RPC,
}
"""By path. RPCs have their own paths."""


def rpc_of(path: str) -> str:
    """The RPC that a path corresponds to; static files and unknown paths need the role of `LOOK`."""
    return RPC_BY_PATH.get(path) or (path[1:] if path[1:] in ROLES else VIEW_RPC)
