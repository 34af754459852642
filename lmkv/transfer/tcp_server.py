"""The owner's end of the TCP channel: sends what readers that know the token ask for. One thread a connection."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
import threading

from lmkv.errors import ConfigError
from lmkv.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.tcp_wire import COUNT, GRANTED, HELLO_BYTES, MAX_RANGES, RANGE, hello

logger = logging.getLogger(__name__)

MAX_READERS = 256
"""Connections at a time; a further one is closed at once."""
HELLO_SECONDS = 5.0
STUCK_SECONDS = 30.0
"""A reader that takes nothing for so long is given up."""
CLOSE_SECONDS = 3.0


class TcpServer:
    """Listens from the start, and serves between `start` and `aclose`."""

    def __init__(self, pool: Pool, host: str, port: int, token: bytes) -> None:
        """Raises `ConfigError` if it cannot listen there."""
        self._pool = pool
        self._region = Region(address=pool.address, size_bytes=pool.size_bytes)
        self._hello = hello(token)
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
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to accept readers."""
        self._task = asyncio.create_task(self._accept(), name="transfer server")

    async def aclose(self) -> None:
        """Stops listening and ends every connection. Idempotent."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.wait([task])
        self._listener.close()
        threads = list(self._readers.items())
        for connection, _ in threads:
            _shut(connection)
        for _, thread in threads:
            await asyncio.to_thread(thread.join, CLOSE_SECONDS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of file descriptors, most likely
                logger.warning("transfer server: cannot accept a reader: %s", error)
                await asyncio.sleep(1.0)
                continue
            if len(self._readers) >= MAX_READERS:
                logger.warning("transfer server: more than %d readers at a time; one was refused", MAX_READERS)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="lmkv-tcp-serve", daemon=True)
            self._readers[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._greet(connection):
                    while self._answer(connection):
                        pass
        except OSError as error:
            logger.debug("transfer server: a reader is gone: %s", error)
        except Exception:
            logger.exception("transfer server: serving a reader failed unexpectedly")
        finally:
            self._readers.pop(connection, None)

    def _greet(self, connection: socket.socket) -> bool:
        connection.settimeout(HELLO_SECONDS)
        if not secrets.compare_digest(_receive(connection, HELLO_BYTES), self._hello):
            logger.warning("transfer server: somebody without the token was refused")
            return False
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STUCK_SECONDS), 0))
        connection.sendall(GRANTED)
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """Serves one request; False when there is no more, or it cannot be granted."""
        head = _receive(connection, COUNT.size)
        if not head:
            return False
        (count,) = COUNT.unpack(head)
        if not 0 < count <= MAX_RANGES:
            logger.warning("transfer server: a reader asked for %d runs of bytes and was refused", count)
            return False
        ranges = list(RANGE.iter_unpack(_receive(connection, count * RANGE.size)))
        if len(ranges) < count:
            return False
        if not all(self._region.holds(address, size) for address, size in ranges):
            logger.warning("transfer server: a reader asked for bytes outside of the pool and was refused")
            return False
        connection.sendall(GRANTED)
        for address, size in ranges:
            start = address - self._region.address
            with self._pool.buffer[start : start + size] as run:
                connection.sendall(run)
        return True


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none if the connection ends before."""
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            return b""
        parts += data
    return bytes(parts)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed
