"""Passes file descriptors to other processes of this host over unix sockets, and detects their exit.

A node passes its pool to its workers by a `PoolSocket` (docs/contribute/pool.md), whose worker side calls `attach`, and
to peers on the same host (`transfer.shm`) by an `FdServer`, whose peers call `receive_fd`. Each side sends one line of
JSON. The connection stays open as long as the receiver lives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from lmkv.errors import LmkvError, Unreachable
from lmkv.pool.pool import Pool
from lmkv.runtime.folder import UnixListener

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
MAX_RECEIVERS = 1024
HELLO_SECONDS = 5.0
"""A connection that has not sent its hello by then is closed."""

Fields = Mapping[str, Any]


def _ignore() -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FdOffer:
    """A file descriptor for one receiver, which the sender keeps too, and the fields of the JSON message."""

    fd: int
    fields: Fields
    on_disconnect: Callable[[], None] = field(default=_ignore)
    """Called on the event loop when the receiver has disconnected or exited."""


class FdServer:
    """A unix socket that only this user can open. `async with`, or `start` and `aclose`.

    `make_offer` is called on the event loop with a receiver's hello, and refuses it by raising an `LmkvError` or a
    `ValueError`. Closing the server does not call `on_disconnect`: the receivers may still be alive.
    """

    def __init__(self, path: Path, make_offer: Callable[[Fields], FdOffer], name: str) -> None:
        """`name` identifies the server in log lines."""
        self.path = path
        self._make_offer = make_offer
        self._name = name
        self._listener: UnixListener | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens; the stale socket of a dead process is removed.

        Raises `ConfigError` if another process listens there or the path cannot be bound.
        """
        self._listener = UnixListener(self.path)
        self._task = asyncio.create_task(self._serve(self._listener.socket), name=self._name)

    async def aclose(self) -> None:
        """Stops listening and closes all connections; the receivers keep their descriptors. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._listener is None:
            return
        task.cancel()
        await asyncio.wait([task])
        self._listener.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        receivers: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors, most likely
                    logger.warning("%s: cannot accept a connection: %s", self._name, error)
                    await asyncio.sleep(1.0)
                    continue
                if len(receivers) >= MAX_RECEIVERS:
                    self._refuse(connection, f"{MAX_RECEIVERS} processes are attached already")
                    connection.close()
                    continue
                task = group.create_task(self._serve_receiver(connection))
                receivers.add(task)
                task.add_done_callback(receivers.discard)
                # A callback, because a task that is cancelled before it runs would not close it.
                task.add_done_callback(partial(_close, connection))

    async def _serve_receiver(self, connection: socket.socket) -> None:
        try:
            await self._answer(connection)
        except Exception:
            logger.exception("%s: a connection failed unexpectedly", self._name)

    async def _answer(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = _parse(await _read_line(connection))
            offer = self._make_offer(hello)
        except (OSError, TimeoutError, ValueError) as error:
            self._refuse(connection, f"invalid hello: {error}")
            return
        except LmkvError as error:
            self._refuse(connection, str(error))
            return
        try:
            if self._send(connection, offer):
                await _wait_for_end(connection)
        except asyncio.CancelledError:  # the server closes; the receiver may still be alive
            raise
        except BaseException:
            offer.on_disconnect()
            raise
        offer.on_disconnect()

    def _send(self, connection: socket.socket, offer: FdOffer) -> bool:
        answer = _line(offer.fields)
        try:
            # The buffer of a new connection is empty, so this neither blocks nor sends a part.
            return socket.send_fds(connection, [answer], [offer.fd]) == len(answer)
        except OSError as error:
            logger.warning("%s: a receiver disconnected before it was served: %s", self._name, error)
            return False

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        logger.warning("%s: refused a receiver: %s", self._name, reason)
        with suppress(OSError):
            connection.send(_line({"error": reason}))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedFd:
    """A received file descriptor, the sender's JSON message and the connection. The receiver closes both."""

    fd: int
    fields: Fields
    connection: socket.socket
    """Must stay open as long as the descriptor's memory is used; the sender closes its end when it stops."""


def receive_fd(path: Path | str, hello: Fields, timeout_seconds: float) -> ReceivedFd:
    """Receives the descriptor that is served at `path`; blocks for at most `timeout_seconds`.

    Raises `Unreachable` if no process listens there, does not answer in time, or refuses.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        deadline = time.monotonic() + timeout_seconds
        connection.settimeout(timeout_seconds)
        connection.connect(str(path))
        with suppress(BrokenPipeError):  # the server has refused before it read the hello: the answer says why
            connection.sendall(_line(hello))
        fd, fields = _receive(connection, deadline)
    except (OSError, ValueError) as error:
        connection.close()
        raise Unreachable(f"no file descriptor was received at {path}: {error}", socket=path) from None
    except BaseException:
        connection.close()
        raise
    return ReceivedFd(fd=fd, fields=fields, connection=connection)


def _receive(connection: socket.socket, deadline: float) -> tuple[int, Fields]:
    line, fds = b"", list[int]()
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data, more, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            fds += more
            line += data
            if not data or len(line) > MAX_LINE_BYTES:
                raise ValueError("the answer is truncated" if not data else "the answer is too long")
        fields = _parse(line)
        if "error" in fields:
            raise ValueError(fields["error"])
        if len(fds) != 1:
            raise ValueError(f"the answer {fields} has {len(fds)} file descriptors instead of one")
        return fds.pop(), fields
    finally:
        for fd in fds:
            os.close(fd)


async def _read_line(connection: socket.socket) -> bytes:
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_LINE_BYTES - len(line))
        if not data:
            raise ValueError("the line is truncated" if len(line) < MAX_LINE_BYTES else "the line is too long")
        line += data
    return line


async def _wait_for_end(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):  # a reset ends it too
        while await loop.sock_recv(connection, MAX_LINE_BYTES):
            pass  # the protocol has no further messages


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


def _line(fields: Fields) -> bytes:
    return json.dumps(dict(fields)).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is not an object")
    return fields


WorkerCallback = Callable[[str, int], None]
"""Called with engine id and rank."""


class PoolSocket(FdServer):
    """A unix socket that passes the pool to workers. `async with`, or `start` and `aclose`.

    `on_worker` is called before a worker gets the pool, and refuses it by raising an `LmkvError`. `on_worker_gone` is
    called when the worker has disconnected or exited: it can then no longer access the pool, unless it closed the
    connection while it kept the memory mapped. Both are called on the event loop, once per connection; a worker that
    reconnects may be announced before its old connection has ended.
    """

    def __init__(
        self,
        path: Path,
        pool: Pool,
        epoch: int,
        *,
        on_worker: WorkerCallback,
        on_worker_gone: WorkerCallback,
    ) -> None:
        super().__init__(path, self._offer, "pool socket")
        self._pool = pool
        self._epoch = epoch
        self._on_worker = on_worker
        self._on_worker_gone = on_worker_gone

    def _offer(self, hello: Fields) -> FdOffer:
        engine_id, rank, epoch = _parse_hello(hello)
        if epoch != self._epoch:
            raise Unreachable(f"this node runs epoch {self._epoch}, not {epoch}")
        self._on_worker(engine_id, rank)
        return FdOffer(
            fd=self._pool.fd,
            fields={"size_bytes": self._pool.size_bytes, "epoch": self._epoch},
            on_disconnect=lambda: self._on_worker_gone(engine_id, rank),
        )


class AttachedPool:
    """The node's pool, mapped by a worker, and the connection to the node. Stays mapped when the node exits."""

    def __init__(self, pool: Pool, connection: socket.socket) -> None:
        self.pool = pool
        self._connection = connection

    def watch(self) -> NodeConnection:
        """A second descriptor of the connection, for a thread that waits until the node has exited."""
        return NodeConnection(self._connection.dup())

    def close(self) -> None:
        """Unmaps the pool and disconnects from the node. Idempotent."""
        self.pool.close()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # also for those that watch it
        self._connection.close()

    def close_when_unused(self) -> None:
        """As `close`, but disconnects only once no view of the pool exists. Until then the node leaves alone what it
        has granted to this worker's engine. Idempotent."""
        self.pool.on_unmapped(self._connection.close)
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NodeConnection:
    """A worker's connection to the node whose pool it has mapped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(None)

    def wait(self) -> None:
        """Blocks until the node has exited or disconnected the worker, or the worker has closed the pool."""
        with self._connection, suppress(OSError):
            while self._connection.recv(1):
                pass


def attach(socket_path: Path | str, engine_id: str, rank: int, epoch: int, timeout_seconds: float) -> AttachedPool:
    """Receives and maps the pool of the node that listens at `socket_path`; blocks for at most `timeout_seconds`.

    Raises `Unreachable` if no node listens there, it does not answer in time or refuses, or the pool cannot be mapped.
    """
    received = receive_fd(socket_path, {"engine_id": engine_id, "rank": rank, "epoch": epoch}, timeout_seconds)
    return _attached(received, socket_path, epoch)


def _attached(received: ReceivedFd, socket_path: Path | str, epoch: int) -> AttachedPool:
    try:
        return AttachedPool(_map(received.fd, received.fields, epoch), received.connection)
    except (OSError, ValueError, OverflowError) as error:  # the last for a size that no file has
        received.connection.close()
        raise Unreachable(f"no pool from the node at {socket_path}: {error}", socket=socket_path) from None


def _map(fd: int, fields: Fields, epoch: int) -> Pool:
    size_bytes = fields.get("size_bytes")
    if fields.get("epoch") != epoch or not isinstance(size_bytes, int) or size_bytes <= 0:
        os.close(fd)
        raise ValueError(f"the answer {fields} is not the pool of epoch {epoch}")
    return Pool.attach(fd, size_bytes)


def _parse_hello(hello: Fields) -> tuple[str, int, int]:
    engine_id, rank, epoch = (hello.get(name) for name in ("engine_id", "rank", "epoch"))
    if not (
        isinstance(engine_id, str) and engine_id and isinstance(epoch, int) and isinstance(rank, int) and rank >= 0
    ):
        raise ValueError(f"{dict(hello)} needs engine_id, rank and epoch")
    return engine_id, rank, epoch
