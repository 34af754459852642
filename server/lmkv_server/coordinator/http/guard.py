"""Keeps web pages of others away from a coordinator that a browser can reach."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from lmkv.auth.exposure import is_loopback
from lmkv_server.coordinator.http.replies import HttpError


def refuse_foreign(request: Request, host: str) -> None:
    """Raises `HttpError` 403 if a browser sends the request on behalf of a page that is not the coordinator's own.

    `host` is what the coordinator is bound to. A page from elsewhere has another origin; and if its owner let its name
    point to this machine, the name gives it away: one that is bound to this machine alone is called by its address.
    """
    origin = request.headers.get("origin")
    called = request.headers.get("host", "")
    if origin is not None and urlsplit(origin).netloc.lower() != called.lower():
        raise HttpError(403, "PERMISSION_DENIED", f"pages of {origin} may not call this coordinator")
    name = _name(called)
    if is_loopback(host) and not (_is_address(name) or name in ("", "localhost", host.strip("[]").lower())):
        raise HttpError(
            403, "PERMISSION_DENIED", f"this coordinator is not called {name}; use its address, or set host"
        )


def _name(authority: str) -> str:
    """The host in `host:port`, without the brackets of an IPv6 address."""
    name = authority[: authority.rfind("]") + 1] if authority.startswith("[") else authority.partition(":")[0]
    return name.strip("[]").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
