"""Passes the pool to workers, and notifies the node when a worker has disconnected or exited (docs/contribute/pool.md).

The node serves a `PoolSocket`; the worker side of the connector calls `attach`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from lmkv.errors import Unreachable
from lmkv.pool.fd_passing import FdOffer, FdServer, Fields, ReceivedFd, receive_fd
from lmkv.pool.pool import Pool

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
