"""The UCX channel, through ucxx: two-sided, because ucxx has no remote reads for Python (docs/contribute/transfer.md).

A reader has a UCX worker per connection, which the reading thread drives. `server` is the owner's side.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from lmkv.errors import Unreachable
from lmkv.transfer.access import PeerReader
from lmkv.transfer.channel import ChannelEnd, Copy, Region, find_peer
from lmkv.transfer.metadata import unwrap, wrap
from lmkv.transfer.threads import Job, Threads
from lmkv.transfer.ucx import api as ucx_api
from lmkv.transfer.ucx.api import UcxRequest
from lmkv.transfer.ucx.server import UcxServer
from lmkv.transfer.ucx.wire import HELLO, MAX_RANGES, request

READ_THREADS = 4
MAX_IDLE = 2
"""Idle connections kept per peer."""
CONNECT_SECONDS = 4.0


class UcxChannel:
    """The `Channel` contract over UCX. Created by `open`."""

    name = "ucx"

    def __init__(self, end: ChannelEnd) -> None:
        """Raises `ConfigError` if ucxx is missing or UCX does not start."""
        self._own = end.region
        self._pool = end.pool
        self._api = ucx_api.load()
        self._end = end
        self._server = UcxServer(self._api, end)
        self._port = self._server.start()
        self._peers: dict[str, _UcxPeer] = {}
        self._threads = Threads("lmkv-ucx", READ_THREADS)

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
        await self._run_read(peer_name, peer, [], CONNECT_SECONDS, lambda: None, "")
        self._peers[peer_name] = peer

    async def remove_peer(self, peer_name: str) -> None:
        if peer := self._peers.pop(peer_name, None):
            peer.forget()

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> None:
        peer = find_peer(self._peers, peer_name, copies, self._own, on_stopped)
        await self._run_read(peer_name, peer, copies, timeout_seconds, on_stopped, grant_id)

    def serve(self, needed: bool) -> None:
        """Does nothing: a blocking thread serves readers."""

    async def aclose(self) -> None:
        await self._threads.aclose()
        for peer_name in tuple(self._peers):
            await self.remove_peer(peer_name)
        await asyncio.to_thread(self._server.close)

    async def _run_read(
        self,
        peer_name: str,
        peer: _UcxPeer,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str,
    ) -> None:
        part = partial(self._receive, peer, copies, grant_id)
        await self._threads.run(peer_name, [part], timeout_seconds, on_stopped)

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
        self._worker = ucx_api.make_worker(api)
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
                self._worker.progress_worker_event(ucx_api.TICK_MILLISECONDS)
            each.check_error()
        self._pending.clear()

    def close(self) -> None:
        """Closes endpoint and worker: no more bytes arrive afterwards."""
        ucx_api.close(self._worker, [self._endpoint], self._pending)
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
        """Closes idle connections now, and busy ones after their read."""
        self._forgotten = True
        while self.idle:
            self.idle.pop().close()
