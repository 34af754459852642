"""Authenticates and authorizes every call of a server, over gRPC and HTTP, and warns of ports that others reach."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from lmkv.auth.caller import (
    ANONYMOUS_CALLER,
    KEY,
    NO_QUOTA,
    ROLES,
    UNAUTHENTICATED_METHODS,
    Caller,
    Callers,
    Role,
    TenantQuota,
    caller_context,
    read_callers,
)
from lmkv.auth.credentials import HEADER, BearerToken, Credentials, token_in
from lmkv.auth.token_bucket import TokenBucket
from lmkv.errors import ConfigError, PermissionDenied, Unauthenticated
from lmkv.runtime.reload import Reloadable
from lmkv.telemetry.logs import LimitedLogger

logger = logging.getLogger(__name__)

TENANT_HEADER = "lmkv-tenant"
"""Header in which an admin without a tenant of its own names the tenant that it acts for."""

Metadata = Iterable[tuple[str, str | bytes]]


class Authenticator:
    """Admits callers that the tokens file lists, to the RPCs of their role. Without a file it admits every caller.

    With `own`, this process's own token, it admits only callers of the same tenant. Raises `ConfigError` if the file
    is invalid, or does not list the own token.
    """

    def __init__(self, path: str = "", own: BearerToken | None = None) -> None:
        self._files = [path] if path else []
        self._callers = Reloadable(lambda: self._files, self._read) if path else None
        self._buckets: dict[str, TokenBucket] = {}
        self._own = own
        self._log = LimitedLogger(logger)
        if self._callers and own is not None:
            self._own_tenant()

    @property
    def is_open(self) -> bool:
        """Whether every caller is admitted."""
        return self._callers is None

    @property
    def callers(self) -> Callers:
        """The callers that the tokens file lists now."""
        return self._callers.get() if self._callers else _NO_CALLERS

    def quota(self, tenant: str) -> TenantQuota:
        return self.callers.quotas.get(tenant, NO_QUOTA)

    @property
    def own_tenant(self) -> str:
        """The tenant of this process's own token; empty if there is no tokens file, or `own` was not given.

        Raises `ConfigError` if the file does not list the token any more.
        """
        return self._own_tenant() if self._callers and self._own is not None else ""

    @contextmanager
    def authorized_call(self, method: str, metadata: Metadata | None) -> Iterator[Caller]:
        """The scope of one call of `SERVICE/METHOD`: inside, `current_caller` returns its caller.

        Raises as `authenticate` does, and `TooManyRequests` if the caller exceeds its limits.
        """
        known = self.callers  # read before the call is admitted, so that a later change of the file is noticed
        caller = self.authenticate(method, metadata)
        if caller is ANONYMOUS_CALLER:
            yield caller
            return
        bucket = self._bucket(caller)
        bucket.acquire(time.monotonic())
        headers = dict(metadata or ())

        def check() -> None:
            nonlocal known
            if (now := self.callers) is not known:
                self._check_again(caller, method, headers)
                known = now

        try:
            with caller_context(caller, check, lambda: bucket.take(time.monotonic())):
                yield caller
        finally:
            bucket.release()

    def authenticate(self, method: str, metadata: Metadata | None) -> Caller:
        """The caller. Raises `Unauthenticated` or `PermissionDenied`; messages name the fix and never the token."""
        if self._callers is None or method in UNAUTHENTICATED_METHODS:
            return ANONYMOUS_CALLER
        try:
            return self._authenticate(method, dict(metadata or ()))
        except Unauthenticated as error:
            self._log.warning("refused %s: %s", method, error)
            raise
        except PermissionDenied as error:
            self._log.warning("denied %s: %s", method, error)
            raise

    def _check_again(self, caller: Caller, method: str, headers: dict[str, str | bytes]) -> None:
        """Raises `Unauthenticated` if an admitted call would now be refused, or get another role or tenant."""
        try:
            unchanged = self._authenticate(method, headers) == caller
        except (Unauthenticated, PermissionDenied):
            unchanged = False
        if not unchanged:
            raise Unauthenticated("the token was removed, or its role or tenant was changed; call again")

    def _authenticate(self, method: str, headers: dict[str, str | bytes]) -> Caller:
        token = token_in(str(headers.get(HEADER, "")))
        if not token:
            raise Unauthenticated("the call has no token; set auth_token or auth_token_file at the client")
        caller = self.callers.find(token)
        if caller is None:
            raise Unauthenticated(f"the token is unknown; list its SHA-256 in the file of {KEY}, or use another token")
        allowed = ROLES.get(method, frozenset())
        if caller.role not in allowed:
            who = " or ".join(sorted(allowed)) or "no role"
            raise PermissionDenied(
                f"{caller.name} is {caller.role}, and {method} is open to {who}; use a token of such a role",
                caller=caller.name,
                role=caller.role,
                method=method,
            )
        return self._for_tenant(caller, str(headers.get(TENANT_HEADER, "")))

    def _for_tenant(self, caller: Caller, wish: str) -> Caller:
        """The caller with the tenant that it acts for. Raises `PermissionDenied` if it may not act for `wish`."""
        if wish and caller.role is Role.ADMIN and not caller.tenant and wish in self.callers.tenants:
            caller = replace(caller, tenant=wish)
        elif wish not in ("", caller.tenant):
            raise PermissionDenied(
                f"{caller.name} may not act for tenant {wish}; remove the header {TENANT_HEADER}", caller=caller.name
            )
        if self._own is not None and caller.tenant != self._own_tenant():
            raise PermissionDenied(
                f"{caller.name} belongs to another tenant than this node; a node serves only its own tenant",
                caller=caller.name,
            )
        return caller

    def _bucket(self, caller: Caller) -> TokenBucket:
        """The rate limit that all tokens of one name share."""
        per_second, concurrent = caller.max_requests_per_second, caller.max_concurrent_requests
        bucket = self._buckets.get(caller.name)
        if bucket is None or not bucket.has_limits(per_second, concurrent):
            bucket = self._buckets[caller.name] = TokenBucket(per_second, concurrent, time.monotonic())
        return bucket

    def _own_tenant(self) -> str:
        assert self._own is not None
        token = token_in(dict(self._own.headers()).get(HEADER, ""))
        caller = self.callers.find(token) if token else None
        if caller is None:
            raise ConfigError(
                f"{KEY} is set, but its file does not list this process's own token; set auth_token or "
                "auth_token_file to a token that it lists",
                key="auth_token",
            )
        return caller.tenant

    def _read(self) -> Callers:
        callers, self._files = read_callers(self._files[0])
        return callers


_NO_CALLERS = Callers()
OPEN_AUTHENTICATOR = Authenticator()


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def exposure(host: str, authenticator: Authenticator, credentials: Credentials) -> str:
    """A warning for the log about a server at `host`; empty if there is none. Client certificates authenticate, too."""
    if is_loopback(host):
        return ""
    if authenticator.is_open and not credentials.client_ca:
        return f"any client that reaches {host} may call it: set auth_tokens or tls_client_ca, or bind 127.0.0.1"
    if not (authenticator.is_open or credentials.cert):
        return f"tokens are sent to {host} unencrypted: set tls_cert and tls_key"
    return ""
