"""Warnings about ports that are reachable without authentication or encryption."""

from __future__ import annotations

import ipaddress

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import Credentials


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
