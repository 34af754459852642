"""Hands the pool's file descriptor to workers, and tells the node when a worker is gone (docs/pool.md).

The node serves a `PoolSocket`; the worker side of the connector calls `attach`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv.pool import Pool

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
MAX_WORKERS = 1024
HELLO_SECONDS = 5.0
"""A connection that has not said who it is by then is closed."""

WorkerCallback = Callable[[str, int], None]
"""Called with engine id and rank."""


class PoolSocket:
    """Unix socket that gives the pool to workers. `async with`, or `start` and `aclose`.

    `on_worker` is called before a worker gets the pool, and refuses it by raising an `LmkvError`; `on_worker_gone` when
    the kernel closed its end: from then on the process cannot touch the pool any more, unless the worker closed the
    connection while it kept the memory mapped.
    Both are called on the event loop, once per connection; a worker that connects anew may be announced again before
    its old connection is seen to be gone. Closing the socket calls nothing: it proves nothing about the workers.
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
        self.path = path
        self._pool = pool
        self._epoch = epoch
        self._on_worker = on_worker
        self._on_worker_gone = on_worker_gone
        self._listener: socket.socket | None = None
        self._inode = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens, for this user only; a socket that a dead node left behind is removed.

        Raises `ConfigError` if another process listens there or the path cannot be had.
        """
        self._listener = _listen(self.path)
        self._inode = self.path.stat().st_ino
        self._task = asyncio.create_task(self._serve(self._listener), name="pool socket")

    async def aclose(self) -> None:
        """Stops listening and closes all connections; the workers keep their mappings. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._listener is None:
            return
        task.cancel()
        await asyncio.wait([task])
        self._listener.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # else a newer node's
                self.path.unlink()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        workers: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors, most likely
                    logger.warning("pool socket: cannot accept a worker: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                if len(workers) >= MAX_WORKERS:
                    _refuse(connection, f"{MAX_WORKERS} workers are attached already")
                    connection.close()
                    continue
                task = group.create_task(self._serve_worker(connection))
                workers.add(task)
                task.add_done_callback(workers.discard)
                # Here, because a task that is cancelled before it runs would not close it.
                task.add_done_callback(partial(_close, connection))

    async def _serve_worker(self, connection: socket.socket) -> None:
        try:
            await self._converse(connection)
        except Exception:
            logger.exception("pool socket: serving a worker failed unexpectedly")

    async def _converse(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                engine_id, rank, epoch = _parse_hello(await _read_line(connection))
        except (OSError, TimeoutError, ValueError) as error:
            _refuse(connection, f"no hello: {error}")
            return
        if epoch != self._epoch:
            _refuse(connection, f"this node runs epoch {self._epoch}, not {epoch}")
            return
        try:
            self._on_worker(engine_id, rank)
        except LmkvError as error:
            _refuse(connection, str(error))
            return
        if self._hand_over(connection):
            await _wait_for_end(connection)
        self._on_worker_gone(engine_id, rank)

    def _hand_over(self, connection: socket.socket) -> bool:
        answer = _line(size_bytes=self._pool.size_bytes, epoch=self._epoch)
        try:
            # A new connection has room for it, so this neither blocks nor sends in part.
            return socket.send_fds(connection, [answer], [self._pool.fd]) == len(answer)
        except OSError as error:
            logger.warning("pool socket: a worker left before it had the pool: %s", error)
            return False


class AttachedPool:
    """A worker's hold on the node's pool. It stays valid, though useless, when the node dies. `close` ends it."""

    def __init__(self, pool: Pool, connection: socket.socket) -> None:
        self.pool = pool
        self._connection = connection

    def close(self) -> None:
        """Unmaps the pool and tells the node so. The worker must not touch the pool any more. Idempotent."""
        self.pool.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(socket_path: Path | str, engine_id: str, rank: int, epoch: int, timeout_seconds: float) -> AttachedPool:
    """Gets and maps the pool of the node that listens at `socket_path`; blocks for no longer than `timeout_seconds`.

    Raises `Unreachable` if there is no node, it does not answer in time, refuses, or its pool cannot be mapped.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        deadline = time.monotonic() + timeout_seconds
        connection.settimeout(timeout_seconds)
        connection.connect(str(socket_path))
        connection.sendall(_line(engine_id=engine_id, rank=rank, epoch=epoch))
        pool = _receive_pool(connection, epoch, deadline)
    except (OSError, ValueError) as error:
        connection.close()
        raise Unreachable(f"no pool from the node at {socket_path}: {error}", socket=socket_path) from None
    except BaseException:
        connection.close()
        raise
    return AttachedPool(pool, connection)


def _receive_pool(connection: socket.socket, epoch: int, deadline: float) -> Pool:
    line, fds = b"", list[int]()
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data, more, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            fds += more
            line += data
            if not data or len(line) > MAX_LINE_BYTES:
                raise ValueError("the answer is cut off" if not data else "the answer is too long")
        answer = _parse(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        size_bytes = answer.get("size_bytes")
        if answer.get("epoch") != epoch or not isinstance(size_bytes, int) or len(fds) != 1:
            raise ValueError(f"the answer {answer} does not hand over the pool of epoch {epoch}")
        return Pool.attach(fds.pop(), size_bytes)
    finally:
        for fd in fds:
            os.close(fd)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before anybody can connect
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"runtime_dir: cannot listen at {path}: {reason}; name another directory", path=path
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return  # nothing there, or something that bind will refuse to replace
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog is an answer too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"runtime_dir: another node listens at {path}; give this one another instance_id or runtime_dir", path=path
    )


async def _read_line(connection: socket.socket) -> bytes:
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_LINE_BYTES - len(line))
        if not data:
            raise ValueError("the line is cut off" if len(line) < MAX_LINE_BYTES else "the line is too long")
        line += data
    return line


async def _wait_for_end(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):  # a reset is an end too
        while await loop.sock_recv(connection, MAX_LINE_BYTES):
            pass  # nothing more was agreed on, but only the end is an end


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


def _refuse(connection: socket.socket, reason: str) -> None:
    logger.warning("pool socket: a worker was refused: %s", reason)
    with suppress(OSError):
        connection.send(_line(error=reason))


def _line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is not an object")
    return fields


def _parse_hello(line: bytes) -> tuple[str, int, int]:
    fields = _parse(line)
    engine_id, rank, epoch = (fields.get(name) for name in ("engine_id", "rank", "epoch"))
    if not (
        isinstance(engine_id, str) and engine_id and isinstance(epoch, int) and isinstance(rank, int) and rank >= 0
    ):
        raise ValueError(f"{fields} needs engine_id, rank and epoch")
    return engine_id, rank, epoch
