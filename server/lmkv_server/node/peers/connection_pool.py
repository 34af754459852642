"""The peers that a node is connected with, by what a coordinator or the `Directory` says of them.

Used by `Peers` and by both sides of handoffs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import KvSpecMismatch, LmkvError
from lmkv.spec import KvSpec
from lmkv.transfer import Channels
from lmkv.transfer.bandwidth import Bandwidth
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.peers.connection import PeerConnection

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Peers to stay connected with; beyond these the one that was not used for longest is left."""
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
RELEASE_SECONDS = 0.5


class PeerConnectionPool:
    """At most one connection to each peer. One event loop owns it. It ends by `aclose`."""

    def __init__(
        self, *, instance_id: str, epoch: int, channels: Channels, host: str, credentials: Credentials = rpc.PLAINTEXT
    ) -> None:
        """`instance_id` and `epoch` are the own ones; `host` is what peers know this machine by."""
        self.spec_mismatches = 0
        """Times that a peer turned out to share nothing with one of the own specs."""
        self._instance_id = instance_id
        self._epoch = epoch
        self._channels = channels
        self._host = host
        self._credentials = credentials
        self._by_instance: OrderedDict[str, PeerConnection] = OrderedDict()  # least recently used first
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Leaves all peers. Idempotent."""
        if self._tasks:  # grants to give back; each is bounded
            await asyncio.wait(self._tasks)
        for connection in self._by_instance.values():
            await connection.close()
        self._by_instance.clear()

    def get(self, holder: Holder) -> PeerConnection | None:
        """The connection to a holder; None if that is this node, has no address, or is an earlier epoch of a peer."""
        known = self._by_instance.get(holder.instance_id)
        outdated = known is not None and known.epoch > holder.epoch
        if holder.instance_id == self._instance_id or not holder.peer_address or outdated:
            return None
        if known and (known.epoch, known.address) == (holder.epoch, holder.peer_address):
            self._by_instance.move_to_end(holder.instance_id)
            return known
        if known:
            self._leave(known)
        connection = PeerConnection(
            self._instance_id, self._epoch, self._channels, holder, self._note_mismatch, self._credentials
        )
        self._by_instance[holder.instance_id] = connection
        if len(self._by_instance) > MAX_CONNECTIONS:
            self._leave(self._by_instance.popitem(last=False)[1])
        return connection

    def bandwidth(self, instance_id: str) -> Bandwidth:
        """How fast bytes have come from a peer; one that nothing was measured of if there is no connection."""
        connection = self._by_instance.get(instance_id)
        return connection.bandwidth if connection else Bandwidth()

    def is_near(self, connection: PeerConnection) -> bool:
        """Whether the peer is on this host."""
        return connection.address.rpartition(":")[0] in {self._host, *LOOPBACK}

    # --- Behind the caller's back --------------------------------------------------------------------------------

    def introduce(
        self, connection: PeerConnection, spec: KvSpec, timeout_seconds: float, *, by_nixl: bool = False
    ) -> None:
        """Agrees with a peer ahead of the first read, behind the caller's back; `by_nixl`: for engines' workers too."""
        self._spawn(self._introduced(connection, spec, timeout_seconds, by_nixl))

    async def _introduced(
        self, connection: PeerConnection, spec: KvSpec, timeout_seconds: float, by_nixl: bool
    ) -> None:
        try:
            await connection.agree(spec, timeout_seconds)
        except LmkvError as error:  # whoever reads will be told
            logger.warning("cannot agree with %s: %s", connection.name, error)
            return
        try:
            if by_nixl:
                await connection.agree_on_nixl(spec, timeout_seconds)
        except LmkvError as error:
            logger.warning("what %s hands over comes through the pool, not to the device: %s", connection.name, error)

    def release(self, connection: PeerConnection, grant_id: str, damaged: Sequence[int] = ()) -> asyncio.Task[None]:
        """Gives a grant back, behind the caller's back, and says which of its extents came damaged. Soon done."""
        return self._spawn(connection.release(grant_id, RELEASE_SECONDS, damaged))

    def withdraw(self, connection: PeerConnection, request_id: str) -> asyncio.Task[None]:
        """Ends a handoff to a peer that no request will load, behind the caller's back. Soon done."""
        return self._spawn(connection.withdraw(request_id, RELEASE_SECONDS))

    def release_once_granted(self, connection: PeerConnection, acquiring: asyncio.Task[pb.AcquireResponse]) -> None:
        """Gives back the grant of a call that nobody waits for any more."""
        self._spawn(self._released(connection, acquiring))

    async def _released(self, connection: PeerConnection, acquiring: asyncio.Task[pb.AcquireResponse]) -> None:
        try:
            response = await asyncio.wait_for(acquiring, RELEASE_SECONDS)
        except (LmkvError, TimeoutError):
            return  # if there is a grant, it expires
        if response.grant.grant_id:
            await connection.release(response.grant.grant_id, RELEASE_SECONDS)

    def _leave(self, connection: PeerConnection) -> None:
        self._spawn(self._left(connection))

    async def _left(self, connection: PeerConnection) -> None:
        await connection.close()
        try:
            await self._channels.remove_peer(connection.name)
        except LmkvError as error:
            logger.debug("%s is not forgotten by its channel: %s", connection.name, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_mismatch(self, instance_id: str, error: KvSpecMismatch) -> None:
        self.spec_mismatches += 1
        logger.warning(
            "no chunks are shared with %s: %s is %s there, %s here",
            instance_id,
            error.metadata.get("field", "the spec"),
            error.metadata.get("own_value", "another"),
            error.metadata.get("other_value", "another"),
        )
