"""uvicorn's protocol with deadlines for slow clients, and limits on the size of a request's head and on connections.

uvicorn has no such deadlines: a client that sends a byte now and then, or reads no response, keeps its connection
open forever. Its only connection limit answers 503 to every request, including health probes, while idle connections
use up the limit. `ConnectionLimiter` limits connections and requests, in total and per client, with spare capacity for
health probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lmkv.errors import Full, TooManyRequests
from lmkv.runtime import turns
from lmkv.runtime.places import Places, client_of
from lmkv.telemetry.logs import LimitedLogger

SPARE_CONNECTIONS = 32
"""Connections beyond the limit, for health probes and for rejections."""
SPARE_CONNECTIONS_PER_CLIENT = 8


class LimitedConnection(Protocol):
    """A connection as its limiter sees it: a `BoundedProtocol`, which needs a limiter to be made."""

    address: str
    """Address of the client, as `client_of` returns it."""

    def __hash__(self) -> int: ...

    def end(self) -> None:
        """Closes the connection. It has no complete request in flight."""


class LimitReached(NamedTuple):
    """The HTTP status and the message of a rejected request."""

    status: int
    message: str


class ConnectionLimiter:
    """Tracks the open connections of one server. Each waits for a complete request, or has one in flight.

    A connection beyond a limit closes the one that has waited longest, for a request or for the body of one, so that
    clients that open connections and send nothing displace only each other. Only requests count against the limits: if
    `limit` of them are in flight, or `limit_per_client` from one address, further ones are rejected, except health
    probes.
    """

    def __init__(self, limit: int, limit_per_client: int) -> None:
        self._connections = Places[LimitedConnection](
            "connections", limit + SPARE_CONNECTIONS, limit_per_client + SPARE_CONNECTIONS_PER_CLIENT
        )
        self._requests = Places[LimitedConnection]("requests", limit, limit_per_client)

    def __len__(self) -> int:
        return len(self._connections)

    def opened(self, connection: LimitedConnection) -> None:
        """Adds an accepted connection. Beyond a limit, closes the connection that has waited longest."""
        try:
            self._end(self._connections.take(connection, connection.address, waits=True))
        except Full:
            connection.end()

    def began(self, connection: LimitedConnection) -> None:
        """A request has started; its body may be missing."""
        self._connections.wait(connection)
        self._requests.wait(connection)

    def arrived(self, connection: LimitedConnection) -> None:
        """The request is complete: the connection keeps its place. Idempotent."""
        self._connections.settle(connection)
        self._requests.settle(connection)

    def admit(self, connection: LimitedConnection) -> LimitReached | None:
        """Counts the request that has started, unless a limit is reached. Not to be called for health probes."""
        if connection in self._requests or connection not in self._connections:
            return None
        waits = self._connections.is_waiting(connection)
        try:
            self._end(self._requests.take(connection, connection.address, waits=waits))
        except TooManyRequests:
            count = self._requests.count(connection.address)
            return LimitReached(
                429,
                f"{count} requests from {connection.address} are in flight, which leaves places to other clients; "
                "retry, or raise max_connections_per_client",
            )
        except Full:
            limit = self._requests.limit
            return LimitReached(503, f"{limit} requests are in flight, the limit of this server; retry")
        return None

    def ended(self, connection: LimitedConnection) -> None:
        """The request is complete: the connection waits for the next one."""
        self._requests.release(connection)
        self._connections.wait(connection)

    def closed(self, connection: LimitedConnection) -> None:
        """Removes a closed connection. Idempotent."""
        self._requests.release(connection)
        self._connections.release(connection)

    def _end(self, displaced: LimitedConnection | None) -> None:
        """Closes a connection that has lost its place."""
        if displaced is not None:
            self.closed(displaced)
            displaced.end()


if TYPE_CHECKING:
    Base = Any
else:
    Base = AutoHTTPProtocol

HEAD_SECONDS = 10.0
"""Deadline for a request's headers, from the connection or from the first byte after a response."""
READ_SECONDS = 30.0
"""A client that reads nothing for this time, while part of a response waits for it, is disconnected."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request's headers."""
CONNECTION = "lmkv_connection"
"""Key of a request's `state`: the connection that it arrived on."""


class BoundedProtocol(Base):  # type: ignore[misc]  # uvicorn chooses the base class at run time
    """uvicorn's protocol with deadlines for a request's head and for reading the response.

    Handlers that read bodies set the deadlines of bodies.
    """

    def __init__(
        self, limiter: ConnectionLimiter, log: LimitedLogger, *, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(app_state={**app_state, CONNECTION: self}, **options)
        self.logger = log
        self._limiter = limiter
        self.address = ""
        self._timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._begun: object = None
        """The last request that has started."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the header deadline."""
        super().connection_made(transport)
        self.address = client_of(self.client[0] if self.client else "")
        self._start()
        self._limiter.opened(self)

    def data_received(self, data: bytes) -> None:
        """Parses the data, and stops the header deadline once a request has started."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            self._mark()
            return
        if self.cycle is None or not self.cycle.more_body:  # else it may be the body of a rejected request
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif self._timer is None:
            self._start()

    def on_response_complete(self) -> None:
        """Marks the connection idle, unless the client has already sent the next request."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._limiter.ended(self)
        else:
            self._mark()
        self._expect_read()

    def pause_writing(self) -> None:
        """Starts the deadline for reading."""
        super().pause_writing()
        self._expect_read()

    def resume_writing(self) -> None:
        """Stops the deadline: the client has read."""
        super().resume_writing()
        self._stop_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the deadlines."""
        self._stop()
        self._stop_read_timer()
        self._limiter.closed(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Closes the connection. It has no complete request in flight."""
        self.transport.close()

    def _mark(self) -> None:
        """Marks that a request has started, or that its body is complete."""
        if self._begun is not self.cycle:
            self._begun = self.cycle
            self._limiter.began(self)
        if not self.cycle.more_body:
            self._limiter.arrived(self)

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._expire)

    def _stop(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self.transport.close()

    def _expect_read(self) -> None:
        """Starts the deadline for reading, if part of a response waits for the client."""
        waiting = self.transport.get_write_buffer_size()
        if waiting and self._read_timer is None:
            self._read_timer = asyncio.get_running_loop().call_later(READ_SECONDS, self._check_read, waiting)

    def _check_read(self, waited: int) -> None:
        self._read_timer = None
        if self.transport.get_write_buffer_size() >= waited:
            self.transport.abort()
        else:
            self._expect_read()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


class RequestLimiter:
    """ASGI middleware that counts requests against the limits, except those for `probes`.

    Rejects a request beyond a limit immediately, and closes its connection.
    """

    def __init__(self, app: ASGIApp, limiter: ConnectionLimiter, probes: Collection[str], log: LimitedLogger) -> None:
        self._app = app
        self._limiter = limiter
        self._probes = probes
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turns.of_loop().count_arrival()
        connection = scope["state"].pop(CONNECTION)
        reached = None if scope["path"] in self._probes else self._limiter.admit(connection)
        if reached is None:
            await self._app(scope, receive, send)
            return
        self._log.warning("rejected a request from %s: %s", connection.address, reached.message)
        content = {"detail": reached.message, "error": {"code": reached.status, "message": reached.message}}
        headers = {"Connection": "close", "Retry-After": "1"}
        await JSONResponse(content, reached.status, headers)(scope, receive, send)
