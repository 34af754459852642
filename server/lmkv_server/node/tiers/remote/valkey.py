"""A Valkey or Redis server as a `RemoteStore`.

valkey-py makes the connections and encodes commands. Chunks are copied directly between socket and pool: the `get` of
valkey-py copies them about four times, which takes four to eight times as long.
"""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import valkey
from valkey.backoff import NoBackoff
from valkey.connection import Connection, ConnectionPool
from valkey.exceptions import ResponseError, ValkeyError
from valkey.retry import Retry

from lmkv.config.remote_url import RemoteUrl
from lmkv.errors import ConfigError
from lmkv_server.node.tiers.remote.store import StoreRefused, first_bytes

MAX_LINE_BYTES = 1024
_LENGTH = re.compile(rb"\$([0-9]{1,15})\r\n")
SCANNED_AT_ONCE = 1000
_ABSENT = b"$-1\r\n"


class ValkeyStore:
    """A `RemoteStore` in a Valkey or Redis server: one string value for each object."""

    one_per_request = False
    pads_headers = False
    evicted_count = 0

    def __init__(self, url: RemoteUrl, *, timeout_seconds: float, ttl_seconds: float = 0.0) -> None:
        """`ttl_seconds`: after which the server drops an object; 0: only when it evicts.

        Raises `ConfigError` if valkey-py does not know what follows the `?` of the URL.
        """
        self.shown = url.shown
        self._timeout_seconds = timeout_seconds
        self._ttl = [b"PX", b"%d" % max(1, round(ttl_seconds * 1000))] if ttl_seconds else []
        scheme, rest = url.url.split("://", 1)
        self._idle: deque[Connection] = deque()
        self._is_closed = False
        try:
            self._pool = ConnectionPool.from_url(  # only makes connections: `_idle` keeps them
                f"{'valkeys' if scheme in ('rediss', 'valkeys') else 'valkey'}://{rest}",
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(NoBackoff(), 0),
            )
            self._idle.append(self._new_connection())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"remote_url: {url.shown} has an option that is none: {error}", key="remote_url"
            ) from None

    def open(self) -> None:
        with self._connection() as connection:
            self._ask(connection, "PING")

    def sizes(self, names: Sequence[str]) -> list[int]:
        with self._connection() as connection:
            connection.send_packed_command(connection.pack_commands([("STRLEN", name) for name in names]))
            return [int(connection.read_response()) for _ in names]

    def get(self, name: str, parts: Sequence[memoryview]) -> int:
        """The kernel writes the bytes to their place in the pool."""
        deadline = time.monotonic() + self._timeout_seconds
        with self._connection() as connection:
            connection.send_command("GET", name)
            wire = _Wire(connection, deadline)
            line = wire.line()
            if line == _ABSENT:
                wire.close(self._timeout_seconds)
                return 0
            if (found := _LENGTH.fullmatch(line)) and (size_bytes := int(found[1])) <= sum(map(len, parts)):
                for part in first_bytes(parts, size_bytes):
                    wire.fill(part)
                wire.fill(memoryview(bytearray(2)))  # the end of the line
                wire.close(self._timeout_seconds)
                return size_bytes
            connection.disconnect()  # the rest of the answer is not needed
            if line.startswith(b"-"):
                raise StoreRefused(line[1:].decode(errors="replace").strip())
            return 0

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """The bytes are sent from the pool without a copy."""
        with self._connection() as connection:
            if self._ask(connection, "EXISTS", name):
                return False
            rest = [b"NX", *self._ttl]
            head = b"*%d\r\n" % (3 + len(rest)) + _bulk(b"SET") + _bulk(name.encode())
            head += b"$%d\r\n" % sum(map(len, parts))
            tail = b"\r\n" + b"".join(map(_bulk, rest))
            connection.send_packed_command([head, *parts, tail])
            return connection.read_response() is not None

    def remove(self, names: Sequence[str]) -> None:
        with self._connection() as connection:
            self._ask(connection, "UNLINK", *names)

    def names(self, prefix: str) -> Iterator[list[str]]:
        cursor = b"0"
        while True:
            with self._connection() as connection:
                cursor, found = self._ask(connection, "SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", SCANNED_AT_ONCE)
            yield [name.decode(errors="replace") for name in found]
            if cursor == b"0":
                return

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().disconnect()

    def _ask(self, connection: Connection, *words: Any) -> Any:
        connection.send_command(*words)
        return connection.read_response()

    def _new_connection(self) -> Connection:
        """Connects when it is first used."""
        return self._pool.connection_class(**self._pool.connection_kwargs)

    def _idle_connection(self) -> Connection | None:
        """An open connection. Servers close idle connections."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            with suppress(ValkeyError, OSError):
                if connection._sock is None or not connection.can_read():  # there is nothing to read but an end
                    return connection
            connection.disconnect()

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for this caller alone. It is returned for reuse only if the call succeeded."""
        if self._is_closed:
            raise OSError("closed")
        connection = self._idle_connection() or self._new_connection()
        is_fine = False
        try:
            yield connection
            is_fine = True
        except (ResponseError, valkey.AuthenticationError) as error:
            raise StoreRefused(str(error)) from None
        except ValkeyError as error:
            raise OSError(f"{error}") from None
        finally:
            if is_fine and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.disconnect()


class _Wire:
    """The bytes of one answer, taken from the socket before any other code sees them."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._socket: socket.socket = connection._sock
        self._deadline = deadline

    def line(self) -> bytes:
        """The first line of an answer. Only an error's is read in one go: bytes of a chunk follow other lines."""
        line = b""
        while not line.endswith(b"\r\n") and len(line) < MAX_LINE_BYTES:
            self._wait()
            more = self._socket.recv(MAX_LINE_BYTES - len(line) if line.startswith(b"-") else 1)
            if not more:
                raise OSError("the connection was closed")
            line += more
        return line

    def fill(self, memory: memoryview) -> None:
        """The next bytes, as many as there is room for."""
        at = 0
        while at < len(memory):
            self._wait()
            count = self._socket.recv_into(memory[at:])
            if not count:
                raise OSError("the connection was closed")
            at += count

    def close(self, timeout_seconds: float) -> None:
        """Ends the answer: the next user of the connection has the full timeout for each step."""
        self._socket.settimeout(timeout_seconds)

    def _wait(self) -> None:
        """Bounds the next step by what is left of the time. Raises `TimeoutError` if nothing is."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)
