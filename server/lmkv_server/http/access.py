"""Which credentials an HTTP request carries, and how a client is asked for them."""

from __future__ import annotations

from starlette.requests import Request

from lmkv.auth.authenticator import TENANT_HEADER
from lmkv.auth.token import HEADER

VIEW_RPC = "lmkv.v1.RegistryService/ListInstances"
"""The RPC whose permission also covers pages and metrics."""
CHALLENGE = {"WWW-Authenticate": 'Basic realm="lmkv: any name, and a token as the password"'}
"""Makes a browser ask for a token. It names no other scheme: browsers read only one per line."""


def credentials_of(request: Request) -> list[tuple[str, str]]:
    """The headers that authenticate a request, as gRPC metadata carries them."""
    return [(name, request.headers[name]) for name in (HEADER, TENANT_HEADER) if name in request.headers]
