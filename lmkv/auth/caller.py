"""The caller of the RPC that a handler answers, its identity, and which roles may call which RPC.

`Authenticator` sets the caller in context variables. HTTP paths and pages map to RPCs, and use the same table of roles.
Fields of a request (`instance_id`, `epoch`) do not authenticate the caller: state that belongs to a caller is bound to
its identity instead, its token, else its client certificate.

The tokens file lists the callers that a server admits. It contains digests, not tokens: its readers gain no access:

    tokens:
      - {name: nodes-a, role: engine, tenant: team-a, sha256: 5e88…}     # of the token
      - {name: grafana, role: reader, file: /run/secrets/grafana, max_requests_per_second: 50}
    tenants:
      team-a: {max_instances: 16, max_chunks: 10000000}
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from lmkv.auth.credentials import read_secret
from lmkv.errors import ConfigError
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
    "lmkv.v1.EngineService/Audit": _NODES,
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
    """Returns `client_identity` of a caller over HTTP, whose address is `host`."""
    return _token_identity() or f"address:{client_of(host)}"


def _token_identity() -> str:
    caller = current_caller()
    return "" if caller is ANONYMOUS_CALLER else f"token:{caller.tenant}/{caller.name}"


def _host_of(peer: str) -> str:
    """The host in gRPC's `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; the kind for other peers (`unix:`)."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind.startswith("ip") else kind


KEY = "auth_tokens"
"""The configuration key that names the file."""
NAME_PATTERN = "^[A-Za-z0-9._-]{1,64}$"

_Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
_Limit = Annotated[int, msgspec.Meta(ge=1)]


class TenantQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant at a coordinator. 0: only the limits of the process apply."""

    max_instances: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_chunks: Annotated[int, msgspec.Meta(ge=0)] = 0


NO_QUOTA = TenantQuota()


class Callers:
    """All callers, by their tokens."""

    def __init__(self, callers: Sequence[Caller] = (), quotas: Mapping[str, TenantQuota] | None = None) -> None:
        self.quotas = dict(quotas or {})
        """Quotas by tenant."""
        # Looked up by a keyed digest, so that the duration of a lookup reveals nothing about a token.
        self._pepper = secrets.token_bytes(32)
        self._callers = {self._lookup_key(caller.digest): caller for caller in callers}

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants that a caller or a quota names."""
        return frozenset(caller.tenant for caller in self._callers.values()) | self.quotas.keys()

    def find(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode()).digest()
        caller = self._callers.get(self._lookup_key(digest))
        return caller if caller is not None and hmac.compare_digest(caller.digest, digest) else None

    def _lookup_key(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


class _TokenEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    role: Role
    tenant: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{0,64}$")] = ""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] = ""
    file: str = ""
    max_requests_per_second: _Limit | None = None
    max_concurrent_requests: _Limit | None = None


class _TokensFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[_TokenEntry]
    tenants: dict[_Name, TenantQuota] = {}


def read_callers(path: str) -> tuple[Callers, list[str]]:
    """The callers in a tokens file, and all files that it depends on. Raises `ConfigError`, which quotes no token."""
    import yaml  # slow to import, and most processes have no such file

    try:
        content = yaml.safe_load(Path(path).read_bytes())
        file = msgspec.convert(content, _TokensFile)
    except OSError as error:
        raise ConfigError(f"{KEY}: cannot read {path}: {error.strerror}", key=KEY) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{KEY}: {path} is not valid YAML{f', line {mark.line + 1}' if mark else ''}", key=KEY
        ) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: {path}: {error}", key=KEY) from None
    callers = [_caller(path, entry) for entry in file.tokens]
    if len({caller.digest for caller in callers}) < len(callers):
        raise ConfigError(f"{KEY}: {path} gives one token to two callers; give each its own", key=KEY)
    return Callers(callers, file.tenants), [path, *(entry.file for entry in file.tokens if entry.file)]


def _caller(path: str, entry: _TokenEntry) -> Caller:
    if bool(entry.sha256) == bool(entry.file):
        raise ConfigError(
            f"{KEY}: {path}: {entry.name} needs either sha256 (of its token, in hexadecimal) or file", key=KEY
        )
    if entry.file:
        digest = hashlib.sha256(read_secret(entry.file, f"{KEY}: {entry.name}: file").encode()).digest()
    else:
        digest = bytes.fromhex(entry.sha256)
    return Caller(
        name=entry.name,
        role=entry.role,
        tenant=entry.tenant,
        max_requests_per_second=entry.max_requests_per_second or 0,
        max_concurrent_requests=entry.max_concurrent_requests or 0,
        digest=digest,
    )
