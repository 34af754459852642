"""Reads what prefills hand over into the room kept for it, verifies it, makes it visible. For `Receiver`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lmkv.errors import BadMessage, LmkvError
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.pieces import pieces
from lmkv_server.node.fetch.fetcher import Peers
from lmkv_server.node.fetch.inflight import Incoming, PendingWrites
from lmkv_server.node.handoff.device_buffers import DeviceBuffers
from lmkv_server.node.handoff.state import Handoff
from lmkv_server.node.peers.connection import PeerConnection

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""One read is about this large: while it runs, the one before it is verified."""
READS_AHEAD = 2
READ_SECONDS = 10.0
"""A prefill's node whose bytes take longer has failed."""


class Intake:
    """What comes into one decode's node."""

    def __init__(self, peers: Peers, buffers: DeviceBuffers) -> None:
        self.received_chunks = 0
        """Chunks that were read, verified and made visible since the start."""
        self.received_bytes = 0
        """Bytes of these."""
        self.device_bytes = 0
        """Bytes of these that went into device buffers."""
        self._peers = peers
        self._tier = peers.tier
        self._buffers = buffers

    async def bring(self, handoff: Handoff, connection: PeerConnection, request: pb.CommitRequest) -> list[int]:
        """Brings what a `Commit` names and the handoff still wants; returns what came damaged.

        Reads in pieces. Raises `BadMessage` if an offer makes no sense, or why a read failed, after the others have
        ended. Cancelled, it leaves no room reserved but of memory that a transfer may still write to.
        """
        incoming = self._incoming(handoff, request, connection)
        ahead = asyncio.Semaphore(READS_AHEAD)
        damaged: list[int] = []
        failures: list[LmkvError] = []

        async def read(piece: Sequence[Incoming], landing: PendingWrites) -> None:
            try:
                async with ahead:
                    sums = await self._read(handoff, connection, piece, landing, request.read_grant_id)
                damaged.extend(await self._verify(handoff, connection, piece, sums, landing))
            except LmkvError as error:
                failures.append(error)

        landings = [(piece, self._landing(handoff, piece)) for piece in pieces(incoming, PIECE_BYTES)]
        try:
            async with asyncio.TaskGroup() as reads:
                for piece, landing in landings:
                    reads.create_task(read(piece, landing))
        finally:
            handoff.lose(chunk.index for chunk in incoming)
            for _, landing in landings:
                landing.close()
                if landing.quarantined:
                    self._peers.quarantine(landing)
        if failures:
            raise failures[0]
        return damaged

    def _incoming(self, handoff: Handoff, request: pb.CommitRequest, connection: PeerConnection) -> list[Incoming]:
        """What is to be read: the chunks that are still wanted. Raises `BadMessage` if an offer makes no sense."""
        regions = connection.regions
        for index, extent in zip(request.indices, request.extents, strict=True):
            if not (
                0 <= index < len(handoff.keys)
                and 0 <= extent.region < len(regions)
                and extent.token_count == handoff.tokens_of(index)
                and extent.size_bytes == handoff.size_of(index)
                and 0 <= extent.offset <= regions[extent.region].size_bytes - extent.size_bytes
            ):
                raise BadMessage(f"a handoff cannot have chunk {index} at {extent}", field="extents")
        offers = dict(zip(request.indices, request.extents, strict=True))
        return [
            Incoming(
                index=index,
                remote_address=regions[offers[index].region].address + offers[index].offset,
                checksum=offers[index].checksum,
                token_count=offers[index].token_count,
                size_bytes=offers[index].size_bytes,
                reserved=reserved,
            )
            for index, reserved in handoff.begin(offers, self._tier).items()
        ]

    async def _read(
        self,
        handoff: Handoff,
        connection: PeerConnection,
        piece: Sequence[Incoming],
        landing: PendingWrites,
        grant_id: str,
    ) -> list[int] | None:
        """Reads one piece into the handoff's room; see `Peers.read`."""
        buffer = self._buffers.owning(handoff.room)
        if buffer is None:
            return await self._peers.read(connection, piece, landing, READ_SECONDS, grant_id)
        try:
            return await buffer.read(connection, piece, landing, READ_SECONDS)
        except LmkvError as error:
            if not buffer.closed and connection.nixl_metadata:
                connection.nixl_metadata = b""
                logger.warning(
                    "what %s hands over comes through the pool from now on, not to the device: %s",
                    connection.name,
                    error,
                )
            raise

    def _landing(self, handoff: Handoff, piece: Sequence[Incoming]) -> PendingWrites:
        landing = PendingWrites(handoff.room)
        for chunk in piece:
            landing.adopt(chunk.reserved)
        return landing

    async def _verify(
        self,
        handoff: Handoff,
        connection: PeerConnection,
        piece: Sequence[Incoming],
        sums: Sequence[int] | None,
        landing: PendingWrites,
    ) -> list[int]:
        """Commits what is what the prefill committed; returns what came damaged."""
        damaged = []
        for chunk, intact in zip(piece, await self._peers.verifier.intact(piece, sums), strict=True):
            if not intact:
                damaged.append(chunk.index)
                self._peers.checksum_mismatches += 1
                logger.warning("chunk %d of handoff %s came damaged", chunk.index, handoff.request_id)
            elif committed := landing.commit(handoff.keys, handoff.spec.fingerprint, chunk):
                handoff.land(chunk.index, committed, self._tier)
                self._peers.count(connection.instance_id, committed)
                self.received_chunks += 1
                self.received_bytes += committed.size_bytes
                self.device_bytes += committed.size_bytes * (committed.tier is not self._tier)
        return damaged
