"""The server of the UCX channel: one thread and worker, which sends readers the ranges of their live grants."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from lmkv.errors import ConfigError, Full
from lmkv.runtime.places import Places, most_of
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv.transfer.channel import ChannelEnd
from lmkv.transfer.ucx import api as ucx_api
from lmkv.transfer.ucx.api import UcxRequest
from lmkv.transfer.ucx.wire import GRANTED, HEAD, HELLO, HELLO_BYTES, MAX_RANGES, RANGE

logger = logging.getLogger(__name__)

MAX_READERS = 256
"""Connections of readers. Beyond them, those that have not read for the longest time are closed; see `Places`."""
MAX_STRANGERS = 64
"""Connections before their hello. Beyond them, the oldest ones are closed: UCX does not report their address."""
START_SECONDS = 10.0
CLOSE_SECONDS = 3.0
TICK_MILLISECONDS = 200
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
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            worker = ucx_api.make_worker(self._api)
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
                worker.progress_worker_event(TICK_MILLISECONDS)
                for endpoint in list(self._loops):
                    self._advance(endpoint)
                while self._lost:
                    self._close(self._lost.pop())
        except Exception:
            logger.exception("the UCX server failed; peers can no longer read from this node")
        finally:
            del listener
            pending = [request for _, waiting in self._loops.values() for request in waiting]
            ucx_api.close(worker, list(self._loops), pending)
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
            endpoint.close_blocking(ucx_api.CLOSE_NANOSECONDS, 1)

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
