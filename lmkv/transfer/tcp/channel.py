"""The TCP channel: plain sockets, for hosts without RDMA or a transfer library (docs/contribute/transfer.md).

A reader keeps idle connections to each peer and uses one per read. `server` is the owner's side. With `ChannelEnd.tls`
both ends use TLS, and refuse peers that do not.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from lmkv.errors import ChannelUnsupported, Unreachable
from lmkv.transfer.channel import ChannelEnd, Copy, PeerReader, Region, unwrap, wrap
from lmkv.transfer.tcp.server import GRANTED, MAX_RANGES, REFUSED, Connection, TcpServer, Tls, hello, request
from lmkv.transfer.threads import Job, ThreadedChannel, ThreadedRead

READ_THREADS = 8
"""Concurrent reads; others wait."""
MAX_IDLE = 4
"""Idle connections kept per peer."""
CONNECT_SECONDS = 2.0
HANDSHAKE_SECONDS = 5.0


class TcpChannel(ThreadedChannel["_TcpPeer"]):
    """The `Channel` contract over TCP sockets. Created by `open`."""

    name = "tcp"

    def __init__(self, end: ChannelEnd) -> None:
        super().__init__(end, READ_THREADS)
        self._end = end
        self._pool = end.pool
        self._tls = Tls(end.tls) if end.tls else None
        self._server = TcpServer(end, self._tls)

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel. Raises `ConfigError` if it cannot listen."""
        channel = cls(end)
        channel._server.start()
        return channel

    def metadata_for(self, reader: PeerReader) -> bytes:
        fields: dict[str, Any] = {"host": self._end.host, "port": self._server.port, "token": reader.token.hex()}
        fields["tls"] = self._tls is not None
        return wrap(self.name, self._end, json.dumps(fields).encode())

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, payload = unwrap(self.name, peer_name, metadata)
        fields = json.loads(payload)
        self._check_encryption(peer_name, bool(fields.get("tls")))
        known = self._peers.get(peer_name)
        if known and known.metadata == metadata and known.idle:
            return
        peer = _TcpPeer(peer_name, metadata, region, fields, self._tls)
        connection = await asyncio.to_thread(peer.connect)
        await self.remove_peer(peer_name)
        self._peers[peer_name] = peer
        peer.keep(connection)

    async def aclose(self) -> None:
        await super().aclose()
        await self._server.aclose()

    def _make_read(self, peer: _TcpPeer, copies: Sequence[Copy], grant_id: str) -> ThreadedRead:
        connections = [connection] if (connection := peer.take()) else []
        part = partial(self._receive, peer, connections, copies, grant_id)

        def stop() -> None:
            for connection in connections:
                peer.keep(connection)

        return ThreadedRead(parts=[part] if copies else [], stop=stop)

    def _check_encryption(self, peer_name: str, is_encrypted: bool) -> None:
        if is_encrypted == (self._tls is not None):
            return
        who, not_who = (peer_name, self._end.name) if is_encrypted else (self._end.name, peer_name)
        raise ChannelUnsupported(
            f"{who} encrypts the transfer channel tcp and {not_who} does not; set transfer_encryption and the keys "
            "tls_cert, tls_key and tls_ca alike on both nodes",
            channel=self.name,
            peer=peer_name,
        )

    def _receive(
        self, peer: _TcpPeer, connections: list[Connection], copies: Sequence[Copy], grant_id: str, job: Job
    ) -> None:
        """Runs in a thread. A connection that can be reused is left in `connections`."""
        is_reused = bool(connections)
        connection = connections.pop() if is_reused else peer.connect()
        answer = GRANTED
        try:
            job.set_interrupt(connection.shut)
            for start in range(0, len(copies), MAX_RANGES):
                batch = copies[start : start + MAX_RANGES]
                asked = request(grant_id, [(copy.remote_address, copy.size_bytes) for copy in batch])
                answer = self._ask(connection, asked)
                if not answer and is_reused and not start:  # the owner closed it meanwhile, for other readers
                    job.check()
                    connection.close()
                    connection = peer.connect()
                    job.set_interrupt(connection.shut)
                    answer = self._ask(connection, asked)
                if answer == REFUSED:
                    break
                if answer != GRANTED:
                    raise Unreachable(f"{job.peer_name} closed the connection", peer=job.peer_name)
                for copy in batch:
                    self._fill(connection, copy, job)
            job.set_interrupt(_keep_open)  # raises if the read was abandoned meanwhile: the connection was shut down
        except OSError as error:
            connection.close()
            raise Unreachable(f"{job.peer_name} was lost: {error}", peer=job.peer_name) from None
        except BaseException:
            connection.close()
            raise
        connections.append(connection)
        if answer == REFUSED:
            raise Unreachable(f"{job.peer_name} refused the read: no live grant covers it", peer=job.peer_name)

    def _ask(self, connection: Connection, asked: bytes) -> bytes:
        """The first byte of the answer to a request; none if the owner has closed the connection."""
        try:
            connection.send(asked)
            return connection.receive()
        except ConnectionError:
            return b""

    def _fill(self, connection: Connection, copy: Copy, job: Job) -> None:
        """Receives one range into the pool."""
        start = copy.local_address - self._own.address
        with self._pool.buffer[start : start + copy.size_bytes] as target:
            if not connection.fill(target):
                raise Unreachable(f"{job.peer_name} is lost", peer=job.peer_name)


class _TcpPeer:
    """A peer's address and idle connections. Methods are called on the event loop, except `connect`."""

    def __init__(self, name: str, metadata: bytes, region: Region, fields: dict[str, Any], tls: Tls | None) -> None:
        self.name = name
        self.metadata = metadata
        self.region = region
        self.idle: list[Connection] = []
        self._address = (fields["host"], fields["port"])
        self._token = bytes.fromhex(fields["token"])
        self._tls = tls
        self._forgotten = False

    def connect(self) -> Connection:
        """Opens a connection. Raises `Unreachable` if the peer does not answer in time or refuses."""
        try:
            connection = socket.create_connection(self._address, CONNECT_SECONDS)
        except OSError as error:
            raise Unreachable(f"{self.name} does not answer: {error}", peer=self.name) from None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                connection.settimeout(HANDSHAKE_SECONDS)
                connection = self._tls.connect(connection, self._address[0])
            connection.sendall(hello(self._token))
            if connection.recv(1) != GRANTED:
                raise Unreachable(f"{self.name} refused the connection", peer=self.name)
            connection.settimeout(None)  # waits are interrupted by `shut` from here on
        except OSError as error:
            connection.close()
            raise Unreachable(f"{self.name} does not answer: {error}", peer=self.name) from None
        except BaseException:
            connection.close()
            raise
        return Connection(connection)

    def take(self) -> Connection | None:
        """Removes and returns an idle connection, if there is one."""
        if not self.idle:
            return None
        connection = self.idle.pop()
        asyncio.get_running_loop().remove_reader(connection.socket)
        return connection

    def keep(self, connection: Connection) -> None:
        """Keeps a connection for the next read, until the peer closes it."""
        if self._forgotten or connection.is_worn or len(self.idle) >= MAX_IDLE:
            connection.close()
            return
        self.idle.append(connection)
        asyncio.get_running_loop().add_reader(connection.socket, self._drop, connection)

    def forget(self) -> None:
        """Closes idle connections now, and busy connections after their read."""
        self._forgotten = True
        while connection := self.take():
            connection.close()

    def _drop(self, connection: Connection) -> None:
        asyncio.get_running_loop().remove_reader(connection.socket)
        self.idle.remove(connection)
        connection.close()


def _keep_open() -> None:
    """The interrupt of a read that has finished: the connection stays open."""
