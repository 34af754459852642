"""The connections to peers, and the calls to them that no caller waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError
from lmkv.spec import KvSpec
from lmkv.transfer import Channels
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.peers.connection import PeerConnection

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Most connections; beyond these the least recently used one is closed."""
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
RELEASE_SECONDS = 0.5
CLOSE_SECONDS = 2 * RELEASE_SECONDS
"""Longest time that a pool takes to close connections and to release grants when it ends; peers end those left."""


class PeerConnectionPool:
    """Keeps at most one connection to each peer, until `aclose`. One event loop owns it."""

    def __init__(
        self, *, instance_id: str, epoch: int, channels: Channels, host: str, credentials: Credentials = rpc.PLAINTEXT
    ) -> None:
        """`instance_id` and `epoch` are this node's; `host` is its address: peers at the same one are near."""
        self.instance_id = instance_id
        self._epoch = epoch
        self._channels = channels
        self._host = host
        self._credentials = credentials
        self.on_connected: Callable[[PeerConnection, KvSpec], object] = lambda *_: None
        """Called when a peer's memory can be read, once per connection and spec."""
        self._by_instance: OrderedDict[str, PeerConnection] = OrderedDict()  # least recently used first
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Closes all connections. Idempotent."""
        if self._tasks:  # grants to release
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in self._by_instance.values():
            await connection.close()
        self._by_instance.clear()

    def get(self, holder: Holder) -> PeerConnection | None:
        """The connection to a holder; None if that is this node, has no address, or is an earlier epoch of a peer."""
        known = self._by_instance.get(holder.instance_id)
        outdated = known is not None and known.epoch > holder.epoch
        if holder.instance_id == self.instance_id or not holder.peer_address or outdated:
            return None
        if known and (known.epoch, known.address) == (holder.epoch, holder.peer_address):
            self._by_instance.move_to_end(holder.instance_id)
            return known
        if known:
            self._close(known)
        connection = PeerConnection(self.instance_id, self._epoch, self._channels, holder, self._credentials)
        connection.on_connected = lambda spec: self.on_connected(connection, spec)
        self._by_instance[holder.instance_id] = connection
        if len(self._by_instance) > MAX_CONNECTIONS:
            self._close(self._by_instance.popitem(last=False)[1])
        return connection

    def find(self, instance_id: str) -> PeerConnection | None:
        """The connection to this peer, if there is one."""
        return self._by_instance.get(instance_id)

    def is_near(self, connection: PeerConnection) -> bool:
        """Whether the peer is on this host."""
        return connection.address.rpartition(":")[0] in {self._host, *LOOPBACK}

    # --- Calls in the background -------------------------------------------------------------------------------

    def connect(
        self, connection: PeerConnection, spec: KvSpec, timeout_seconds: float, *, by_nixl: bool = False
    ) -> asyncio.Task[None]:
        """Connects to a peer ahead of the first read; `by_nixl`: for reads by engines' workers too."""
        return self._spawn(self._connect(connection, spec, timeout_seconds, by_nixl))

    async def _connect(self, connection: PeerConnection, spec: KvSpec, timeout_seconds: float, by_nixl: bool) -> None:
        try:
            await connection.connect(spec, timeout_seconds)
        except LmkvError as error:  # the first read raises it
            logger.warning("cannot connect to %s: %s", connection.name, error)
            return
        try:
            if by_nixl:
                await connection.connect_nixl(spec, timeout_seconds)
        except LmkvError as error:
            logger.warning("handoffs from %s use the pool instead of the device buffer: %s", connection.name, error)

    def release(self, connection: PeerConnection, grant_id: str, damaged: Sequence[int] = ()) -> asyncio.Task[None]:
        """Releases a grant; `damaged` are its extents that arrived damaged. The task ends within `RELEASE_SECONDS`."""
        return self._spawn(connection.release(grant_id, RELEASE_SECONDS, damaged))

    def withdraw(self, connection: PeerConnection, handoff_id: str) -> asyncio.Task[None]:
        """Withdraws a handoff to a peer. The task ends within `RELEASE_SECONDS`."""
        return self._spawn(connection.withdraw(handoff_id, RELEASE_SECONDS))

    def release_once_granted(self, connection: PeerConnection, acquiring: asyncio.Task[pb.AcquireResponse]) -> None:
        """Releases the grant of a call whose caller was cancelled, if its answer arrives within its timeout."""
        self._spawn(self._released(connection, acquiring))

    async def _released(self, connection: PeerConnection, acquiring: asyncio.Task[pb.AcquireResponse]) -> None:
        try:
            response = await acquiring
        except LmkvError:
            return  # a grant that there may be expires
        if response.grant.grant_id:
            await connection.release(response.grant.grant_id, RELEASE_SECONDS)

    def _close(self, connection: PeerConnection) -> None:
        self._spawn(self._closed(connection))

    async def _closed(self, connection: PeerConnection) -> None:
        await connection.close(RELEASE_SECONDS)  # gRPC never frees the memory of calls that it cancels here
        current = self._by_instance.get(connection.instance_id)
        if current and current.name == connection.name:
            return  # the same peer at another address: its memory is used as before
        try:
            await self._channels.remove_peer(connection.name)
        except LmkvError as error:
            logger.debug("cannot remove %s from its channel: %s", connection.name, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
