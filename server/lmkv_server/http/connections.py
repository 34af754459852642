"""Connection limits of an HTTP server: in total and per client, with room for health probes at any time. Pure."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple, Protocol

SPARE_CONNECTIONS = 32
"""Connections beyond the limit, for health probes, and for answering that a limit is reached."""
SPARE_CONNECTIONS_PER_CLIENT = 8
_IPV6_CLIENT_BITS = 64
"""One IPv6 client has at least a network of this prefix length to choose addresses from."""


class Connection(Protocol):
    """One connection, as far as limits concern it."""

    address: str
    """Of the client, as `client_of` returns it."""

    def end(self) -> None:
        """Closes it. The connection has no request under way."""


class Refusal(NamedTuple):
    """Why a request is not served."""

    status: int
    message: str


class Connections:
    """The open connections of one server, of which each is idle (no request under way) or busy.

    A connection beyond a limit closes the one that has been idle longest, so that clients that open connections and
    send nothing displace only each other. Only requests count against the limits: where `limit` of them are under way,
    or `limit_per_client` from one address, further ones are refused, except health probes.
    """

    def __init__(self, limit: int, limit_per_client: int) -> None:
        self._limit_per_client = limit_per_client
        self._all = _Group(limit, SPARE_CONNECTIONS)
        self._clients: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._all.idle) + len(self._all.busy)

    def opened(self, connection: Connection) -> None:
        """A connection was accepted; it is idle. Closes the longest idle one if there are too many."""
        client = self._clients.get(connection.address)
        if client is None:
            client = self._clients[connection.address] = _Group(self._limit_per_client, SPARE_CONNECTIONS_PER_CLIENT)
        for group in (client, self._all):
            group.idle[connection] = None
        for group in (client, self._all):
            if group.is_over_full and (longest_idle := next(iter(group.idle), None)):
                self.closed(longest_idle)
                longest_idle.end()

    def began(self, connection: Connection) -> None:
        """A request on it has begun."""
        for group in self._groups(connection):
            if group.idle.pop(connection, connection) is None:
                group.busy.add(connection)

    def admit(self, connection: Connection) -> Refusal | None:
        """Counts the request that has begun, unless a limit is reached. Not to be called for health probes."""
        groups = self._groups(connection)
        for group in groups:
            if connection not in group.admitted and len(group.admitted) >= group.limit:
                if group is self._all:
                    return Refusal(503, f"{group.limit} requests are under way, as many as this server serves; retry")
                return Refusal(
                    429,
                    f"{group.limit} requests from {connection.address} are under way, as many as "
                    "max_connections_per_client allows",
                )
        for group in groups:
            group.admitted.add(connection)
        return None

    def ended(self, connection: Connection) -> None:
        """Its request was answered: it is idle again."""
        for group in self._groups(connection):
            if connection in group.busy:
                group.busy.discard(connection)
                group.admitted.discard(connection)
                group.idle[connection] = None

    def closed(self, connection: Connection) -> None:
        """It was closed. Idempotent."""
        for group in self._groups(connection):
            group.idle.pop(connection, None)
            group.busy.discard(connection)
            group.admitted.discard(connection)
        client = self._clients.get(connection.address)
        if client is not None and not (client.idle or client.busy):
            del self._clients[connection.address]

    def _groups(self, connection: Connection) -> list[_Group]:
        """The connections of its client, and all."""
        client = self._clients.get(connection.address)
        return [client, self._all] if client is not None else [self._all]


class _Group:
    """Connections that share a limit."""

    def __init__(self, limit: int, spare: int) -> None:
        self.limit = limit
        self._most = limit + spare
        self.idle: dict[Connection, None] = {}
        """Longest idle first."""
        self.busy: set[Connection] = set()
        self.admitted: set[Connection] = set()
        """Those of the busy ones that count against the limit."""

    @property
    def is_over_full(self) -> bool:
        return len(self.idle) + len(self.busy) > self._most


def client_of(address: str) -> str:
    """What limits count as one client: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_CLIENT_BITS), strict=False))
