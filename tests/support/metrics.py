"""A server of `/metrics` with one number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Gauge

from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.server import HttpOptions, HttpServer, make_metrics_app

SAMPLE = "answer 42.0"


@asynccontextmanager
async def serving_metrics(
    credentials: Credentials = PLAINTEXT,
    authenticator: Authenticator = OPEN_AUTHENTICATOR,
    allowed_hosts: Sequence[str] = (),
    documentation: str = "The number.",
) -> AsyncIterator[HttpServer]:
    """Serves `SAMPLE`."""
    registry = CollectorRegistry()
    Gauge("answer", documentation, registry=registry).set(42)
    guard = HostGuard(bound="127.0.0.1", allowed=allowed_hosts)
    app = make_metrics_app(registry, authenticator, guard)
    server = HttpServer(
        app,
        HttpOptions(host="127.0.0.1", port=0, key="metrics_port", credentials=credentials, probes=frozenset()),
    )
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()
