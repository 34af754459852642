"""Runs uvicorn as a server in the event loop of the process, with connection limits and a bounded shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import grpc
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.errors import ConfigError, PermissionDenied, Unauthenticated
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.http.guard import CHALLENGE, VIEW_RPC, HostGuard, credentials_of
from lmkv_server.http.protocol import BoundedProtocol, ConnectionLimiter, RequestLimiter


def metrics_response(registry: CollectorRegistry) -> Response:
    """The metrics of a registry in Prometheus's text format."""
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_metrics_app(registry: CollectorRegistry, authenticator: Authenticator, guard: HostGuard) -> Starlette:
    """Serves the metrics of a registry, and no other path, to clients that have the permission for `VIEW_RPC`."""

    async def show(request: Request) -> Response:
        if refusal := guard.refusal(request.headers.get("host", ""), request.headers.get("origin")):
            return _text(403, refusal)
        try:
            authenticator.authenticate(VIEW_RPC, credentials_of(request))
        except Unauthenticated as error:
            return _text(401, str(error), CHALLENGE)
        except PermissionDenied as error:
            return _text(403, str(error))
        return metrics_response(registry)

    async def no_path(_request: Request, _error: Exception) -> Response:
        return _text(404, "only /metrics is served")

    async def no_method(_request: Request, _error: Exception) -> Response:
        return _text(405, "use GET", {"Allow": "GET, HEAD"})

    return Starlette(routes=[Route("/metrics", show)], exception_handlers={404: no_path, 405: no_method})


def _text(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{message}\n", status, headers)


def address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listen(host: str, port: int, key: str, host_key: str = "host") -> socket.socket:
    """Opens a listening socket; port 0 selects a free port.

    Raises `ConfigError` that names the configuration key that set the port or the host, and the fix.
    """
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is unknown ({error.strerror}); set {host_key}", key=host_key) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _refusal(error, host, port, key, host_key) from None
    return listener


def bind_grpc(server: grpc.aio.Server, host: str, port: int, key: str, credentials: Credentials) -> int:
    """Binds one port of a gRPC server and returns it. Raises `ConfigError` that names the key and the fix."""
    listen(host, port, key).close()  # raises the reason, which gRPC only logs
    try:
        return rpc.add_port(server, address(host, port), credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{key} {port} on {host} cannot be bound ({error}); set {key} to a free port", key=key
        ) from None


def _refusal(error: OSError, host: str, port: int, key: str, host_key: str) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"host {host} is not an address of this machine; set {host_key}", key=host_key)
    if error.errno == errno.EADDRINUSE:
        fix = f"{key} {port} on {host} is in use; set {key} to a free port, or stop the process that uses it"
    else:
        fix = f"{key} {port} on {host} cannot be used ({error.strerror}); set {key} to another port"
    return ConfigError(fix, key=key)


MAX_CONCURRENT_REQUESTS = 1_000
"""Requests, and connections, of a server; see `ConnectionLimiter`."""
MAX_CONNECTIONS_PER_CLIENT = 500
HANDSHAKE_SECONDS = 10.0
"""Deadline of a TLS handshake; asyncio's default is one minute."""
PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that are answered at any time."""
KEEP_ALIVE_SECONDS = 30
STOP_GRACE_SECONDS = 0.1
"""Default time for requests in flight to complete when the server stops."""
ENDLESS: WeakSet[asyncio.Task[Any]] = WeakSet()
"""Tasks of requests that stream without an end: a server that stops does not wait for them."""

logging.getLogger("uvicorn").setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The address, port and limits of a server."""

    host: str
    port: int
    """0 selects a free port."""
    key: str = "port"
    """The configuration key that sets the port, for errors."""
    host_key: str = "host"
    credentials: Credentials = PLAINTEXT
    """The server serves HTTPS if these have a certificate."""
    name: str = "lmkv-http"
    """Name of the server's task."""
    max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS
    max_connections_per_client: int = MAX_CONNECTIONS_PER_CLIENT
    probes: frozenset[str] = PROBES
    """Paths that no limit applies to."""
    grace_seconds: float = STOP_GRACE_SECONDS


class HttpServer:
    """Serves an application on one port from `start` to `aclose`. The constructor binds the port.

    Raises `ConfigError` if the port cannot be bound.
    """

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._name = options.name
        self._listener = listen(options.host, options.port, options.key, options.host_key)
        self.port: int = self._listener.getsockname()[1]
        limit = options.max_concurrent_requests
        limiter = ConnectionLimiter(limit, min(options.max_connections_per_client, limit))
        log = LimitedLogger(logging.getLogger("uvicorn.error"))
        config = uvicorn.Config(
            RequestLimiter(app, limiter, options.probes, log),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.http_protocol_class = partial(BoundedProtocol, limiter, log)  # type: ignore[assignment]
        config.ssl = options.credentials.server_context() if options.credentials.cert else None
        self._server = _Server(config, options.grace_seconds)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to serve. Raises the error with which uvicorn failed to start."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name=self._name)
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.ready.is_set():
            ready.cancel()
            self._task.result()

    async def aclose(self) -> None:
        """Stops serving and closes open streams. Idempotent."""
        self._server.should_exit = True
        task, self._task = self._task, None
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, since the process has its own, and with an event that is set once it serves."""

    def __init__(self, config: uvicorn.Config, grace_seconds: float) -> None:
        super().__init__(config)
        self._grace_seconds = grace_seconds
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, loop = self.config, asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            make: Any = config.http_protocol_class
            made: asyncio.Protocol = make(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            return made

        # As in uvicorn, except for the deadline of TLS handshakes.
        seconds = HANDSHAKE_SECONDS if config.ssl else None
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=seconds
            )
            for sock in sockets or ()
        ]
        self.started = True
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # immediately if it is idle, else after its response
        if tasks := self.server_state.tasks - set(ENDLESS):
            await asyncio.wait(tasks, timeout=self._grace_seconds)
        for connection in list(self.server_state.connections):  # to a stream this looks like a client that disconnects
            connection.transport.close()
        await super().shutdown(sockets)
