"""Whether a port lets in more than it should, in a sentence for the log."""

from __future__ import annotations

import ipaddress

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import Credentials


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is this machine's for itself."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def exposure(host: str, authenticator: Authenticator, credentials: Credentials) -> str:
    """What whoever binds `host` should know; empty if nothing is amiss. Who comes with a certificate is known, too."""
    if is_loopback(host):
        return ""
    if authenticator.is_open and not credentials.client_ca:
        return f"whoever reaches {host} may call it: set auth_tokens, or tls_client_ca, or bind 127.0.0.1"
    if not (authenticator.is_open or credentials.cert):
        return f"tokens reach {host} in the clear: set tls_cert and tls_key"
    return ""
