"""LimitedConnection limits of an HTTP server: in total and per client, with spare capacity for health probes. Pure."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple, Protocol

SPARE_CONNECTIONS = 32
"""Connections beyond the limit, for health probes and for rejections."""
SPARE_CONNECTIONS_PER_CLIENT = 8
_IPV6_CLIENT_BITS = 64
"""An IPv6 client controls at least a network of this prefix length."""


class LimitedConnection(Protocol):
    """A connection of the server."""

    address: str
    """Address of the client, as `client_of` returns it."""

    def end(self) -> None:
        """Closes the connection. It has no request in flight."""


class LimitReached(NamedTuple):
    """The HTTP status and the message of a rejected request."""

    status: int
    message: str


class ConnectionLimiter:
    """Tracks the open connections of one server. Each is idle (no request in flight) or busy.

    A connection beyond a limit closes the one that has been idle longest, so that clients that open connections and
    send nothing displace only each other. Only requests count against the limits: if `limit` of them are in flight,
    or `limit_per_client` from one address, further ones are rejected, except health probes.
    """

    def __init__(self, limit: int, limit_per_client: int) -> None:
        self._limit_per_client = limit_per_client
        self._all = _Group(limit, SPARE_CONNECTIONS)
        self._clients: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._all.idle) + len(self._all.busy)

    def opened(self, connection: LimitedConnection) -> None:
        """Adds an accepted connection, which is idle. Beyond a limit, closes the one that has been idle longest."""
        client = self._clients.get(connection.address)
        if client is None:
            client = self._clients[connection.address] = _Group(self._limit_per_client, SPARE_CONNECTIONS_PER_CLIENT)
        for group in (client, self._all):
            group.idle[connection] = None
        for group in (client, self._all):
            if group.is_over_full and (longest_idle := next(iter(group.idle), None)):
                self.closed(longest_idle)
                longest_idle.end()

    def began(self, connection: LimitedConnection) -> None:
        """Marks the connection busy: a request has started."""
        for group in self._groups(connection):
            if group.idle.pop(connection, connection) is None:
                group.busy.add(connection)

    def admit(self, connection: LimitedConnection) -> LimitReached | None:
        """Counts the request that has started, unless a limit is reached. Not to be called for health probes."""
        groups = self._groups(connection)
        for group in groups:
            if connection not in group.admitted and len(group.admitted) >= group.limit:
                if group is self._all:
                    return LimitReached(503, f"{group.limit} requests are in flight, the limit of this server; retry")
                return LimitReached(
                    429,
                    f"{group.limit} requests from {connection.address} are in flight, the limit that "
                    "max_connections_per_client sets",
                )
        for group in groups:
            group.admitted.add(connection)
        return None

    def ended(self, connection: LimitedConnection) -> None:
        """Marks the connection idle: its request is complete."""
        for group in self._groups(connection):
            if connection in group.busy:
                group.busy.discard(connection)
                group.admitted.discard(connection)
                group.idle[connection] = None

    def closed(self, connection: LimitedConnection) -> None:
        """Removes a closed connection. Idempotent."""
        for group in self._groups(connection):
            group.idle.pop(connection, None)
            group.busy.discard(connection)
            group.admitted.discard(connection)
        client = self._clients.get(connection.address)
        if client is not None and not (client.idle or client.busy):
            del self._clients[connection.address]

    def _groups(self, connection: LimitedConnection) -> list[_Group]:
        """The groups that the connection belongs to: its client's and the server's."""
        client = self._clients.get(connection.address)
        return [client, self._all] if client is not None else [self._all]


class _Group:
    """Connections that share a limit."""

    def __init__(self, limit: int, spare: int) -> None:
        self.limit = limit
        self._capacity = limit + spare
        self.idle: dict[LimitedConnection, None] = {}
        """Ordered by idle time, longest first."""
        self.busy: set[LimitedConnection] = set()
        self.admitted: set[LimitedConnection] = set()
        """Busy connections whose request counts against the limit."""

    @property
    def is_over_full(self) -> bool:
        return len(self.idle) + len(self.busy) > self._capacity


def client_of(address: str) -> str:
    """The unit that limits count as one client: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_CLIENT_BITS), strict=False))
