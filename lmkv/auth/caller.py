"""The caller of the RPC that a handler answers, its identity, and which roles may call which RPC.

`Authenticator` sets the caller in context variables. HTTP paths and pages map to RPCs, and use the same table of roles.
Fields of a request (`instance_id`, `epoch`) do not authenticate the caller: state that belongs to a caller is bound to
its identity instead, its token, else its client certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from lmkv.runtime.places import client_of


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An authenticated caller."""

    name: str
    """Its name in logs. Two tokens may share a name while one replaces the other."""
    role: Role
    tenant: str = ""
    """The tenant whose chunks it sees; empty: the unnamed tenant."""
    max_requests_per_second: int = 0
    """0: unlimited."""
    max_concurrent_requests: int = 0
    """Including streams; 0: unlimited."""
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of its token."""


ANONYMOUS_CALLER = Caller(name="anonymous", role=Role.ADMIN)
"""The caller where no tokens are configured, and of health probes."""

_current: ContextVar[Caller] = ContextVar("lmkv_caller", default=ANONYMOUS_CALLER)
_check: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_check", default=lambda: None)
_count: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_ask", default=lambda: None)


def current_caller() -> Caller:
    """The caller of the RPC that is being answered."""
    return _current.get()


def check_caller() -> None:
    """Checks the caller again, for each message of a stream. Raises `Unauthenticated` if it is no longer admitted."""
    _check.get()()


def count_request() -> None:
    """Counts one request of a stream. Raises `TooManyRequests` if the caller exceeds its rate limit."""
    _count.get()()


@contextmanager
def caller_context(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> Iterator[None]:
    """Inside, `current_caller` returns `caller`, `check_caller` calls `check` and `count_request` calls `count`."""
    before = _current.get(), _check.get(), _count.get()
    _set(caller, check, count)
    try:
        yield
    finally:
        _set(*before)  # not `reset`: an aborted stream may be closed in another context


def _set(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> None:
    _current.set(caller)
    _check.set(check)
    _count.set(count)


ANONYMOUS = ""
"""The identity of every caller where neither tokens nor client certificates are configured."""


def caller_identity(context: Any) -> str:
    """The identity of the caller of the RPC that a handler answers; `context` is the handler's gRPC context.

    `token:TENANT/NAME` for a caller with a token, `certificate:NAMES` for one with a client certificate (its subject
    alternative names, else its common name), `ANONYMOUS` for one with neither. It does not change when a token or a
    certificate is replaced by another of the same name.
    """
    if token := _token_identity():
        return token
    properties = context.auth_context()
    names = properties.get("x509_subject_alternative_name") or properties.get("x509_common_name") or ()
    return f"certificate:{','.join(sorted(name.decode(errors='replace') for name in names))}" if names else ANONYMOUS


def client_identity(context: Any) -> str:
    """The identity for limits per client: the caller's, or `address:HOST` for an anonymous caller."""
    return caller_identity(context) or f"address:{client_of(_host_of(context.peer()))}"


def http_client_identity(host: str) -> str:
    """As `client_identity`, of a caller over HTTP, whose address is `host`."""
    return _token_identity() or f"address:{client_of(host)}"


def _token_identity() -> str:
    caller = current_caller()
    return "" if caller is ANONYMOUS_CALLER else f"token:{caller.tenant}/{caller.name}"


def _host_of(peer: str) -> str:
    """The host in gRPC's `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; the kind for other peers (`unix:`)."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind.startswith("ip") else kind
