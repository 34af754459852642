"""One `Commit` of a handoff: the chunks that the prefill's node announces, read into the room reserved for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from lmkv.errors import BadMessage, LmkvError
from lmkv.keys import ChunkKey
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.batches import batched
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.fetch.pending_writes import PendingWrites
from lmkv_server.node.fetch.pipeline import TransferPipeline
from lmkv_server.node.handoff.device_buffer import DeviceBuffer
from lmkv_server.node.handoff.state import Handoff
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.peers.extents import PeerChunk, peer_chunk

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Approximate size of one read: while one piece is verified, the next ones are read."""
READS_AHEAD = 2
READ_SECONDS = 10.0
"""A read that takes longer has failed."""


class HandoffTransfer:
    """A `Transfer` of the pipeline. `close` must be called when the pipeline has run."""

    reads_ahead = READS_AHEAD

    def __init__(
        self,
        handoff: Handoff,
        connection: PeerConnection,
        request: pb.CommitRequest,
        pipeline: TransferPipeline,
        buffer: DeviceBuffer | None,
    ) -> None:
        """`buffer` is the device buffer that the handoff's chunks are read into, if it is not the pool.

        Raises `BadMessage` if an extent of the request is invalid.
        """
        self.damaged: list[int] = []
        """Chunks that were damaged on arrival."""
        self.received: list[Chunk] = []
        """Chunks that were read, verified and committed."""
        self._handoff = handoff
        self._connection = connection
        self._grant_id = request.read_grant_id
        self._pipeline = pipeline
        self._buffer = buffer
        offered = dict(_offered(handoff, connection, request))
        self._reserved = handoff.begin(offered, pipeline.tier)
        self._begun = frozenset(self._reserved)
        self._pieces = iter(batched([offered[index] for index in self._reserved], PIECE_BYTES))

    @property
    def tier(self) -> HostTier:
        return self._handoff.destination

    @property
    def keys(self) -> Sequence[ChunkKey]:
        return self._handoff.keys

    def parent(self, index: int) -> ChunkKey | None:
        return self._handoff.parent(index)

    @property
    def fingerprint(self) -> bytes:
        return self._handoff.spec.fingerprint

    @property
    def instance_id(self) -> str:
        return self._connection.instance_id

    def next_batch(self) -> Sequence[PeerChunk]:
        return next(self._pieces, ())

    def reserve(self, chunk: PeerChunk) -> Reservation | None:
        return self._reserved.pop(chunk.index)

    async def read(self, writes: PendingWrites) -> Sequence[int] | None:
        buffer = self._buffer
        if buffer is None:
            return await self._pipeline.read(self._connection, writes, READ_SECONDS, self._grant_id)
        try:
            return await buffer.read(self._connection, writes, READ_SECONDS)
        except LmkvError as error:
            if not buffer.closed and self._connection.nixl_metadata:
                self._connection.nixl_metadata = b""
                logger.warning(
                    "handoffs from %s use the pool instead of the device buffer from now on: %s",
                    self._connection.name,
                    error,
                )
            raise

    def is_missing(self, index: int) -> bool:
        return index in self._begun

    def commit(self, chunks: Iterable[tuple[int, Chunk]]) -> None:
        for index, chunk in chunks:
            self._handoff.commit(index, chunk, self._pipeline.tier)
            self.received.append(chunk)

    def reject(self, index: int) -> None:
        self.damaged.append(index)

    def end_batch(self, indices: Sequence[int]) -> None:
        """A chunk that was not committed fails the handoff, in `close`."""

    def close(self) -> None:
        """Fails the handoff if chunks were not committed, and releases the room of those whose read never began."""
        self._handoff.fail(self._begun)
        for reserved in self._reserved.values():
            self.tier.give_back(reserved.offset)
        self._reserved.clear()


def _offered(
    handoff: Handoff, connection: PeerConnection, request: pb.CommitRequest
) -> Iterator[tuple[int, PeerChunk]]:
    """The chunks that the request names, by index. Raises `BadMessage` if one is invalid."""
    for index, chunk in zip(request.indices, request.chunks, strict=True):
        if not 0 <= index < len(handoff.keys):
            raise BadMessage(f"the handoff has no chunk {index}", field="indices")
        yield index, peer_chunk(index, chunk, handoff.token_count_of(index), handoff.spec, connection.regions)
