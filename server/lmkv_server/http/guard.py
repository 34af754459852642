"""Refuses requests that a web page of another site has a browser send, and reads the credentials of others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from lmkv.auth.authenticator import TENANT_HEADER, is_loopback
from lmkv.auth.token import HEADER


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGuard:
    """Knows by which names a server is called.

    A page of another site has another origin. Where its owner lets its own name resolve to this machine (DNS
    rebinding), origin and host agree, but the name is not one of the server's.
    """

    bound: str
    """Address or name that the server is bound to."""
    allowed: Sequence[str] = ()
    """Names from `allowed_hosts`. Without any, a server that is not bound to loopback accepts every name."""

    def refusal(self, host: str, origin: str | None) -> str:
        """Why a request with these headers is refused; empty if it is not."""
        try:
            if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
                return f"pages of {origin} may not call this server"
        except ValueError:
            return "the Origin header is not an origin"
        name = host_name(host)
        if self._knows(name):
            return ""
        return f"this server is not called {name}; use its address, or add the name to allowed_hosts"

    def _knows(self, name: str) -> bool:
        if name in ("", "localhost", self.bound.strip("[]").lower()) or _is_address(name):
            return True  # no name that the owner of another site could point here
        if not self.allowed:
            return not is_loopback(self.bound)
        return any(_matches(name, pattern) for pattern in self.allowed)


def host_name(authority: str) -> str:
    """The host in `host:port`, in lower case, without the brackets of an IPv6 address and a final dot."""
    name = authority[: authority.rfind("]") + 1] if authority.startswith("[") else authority.partition(":")[0]
    return name.strip("[]").lower().removesuffix(".")


def _matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern, or is below `*.DOMAIN`."""
    return pattern == "*" or name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


VIEW_RPC = "lmkv.v1.RegistryService/ListInstances"
"""The RPC whose permission also covers pages and metrics."""
CHALLENGE = {"WWW-Authenticate": 'Basic realm="lmkv: any name, and a token as the password"'}
"""Makes a browser ask for a token. It names no other scheme: browsers read only one per line."""


def credentials_of(request: Request) -> list[tuple[str, str]]:
    """The headers that authenticate a request, as gRPC metadata carries them."""
    return [(name, request.headers[name]) for name in (HEADER, TENANT_HEADER) if name in request.headers]
