"""The server of the TCP channel: sends readers the ranges of their live grants. One thread per connection.

The protocol of a connection: a hello with the reader's token, then requests for byte ranges under a grant.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmkv.auth.credentials import Credentials
from lmkv.errors import ConfigError, Full
from lmkv.runtime.places import Places, client_of, most_of
from lmkv.telemetry.logs import LimitedLogger
from lmkv.transfer.channel import GRANT_ID_BYTES, TOKEN_BYTES, ChannelEnd, PeerReader

logger = logging.getLogger(__name__)

MARK = b"lmkvtcp2"
HELLO_BYTES = len(MARK) + TOKEN_BYTES
GRANTED = b"\1"
REFUSED = b"\0"
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
HEAD = struct.Struct(f"!I{GRANT_ID_BYTES}s")
"""Number of ranges, and the grant's id."""
RANGE = struct.Struct("!QQ")


def hello(token: bytes) -> bytes:
    """The first bytes of a connection."""
    return MARK + token


def request(grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for ranges under a grant: address in the owner's process, and size."""
    return HEAD.pack(len(ranges), grant_id.encode()) + b"".join(RANGE.pack(address, size) for address, size in ranges)


MAX_BYTES = 1 << 37
"""Bytes after which an encrypted connection is not used again: half of what AES-GCM allows for one key."""
RECEIVED_AT_ONCE = 1 << 30
"""The most bytes that one call of OpenSSL may receive."""
SEND_BYTES = 1 << 20
"""Bytes that an encrypted send may take `STUCK_SECONDS` for."""


class Tls:
    """TLS for the channel of one node, by the certificates of the fleet: both ends present theirs."""

    def __init__(self, credentials: Credentials) -> None:
        self._server = credentials.server_context()
        self._server.minimum_version = ssl.TLSVersion.TLSv1_3
        self._server.num_tickets = 0  # a session that is resumed would outlive its certificate
        self._clients = credentials.client_contexts()
        self._name = credentials.name

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """The owner's end. The caller does the handshake. `connection` must not be used any more."""
        return self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """The reader's end, after the handshake. Raises `OSError`."""
        context = self._clients.get()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_socket(connection, server_hostname=self._name or host.strip("[]"))


class Connection:
    """A reader's connection to an owner. Blocking; used by one thread at a time, except `shut`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._is_encrypted = isinstance(connection, ssl.SSLSocket)
        self._flags = 0 if self._is_encrypted else socket.MSG_WAITALL
        self._byte_count = 0

    @property
    def is_worn(self) -> bool:
        """Whether its keys have encrypted so much that it must not be used for another read."""
        return self._is_encrypted and self._byte_count > MAX_BYTES

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> bytes:
        """One byte; none at the end of the connection."""
        return self.socket.recv(1)

    def fill(self, target: memoryview) -> bool:
        """Receives bytes until the target is full, without the GIL; False at the end of the connection."""
        done = 0
        while done < len(target):
            count = self.socket.recv_into(target[done : done + RECEIVED_AT_ONCE], 0, self._flags)
            if not count:
                return False
            done += count
        self._byte_count += done
        return True

    def shut(self) -> None:
        """Ends calls that block in another thread."""
        shut(self.socket)

    def close(self) -> None:
        """Closes it. Idempotent."""
        self.socket.close()


def shut(connection: socket.socket) -> None:
    """Shuts a connection down that another thread may use.

    Not by `SSLSocket.shutdown`: that removes the encryption first, and a thread that sends or receives at that moment
    would continue without it.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed


MAX_READERS = 256
"""Connections of readers. Beyond them, those that have not read for the longest time are closed; see `Places`."""
MAX_STRANGERS = 64
"""Maximum number of connections before their hello. Beyond it, the oldest of the address that has most are closed."""
HELLO_SECONDS = 5.0
STUCK_SECONDS = 30.0
"""Send timeout after which the connection of a reader is closed."""
CLOSE_SECONDS = 3.0


class TcpServer:
    """Listens from its creation on, and serves between `start` and `aclose`."""

    def __init__(self, end: ChannelEnd, tls: Tls | None = None) -> None:
        """Raises `ConfigError` if it cannot listen."""
        self._tls = tls
        self._closed = False
        self._pool = end.pool
        self._region = end.region
        self._access = end.access
        self._log = LimitedLogger(logger)
        host, port = end.host, end.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_READERS)
        except OSError as error:
            raise ConfigError(
                f"transfer_port: cannot listen on {host}:{port}: {error.strerror or error}; choose another, or 0 for "
                "any free port",
                key="transfer_port",
            ) from None
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        """Guards the places."""
        self._strangers = Places[threading.Thread]("connections without a hello", MAX_STRANGERS, MAX_STRANGERS)
        self._readers = Places[threading.Thread]("readers", MAX_READERS, most_of(MAX_READERS))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts accepting connections."""
        self._task = asyncio.create_task(self._accept(), name="transfer server")

    async def aclose(self) -> None:
        """Stops listening and closes all connections. Idempotent."""
        self._closed = True
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.wait([task])
        self._listener.close()
        threads = list(self._connections.items())
        for _, connection in threads:
            shut(connection)
        for thread, _ in threads:
            await asyncio.to_thread(thread.join, CLOSE_SECONDS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # out of file descriptors, most likely
                logger.warning("transfer server: cannot accept a reader: %s", error)
                await asyncio.sleep(1.0)
                continue
            client = client_of(address[0])
            thread = threading.Thread(target=self._serve, args=(connection, client), name="lmkv-tcp-serve", daemon=True)
            self._connections[thread] = connection
            with self._lock:
                lost = self._strangers.take(thread, client, waits=True)
            self._end(lost)
            thread.start()

    def _serve(self, connection: socket.socket, client: str) -> None:
        thread = threading.current_thread()
        try:
            with self._secured(connection) as secured:
                if reader := self._greet(secured, client):
                    while self._answer(secured, reader):
                        pass
        except OSError as error:
            logger.debug("transfer server: a reader disconnected: %s", error)
        except Exception:
            logger.exception("transfer server: serving a reader failed unexpectedly")
        finally:
            self._connections.pop(thread, None)
            with self._lock:
                self._strangers.release(thread)
                self._readers.release(thread)

    def _end(self, lost: threading.Thread | None) -> None:
        """Ends the connection of a thread that has lost its place."""
        connection = self._connections.get(lost) if lost is not None else None
        if connection is not None:
            self._log.warning("transfer server: closed an idle connection, since there are too many")
            shut(connection)

    def _admit(self, client: str) -> None:
        """A connection is that of a reader from now on. Raises `Full`."""
        thread = threading.current_thread()
        with self._lock:
            self._strangers.release(thread)
            lost = self._readers.take(thread, client, waits=True)
        self._end(lost)

    def _begin(self) -> bool:
        """A read begins: the connection keeps its place until `_wait`. Returns False if it has lost it."""
        with self._lock:
            self._readers.settle(threading.current_thread())
            return threading.current_thread() in self._readers

    def _wait(self) -> None:
        with self._lock:
            self._readers.wait(threading.current_thread())

    def _secured(self, connection: socket.socket) -> socket.socket:
        """The connection, after the TLS handshake if there is one. Raises `OSError`."""
        if self._tls is None:
            return connection
        connection.settimeout(HELLO_SECONDS)
        secured = self._tls.accept(connection)
        self._connections[threading.current_thread()] = secured
        try:
            if self._closed:  # `aclose` has shut the connection that this one replaces
                raise ConnectionAbortedError("the transfer channel is closed")
            secured.do_handshake()
        except OSError as error:
            secured.close()
            if not self._closed:
                self._log.warning("transfer server: refused a connection: no TLS handshake: %s", error)
            raise
        return secured

    def _greet(self, connection: socket.socket, client: str) -> PeerReader | None:
        connection.settimeout(HELLO_SECONDS)
        hello = _receive(connection, HELLO_BYTES)
        reader = self._access.find(hello[len(MARK) :]) if hello.startswith(MARK) else None
        if reader is None:
            self._log.warning("transfer server: refused a connection without a valid token")
            return None
        try:
            self._admit(client)
        except Full as error:
            self._log.warning("transfer server: refused a reader from %s: %s", client, error)
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STUCK_SECONDS), 0))
        connection.sendall(GRANTED)
        return reader

    def _answer(self, connection: socket.socket, reader: PeerReader) -> bool:
        """Serves one request; returns False at the end of the connection or after a protocol error."""
        head = _receive(connection, HEAD.size)
        if not head:
            return False
        count, grant_id = HEAD.unpack(head)
        if not 0 < count <= MAX_RANGES:
            self._log.warning("transfer server: refused a request of %s for %d ranges", reader.peer_name, count)
            return False
        ranges = list(RANGE.iter_unpack(_receive(connection, count * RANGE.size)))
        if len(ranges) < count or not self._begin():
            return False
        with _send_timeout(connection):
            if not self._access.check(reader, grant_id, ranges):
                self._log.warning("transfer server: refused a read of %s that no live grant covers", reader.peer_name)
                connection.sendall(REFUSED)
                self._wait()
                return True
            connection.sendall(GRANTED)
            for address, size in ranges:
                start = address - self._region.address
                with self._pool.buffer[start : start + size] as run:
                    _send(connection, run)
        self._wait()
        return True


@contextmanager
def _send_timeout(connection: socket.socket) -> Iterator[None]:
    """Inside, a send with TLS ends after `STUCK_SECONDS`: OpenSSL repeats what `SO_SNDTIMEO` has ended."""
    if not isinstance(connection, ssl.SSLSocket):
        yield
        return
    connection.settimeout(STUCK_SECONDS)
    yield
    connection.settimeout(None)


def _send(connection: socket.socket, run: memoryview) -> None:
    """Sends all of it. Raises `OSError` if the reader takes nothing for `STUCK_SECONDS`."""
    step = SEND_BYTES if isinstance(connection, ssl.SSLSocket) else max(len(run), 1)
    for start in range(0, len(run), step):
        connection.sendall(run[start : start + step])


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receives `size` bytes; returns none if the connection ends before."""
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            return b""
        parts += data
    return bytes(parts)
