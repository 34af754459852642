"""The authenticated identity of the caller of an RPC: its token, else its client certificate.

Fields of a request (`instance_id`, `epoch`) do not authenticate the caller. State that belongs to a caller is bound to
this identity instead.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from lmkv.auth.caller import ANONYMOUS_CALLER, current_caller
from lmkv.runtime.places import client_of

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
