"""Serves `/metrics` of a node over minimal HTTP, on the node's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.auth.token import HEADER
from lmkv.errors import ConfigError, PermissionDenied, Unauthenticated
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv_server.http.connections import ConnectionLimiter, LimitReached, client_of
from lmkv_server.http.guard import HostGuard
from lmkv_server.node.ports import describe_port

REQUEST_SECONDS = 5.0
"""Deadline of a request, from the connection to the last byte of its response."""
METRICS_RPC = "lmkv.v1.RegistryService/ListInstances"
"""The RPC whose permission also covers metrics."""
MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 32
MAX_CONNECTIONS_PER_CLIENT = 16
"""Concurrent connections, in total and from one address."""


class MetricsServer:
    """Serves a registry while it is entered, over HTTPS if `credentials` have a certificate.

    Requests need the permission to call `METRICS_RPC`. Entering raises `ConfigError` if the port cannot be bound.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        credentials: Credentials = PLAINTEXT,
        authenticator: Authenticator = OPEN_AUTHENTICATOR,
        allowed_hosts: Sequence[str] = (),
        runtime_dir: Path | None = None,
    ) -> None:
        """`runtime_dir` is searched for a node that has the port, for the error."""
        self._runtime_dir = runtime_dir
        self.port = port
        """The bound port once entered."""
        self._registry = registry
        self._host = host
        self._credentials = credentials
        self._authenticator = authenticator
        self._server: asyncio.Server | None = None
        self._guard = HostGuard(bound=host, allowed=allowed_hosts)
        self._limits = ConnectionLimiter(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_CLIENT)
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._accept,
                self._host,
                self.port,
                limit=MAX_REQUEST_BYTES,
                ssl=self._credentials.server_context() if self._credentials.cert else None,
                ssl_handshake_timeout=REQUEST_SECONDS if self._credentials.cert else None,
            )
        except OSError as error:
            owner = describe_port(self._runtime_dir, self.port) if self._runtime_dir else ""
            raise ConfigError(
                f"metrics_port: cannot listen on {self._host}:{self.port} ({error.strerror}); "
                + (owner or "choose another, 0 for any free port, or off"),
                key="metrics_port",
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops serving and closes open connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, within `REQUEST_SECONDS`, and closes the connection."""
        connection = _Connection(writer)
        self._limits.opened(connection)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    self._limits.began(connection)
                    refusal = self._limits.admit(connection)
                    writer.write(_refused(refusal) if refusal else self._answer(head))
                    await writer.drain()
        finally:
            self._limits.closed(connection)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        headers = _headers(head)
        if refusal := self._guard.refusal(headers.get("host", ""), headers.get("origin")):
            return _response("403 Forbidden", "text/plain", f"{refusal}\n".encode())
        if path != b"/metrics":
            return _response("404 Not Found", "text/plain", b"only /metrics is served\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"use GET\n")
        try:
            self._authenticator.authenticate(METRICS_RPC, [(HEADER, headers.get(HEADER, ""))])
        except (Unauthenticated, PermissionDenied) as error:
            status = "401 Unauthorized" if isinstance(error, Unauthenticated) else "403 Forbidden"
            return _response(status, "text/plain", f"{error}\n".encode())
        answer = _response("200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry))
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


class _Connection:
    """A connection as `ConnectionLimiter` counts it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.address = client_of((writer.get_extra_info("peername") or ("",))[0])

    def end(self) -> None:
        """Closes it, so that the read of its request ends."""
        self._writer.transport.abort()


def _headers(head: bytes) -> dict[str, str]:
    """The headers of a request by their names in lower case."""
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _refused(refusal: LimitReached) -> bytes:
    status = "429 Too Many Requests" if refusal.status == 429 else "503 Service Unavailable"
    return _response(status, "text/plain", f"{refusal.message}\n".encode())


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
