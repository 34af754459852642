"""Runs uvicorn as a server in the event loop of the process, with connection limits and a bounded shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import uvicorn
from starlette.types import ASGIApp

from lmkv.auth.credentials import Credentials
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv_server.http.connections import ConnectionLimiter
from lmkv_server.http.ports import listen
from lmkv_server.http.protocol import BoundedProtocol, RequestLimiter

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


class HttpServer:
    """Serves an application on one port from `start` to `aclose`. The constructor binds the port.

    Serves HTTPS if `credentials` have a certificate. Raises `ConfigError` if the port cannot be bound: `key` and
    `host_key` are the configuration keys that set port and host.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: str,
        app: ASGIApp,
        credentials: Credentials = PLAINTEXT,
        *,
        name: str = "lmkv-http",
        host_key: str = "host",
        max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS,
        max_connections_per_client: int = MAX_CONNECTIONS_PER_CLIENT,
        probes: frozenset[str] = PROBES,
        grace_seconds: float = STOP_GRACE_SECONDS,
    ) -> None:
        self._name = name
        self._listener = listen(host, port, key, host_key)
        self.port: int = self._listener.getsockname()[1]
        limiter = ConnectionLimiter(max_concurrent_requests, min(max_connections_per_client, max_concurrent_requests))
        log = LimitedLogger(logging.getLogger("uvicorn.error"))
        config = uvicorn.Config(
            RequestLimiter(app, limiter, probes, log),
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
        config.ssl = credentials.server_context() if credentials.cert else None
        self._server = _Server(config, grace_seconds)
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
