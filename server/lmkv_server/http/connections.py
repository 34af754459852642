"""Connection limits of an HTTP server: in total and per client, with spare capacity for health probes. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lmkv.errors import Full, TooManyRequests
from lmkv.runtime.places import Places

SPARE_CONNECTIONS = 32
"""Connections beyond the limit, for health probes and for rejections."""
SPARE_CONNECTIONS_PER_CLIENT = 8


class LimitedConnection(Protocol):
    """A connection of the server."""

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
        """Adds an accepted connection. Beyond a limit, closes the one that has waited longest."""
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
