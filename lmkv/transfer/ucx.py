"""The UCX channel, through ucxx: two-sided, because ucxx has no remote reads for Python (docs/contribute/transfer.md).

A reader has a UCX worker per connection, which the reading thread drives; the owner's thread sends it the ranges of
its live grants. Requests use UCX streams; bytes use tags, which the reader chooses:

    reader   HELLO token     tag count grant (address size)...                              tag count grant ...
    owner                                                        GRANTED (tag), range (tag + 1), range (tag + 2), ...

To refuse, the owner closes the connection instead of sending `GRANTED`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Self

from lmkv.errors import ConfigError, Full, Unreachable
from lmkv.runtime.places import Places, most_of
from lmkv.telemetry.logs import LimitedLogger
from lmkv.transfer.channel import (
    GRANT_ID_BYTES,
    TOKEN_BYTES,
    ChannelEnd,
    Copy,
    PeerReader,
    Region,
    unwrap,
    wrap,
)
from lmkv.transfer.threads import Job, ThreadedChannel, ThreadedRead

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "UCX_LOG_LEVEL": "fatal",  # lmkv reports errors itself
    "UCX_LOG_FILE": "stderr",
}
"""Defaults of environment variables that UCX reads when it is loaded."""
TICK_MILLISECONDS = 10
"""Time that a thread waits for the network between two checks for cancellation."""
CLOSE_NANOSECONDS = 100_000_000
CLOSE_SECONDS = 2.0


def load_ucxx() -> Any:
    """Imports the core of ucxx. Raises `ConfigError` if it is not installed or cannot be loaded."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ucxx._lib.libucxx")
    except ModuleNotFoundError:
        raise ConfigError(
            "transfer_channel: 'ucx' needs ucxx, which is not installed; pip install '.[ucx]' in a clone of lmkv",
            key="transfer_channel",
        ) from None
    except ImportError as error:
        raise ConfigError(f"transfer_channel: ucxx cannot be loaded: {error}", key="transfer_channel") from None


def make_worker(api: Any) -> Any:
    """Creates a worker in a context of its own, because contexts are not thread-safe. One thread at a time may use it.

    Raises `ConfigError` if UCX does not start.
    """
    try:
        context = api.UCXContext(feature_flags=(api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP))
    except api.UCXError as error:
        raise ConfigError(
            f"transfer_channel: UCX did not start: {error}; UCX_TLS, if set, must name tcp", key="transfer_channel"
        ) from None
    worker = api.UCXWorker(context)
    worker.init_blocking_progress_mode()
    return worker


class UcxRequest:
    """A UCX request and its memory, to which ucxx keeps no reference."""

    def __init__(self, begin: Callable[..., Any], memory: Any, *more: Any) -> None:
        """`begin` is called with the memory, any buffer, as an array of ucxx."""
        self._array = import_module("ucxx._lib.arr").Array(memory)
        self._request = begin(self._array, *more)

    @property
    def completed(self) -> bool:
        """Whether it has ended, successfully or not."""
        return bool(self._request.completed)

    def check_error(self) -> None:
        """Raises the UCX error of a failed request."""
        self._request.check_error()


def close_endpoints(worker: Any, endpoints: Sequence[Any], pending: Sequence[UcxRequest]) -> None:
    """Closes endpoints and waits until all requests have ended: then no more bytes arrive."""
    for endpoint in endpoints:
        with suppress(Exception):  # the peer may be lost
            if endpoint.alive:
                endpoint.close_blocking(CLOSE_NANOSECONDS, 1)
    deadline = time.monotonic() + CLOSE_SECONDS
    while any(not each.completed for each in pending) and time.monotonic() < deadline:
        worker.cancel_inflight_requests(CLOSE_NANOSECONDS, 1)
        worker.progress()


HELLO = b"lmkvucx2"
HELLO_BYTES = len(HELLO) + TOKEN_BYTES
GRANTED = b"\1"
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
HEAD = struct.Struct(f"!QI{GRANT_ID_BYTES}s")
RANGE = struct.Struct("!QQ")


def request(tag: int, grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for ranges under a grant: address in the owner's process, and size."""
    return HEAD.pack(tag, len(ranges), grant_id.encode()) + b"".join(
        RANGE.pack(address, size) for address, size in ranges
    )


MAX_READERS = 256
"""Connections of readers. Beyond them, those that have not read for the longest time are closed; see `Places`."""
MAX_STRANGERS = 64
"""Maximum number of connections before their hello. Beyond it, the oldest are closed: UCX reports no addresses."""
START_SECONDS = 10.0
THREAD_STOP_SECONDS = 3.0
STOP_CHECK_MILLISECONDS = 200
"""Time between two checks whether the thread should stop."""
RequestLoop = Iterator[list[UcxRequest]]
"""The coroutine of one reader: yields UCX requests that must end before it continues."""


class UcxServer:
    """The server thread. `start` and `close` are called on other threads."""

    def __init__(self, api: Any, end: ChannelEnd) -> None:
        self._api = api
        self._pool = end.pool
        self._region = end.region
        self._port = end.port
        self._access = end.access
        self._log = LimitedLogger(logger)
        self._stopping = False
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="lmkv-ucx-serve", daemon=True)
        # Used only on the thread:
        self._loops: dict[Any, tuple[RequestLoop, list[UcxRequest]]] = {}
        self._strangers = Places[Any]("connections without a hello", MAX_STRANGERS, MAX_STRANGERS)
        self._readers = Places[Any]("readers", MAX_READERS, most_of(MAX_READERS))
        self._lost: list[Any] = []
        """Endpoints that have lost their place, to be closed outside of callbacks of UCX."""

    def start(self) -> int:
        """Starts to listen; returns the port. Raises `ConfigError` if it cannot."""
        self._thread.start()
        return self._started.result(START_SECONDS)

    def close(self) -> None:
        """Stops the thread and closes all connections. Idempotent."""
        self._stopping = True
        self._thread.join(THREAD_STOP_SECONDS)

    def _run(self) -> None:
        try:
            worker = make_worker(self._api)
            listener = self._api.UCXListener.create(worker, self._port, self._accept, deliver_endpoint=True)
        except ConfigError as error:
            self._started.set_exception(error)
            return
        except self._api.UCXError as error:
            self._started.set_exception(
                ConfigError(f"transfer_port: UCX cannot listen on {self._port}: {error}", key="transfer_port")
            )
            return
        self._started.set_result(int(listener.port))
        try:
            while not self._stopping:
                worker.progress_worker_event(STOP_CHECK_MILLISECONDS)
                for endpoint in list(self._loops):
                    self._advance(endpoint)
                while self._lost:
                    self._close(self._lost.pop())
        except Exception:
            logger.exception("the UCX server failed; peers can no longer read from this node")
        finally:
            del listener
            pending = [request for _, waiting in self._loops.values() for request in waiting]
            close_endpoints(worker, list(self._loops), pending)
            self._loops.clear()

    def _accept(self, endpoint: Any) -> None:
        self._loops[endpoint] = self._serve(endpoint), []
        self._lose(self._strangers.take(endpoint, "", waits=True))

    def _lose(self, endpoint: Any) -> None:
        """Closes an endpoint soon, which has lost its place to another one; `_advance` then removes it."""
        if endpoint is not None:
            self._log.warning("UCX server: closed an idle connection, since there are too many")
            self._lost.append(endpoint)

    def _close(self, endpoint: Any) -> None:
        if endpoint.alive:  # closing an endpoint that the reader has closed crashes
            endpoint.close_blocking(CLOSE_NANOSECONDS, 1)

    def _advance(self, endpoint: Any) -> None:
        """Advances the coroutine of a reader until it has to wait."""
        loop, waiting = self._loops[endpoint]
        try:
            while all(request.completed for request in waiting):
                for request in waiting:
                    request.check_error()
                waiting = next(loop)
            if endpoint.alive:
                self._loops[endpoint] = loop, waiting
                return
        except (StopIteration, self._api.UCXError) as error:
            logger.debug("UCX server: a reader disconnected: %s", error)
        del self._loops[endpoint]
        self._strangers.release(endpoint)
        self._readers.release(endpoint)
        self._close(endpoint)

    def _serve(self, endpoint: Any) -> RequestLoop:
        hello = bytearray(HELLO_BYTES)
        yield [UcxRequest(endpoint.stream_recv, hello)]
        reader = self._access.find(bytes(hello[len(HELLO) :])) if hello.startswith(HELLO) else None
        if reader is None:
            self._log.warning("UCX server: refused a connection without a valid token")
            return
        self._strangers.release(endpoint)
        try:
            self._lose(self._readers.take(endpoint, reader.peer_name.partition(":")[0], waits=True))
        except Full as error:
            self._log.warning("UCX server: refused %s: %s", reader.peer_name, error)
            return
        while True:
            head = bytearray(HEAD.size)
            yield [UcxRequest(endpoint.stream_recv, head)]
            tag, count, grant_id = HEAD.unpack(head)
            if count > MAX_RANGES:
                self._log.warning("UCX server: refused a request for %d ranges", count)
                return
            ranges = bytearray(count * RANGE.size)
            if count:
                yield [UcxRequest(endpoint.stream_recv, ranges)]
            byte_ranges = list(RANGE.iter_unpack(ranges))
            if byte_ranges and not self._access.check(reader, grant_id, byte_ranges):
                self._log.warning("UCX server: refused a read of %s that no live grant covers", reader.peer_name)
                return
            self._readers.settle(endpoint)
            starts = [(address - self._region.address, size) for address, size in byte_ranges]
            messages = [GRANTED, *(self._pool.buffer[start : start + size] for start, size in starts)]
            yield [
                UcxRequest(endpoint.tag_send, message, self._api.UCXXTag(tag + index))
                for index, message in enumerate(messages)
            ]
            self._readers.wait(endpoint)


READ_THREADS = 4
MAX_IDLE = 2
"""Idle connections kept per peer."""
CONNECT_SECONDS = 4.0


class UcxChannel(ThreadedChannel["_UcxPeer"]):
    """The `Channel` contract over UCX. Created by `open`."""

    name = "ucx"

    def __init__(self, end: ChannelEnd) -> None:
        """Raises `ConfigError` if ucxx is missing or UCX does not start."""
        super().__init__(end, READ_THREADS)
        self._pool = end.pool
        self._api = load_ucxx()
        self._end = end
        self._server = UcxServer(self._api, end)
        self._port = self._server.start()

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel in a thread. Raises `ConfigError` as the constructor does."""
        return await asyncio.to_thread(cls, end)

    def metadata_for(self, reader: PeerReader) -> bytes:
        fields = {"host": self._end.host, "port": self._port, "token": reader.token.hex()}
        return wrap(self.name, self._end, json.dumps(fields).encode())

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, payload = unwrap(self.name, peer_name, metadata)
        peer = _UcxPeer(metadata, region, json.loads(payload))
        known = self._peers.get(peer_name)
        if known and known.metadata == metadata:
            peer = known
        probe = self._make_read(peer, [], "")
        await self._threads.run(peer_name, probe.parts, CONNECT_SECONDS, probe.stop)
        self._peers[peer_name] = peer

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self._server.close)

    def _make_read(self, peer: _UcxPeer, copies: Sequence[Copy], grant_id: str) -> ThreadedRead:
        return ThreadedRead(parts=[partial(self._receive, peer, copies, grant_id)])

    def _receive(self, peer: _UcxPeer, copies: Sequence[Copy], grant_id: str, job: Job) -> None:
        """Runs in a thread. Closes a failed connection: without its worker no more bytes arrive."""
        connection = peer.idle.pop() if peer.idle else None
        try:
            connection = connection or _UcxConnection(self._api, peer, job)
            for start in range(0, max(len(copies), 1), MAX_RANGES):
                self._exchange(connection, copies[start : start + MAX_RANGES], grant_id, job)
        except (self._api.UCXError, OSError) as error:
            if connection:
                connection.close()
            raise Unreachable(f"{job.peer_name} was lost: {error}", peer=job.peer_name) from None
        except BaseException:
            if connection:
                connection.close()
            raise
        peer.keep(connection)

    def _exchange(self, connection: _UcxConnection, copies: Sequence[Copy], grant_id: str, job: Job) -> None:
        """One request and its answer: a byte that grants it, then the ranges. Without ranges it is a probe."""
        granted = bytearray(1)
        wanted = [copy for copy in copies if copy.size_bytes]
        tag = connection.next_tag()
        targets = [granted] + [
            self._pool.buffer[start : start + copy.size_bytes]
            for copy in wanted
            for start in [copy.local_address - self._own.address]
        ]
        receiving = [connection.receive(target, tag + index) for index, target in enumerate(targets)]
        ranges = [(copy.remote_address, copy.size_bytes) for copy in wanted]
        sending = connection.send(request(tag, grant_id, ranges))
        connection.wait([sending, *receiving], job)


class _UcxConnection:
    """A UCX worker and its endpoint at a peer. One thread at a time may use it."""

    def __init__(self, api: Any, peer: _UcxPeer, job: Job) -> None:
        self._api = api
        self._worker = make_worker(api)
        self._endpoint: Any = api.UCXEndpoint.create(self._worker, peer.host, peer.port, True)
        self._pending: list[UcxRequest] = []
        self._tag = secrets.randbits(48) * MAX_RANGES * 2
        try:
            self.wait([self.send(HELLO + peer.token)], job)
        except BaseException:
            self.close()
            raise

    def next_tag(self) -> int:
        """The first of the tags of one request."""
        self._tag = (self._tag + MAX_RANGES * 2) % (1 << 63)
        return self._tag

    def send(self, message: bytes) -> UcxRequest:
        """Starts to send a message; returns the request to wait for."""
        return UcxRequest(self._endpoint.stream_send, message)

    def receive(self, target: bytearray | memoryview, tag: int) -> UcxRequest:
        """Starts to receive into memory; returns the request to wait for."""
        return UcxRequest(self._endpoint.tag_recv, target, self._api.UCXXTag(tag))

    def wait(self, requests: Sequence[UcxRequest], job: Job) -> None:
        """Waits for all requests. Raises the UCX error if one fails, `Unreachable` if the job is abandoned."""
        self._pending = list(requests)
        for each in requests:
            while not each.completed:
                job.check()
                if not self._endpoint.alive:
                    self._endpoint.raise_on_error()
                    raise Unreachable(f"{job.peer_name} closed the connection", peer=job.peer_name)
                self._worker.progress_worker_event(TICK_MILLISECONDS)
            each.check_error()
        self._pending.clear()

    def close(self) -> None:
        """Closes endpoint and worker: no more bytes arrive afterwards."""
        close_endpoints(self._worker, [self._endpoint], self._pending)
        self._pending.clear()
        self._endpoint = self._worker = None


class _UcxPeer:
    """A peer's address and idle connections. Thread-safe."""

    def __init__(self, metadata: bytes, region: Region, fields: dict[str, Any]) -> None:
        self.metadata = metadata
        self.region = region
        self.host: str = fields["host"]
        self.port: int = fields["port"]
        self.token = bytes.fromhex(fields["token"])
        self.idle: list[_UcxConnection] = []
        self._forgotten = False

    def keep(self, connection: _UcxConnection) -> None:
        """Keeps a connection for the next read."""
        if self._forgotten or len(self.idle) >= MAX_IDLE:
            connection.close()
        else:
            self.idle.append(connection)

    def forget(self) -> None:
        """Closes idle connections now, and busy connections after their read."""
        self._forgotten = True
        while self.idle:
            self.idle.pop().close()
