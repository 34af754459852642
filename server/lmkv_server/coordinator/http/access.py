"""Which RPC each path stands for. Who may ask for a path is who may call that: `lmkv.auth.roles` has the only table."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from lmkv.auth.authenticator import TENANT_HEADER
from lmkv.auth.roles import ROLES
from lmkv.auth.token import HEADER

_PROBE = "grpc.health.v1.Health/Check"
LOOK = "lmkv.v1.RegistryService/ListInstances"
_LOOKUP = "lmkv.v1.CacheService/Lookup"

STANDS_FOR: Mapping[str, str] = {
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
    "/health": LOOK,
    "/query_instance": LOOK,
    "/query_worker_info": LOOK,
    "/metrics": LOOK,
    "/openapi.json": LOOK,
    "/": LOOK,
    "/docs": LOOK,
}
"""By path; RPCs have paths of their own."""
CHALLENGE = {"WWW-Authenticate": 'Basic realm="lmkv: any name, and a token as the password"'}
"""Has a browser ask for a token. It names no other scheme: browsers read only one a line."""


def rpc_of(path: str) -> str:
    """The RPC that a path stands for. Who may look may also see what pages are made of, and that a path is unknown."""
    return STANDS_FOR.get(path) or (path[1:] if path[1:] in ROLES else LOOK)


def shown(request: Request) -> list[tuple[str, str]]:
    """What a request says of who makes it, as gRPC's metadata would."""
    return [(name, request.headers[name]) for name in (HEADER, TENANT_HEADER) if name in request.headers]
