"""The decode's side of handoffs: reads the chunks that prefills announce, and delivers them to the decode's requests.

Called by `PeerService` (`Allocate`, `Commit`, `Release`), and by lookups and loads that name a handoff.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf import duration_pb2

from lmkv.errors import BadMessage, GrantNotFound, KvSpecMismatch, LmkvError
from lmkv.keys import ChunkKey, listed_keys
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.spec import KvSpec
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation, batched
from lmkv_server.node.fetch.pipeline import PendingWrites, TransferPipeline
from lmkv_server.node.handoff.device_buffer import DeviceBuffer, DeviceBuffers
from lmkv_server.node.handoff.state import HandedPrompt, Handoff, HandoffSource, HandoffState
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.peers.connection import PeerChunk, PeerConnection, peer_chunk
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.peers.directory import InstanceDirectory
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import Progress

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Approximate size of one read: while one piece is verified, the next pieces are read."""
READS_AHEAD = 2
READ_SECONDS = 10.0
"""A read that takes longer has failed."""
CHANNEL_SECONDS = 2.0
"""A prefill whose channel is not known by then sends its chunks as they are."""


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
        if chunk.decoded_bytes and not handoff.codec:
            raise BadMessage("the handoff names no codec", field="chunks")
        yield index, peer_chunk(index, chunk, handoff.token_count_of(index), handoff.spec, connection.regions)


MAX_KEYS = 4096
ANNOUNCE_SECONDS = 1.0
"""The time that a request that arrives before its handoff is announced waits for the announcement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverStats:
    """Counts the transfers of handoffs to this node since the start."""

    chunk_count: int = 0
    """Chunks that were read, verified and committed."""
    received_bytes: int = 0
    device_bytes: int = 0
    """Bytes of these that were read into device buffers."""


class HandoffReceiver:
    """The handoffs to one node. One event loop owns it; to be used as an async context manager."""

    def __init__(
        self,
        handoffs: HandoffTable,
        pipeline: TransferPipeline,
        connections: PeerConnectionPool,
        engines: EngineSessions,
        directory: InstanceDirectory,
    ) -> None:
        """`directory` finds the prefills' nodes.

        Unless the node prefers NIXL, engines lend no device buffers, and all handoffs use the pool: by TCP a buffer is
        slower than the pool with `shm` or `tcp`.
        """
        self.handoffs = handoffs
        self.buffers = DeviceBuffers(
            engines,
            handoffs.buffer_bytes if pipeline.prefers_nixl else 0,
            verify=pipeline.verifier.enabled,
            on_close=self._detach_buffer,
        )
        """The device buffers that engines have lent for handoffs to them."""
        self._directory = directory
        self._pipeline = pipeline
        self._connections = connections
        self._engines = engines
        self._stats = ReceiverStats()
        self._announced: dict[str, asyncio.Event] = {}
        self._timer = DeadlineTimer(self._expire)

    async def __aenter__(self) -> HandoffReceiver:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends every handoff. Idempotent."""
        await self._timer.aclose()
        self.handoffs.clear()

    def stats(self) -> ReceiverStats:
        """The counters as they are now."""
        return self._stats

    # --- Calls of prefills ---------------------------------------------------------------------------------------

    async def allocate(self, request: pb.AllocateRequest, session_id: str, caller: str = "") -> pb.AllocateResponse:
        """Admits a handoff and reserves room for it; epoch and session were checked. `caller` has a share of places.

        The prefill's address is the one that the fleet knows, not one that the request names. Raises `KvSpecMismatch`,
        `InstanceNotFound`, and what `HandoffTable.allocate` raises.
        """
        spec = self._engines.spec(request.fingerprint)
        if spec is None:
            raise KvSpecMismatch("no engine here shares chunks of this spec", fingerprint=request.fingerprint.hex())
        if request.instance_id == self._connections.instance_id:
            raise BadMessage("instance_id is this node's own", field="instance_id")
        holder = await self._directory.find_epoch(request.instance_id, request.epoch)
        source = HandoffSource(
            instance_id=holder.instance_id,
            epoch=holder.epoch,
            address=holder.peer_address,
            session_id=session_id,
        )
        connection = self._connection(source)
        keys = listed_keys(request.chunk_keys, limit=MAX_KEYS)
        now = time.monotonic()
        buffer = self.buffers.find(spec)
        destination = buffer.tier if buffer and connection.nixl_metadata else None
        prompt = HandedPrompt(
            handoff_id=request.handoff_id, spec=spec, chunk_keys=keys, token_count=request.token_count
        )
        handoff = self.handoffs.allocate(prompt, source, now, destination, caller)
        self._timer.changed()
        if handoff.is_open:
            connecting = self._connections.connect(connection, spec, READ_SECONDS, by_nixl=buffer is not None)
            if destination is None:
                handoff.codec = await self._codec(connection, spec, connecting)
        if announced := self._announced.get(handoff.handoff_id):
            announced.set()
        timeout = duration_pb2.Duration()
        timeout.FromNanoseconds(round(self.handoffs.timeout_seconds * 1e9))
        return pb.AllocateResponse(
            grant_id=handoff.grant_id, missing=handoff.missing, timeout=timeout, codec=handoff.codec
        )

    async def _codec(self, connection: PeerConnection, spec: KvSpec, connecting: asyncio.Task[None]) -> str:
        """The codec in which chunks of a handoff are asked for: it depends on the channel, once that is known."""
        if not connection.channel and self._pipeline.codec_for(spec, ""):
            await asyncio.wait([connecting], timeout=CHANNEL_SECONDS)
        return self._pipeline.codec_for(spec, connection.channel) if connection.channel else ""

    async def commit(self, request: pb.CommitRequest, session_id: str) -> pb.CommitResponse:
        """Reads the chunks that the request names; `session_id` is the caller's session, empty if it has none.

        Raises `GrantNotFound` if the handoff has ended, `BadMessage` if an extent is invalid, and why a read failed.
        Cancelled, it leaves no extent reserved but those that a transfer may still write to.
        """
        handoff = self.handoffs.get(request.grant_id, session_id)
        if handoff.state in (HandoffState.ABORTED, HandoffState.EXPIRED):
            raise GrantNotFound(f"handoff {handoff.handoff_id!r} is {handoff.state.value}", state=handoff.state.value)
        if len(request.indices) != len(request.chunks):
            raise BadMessage("indices and chunks differ in number", field="chunks")
        damaged: list[int] = []
        self.handoffs.renew(handoff, time.monotonic() + (2 * READ_SECONDS if request.indices else 0))
        try:
            if request.indices:
                connection = self._connection(handoff.source)
                await connection.connect(handoff.spec, READ_SECONDS)
                damaged = await self._read(handoff, connection, request)
        finally:
            self.handoffs.renew(handoff, time.monotonic())
            self._timer.changed()
        return pb.CommitResponse(damaged=damaged)

    async def _read(self, handoff: Handoff, connection: PeerConnection, request: pb.CommitRequest) -> list[int]:
        """Reads, verifies and commits the chunks that are still missing; returns those that were damaged."""
        buffer = self.buffers.with_tier(handoff.destination)
        transfer = HandoffTransfer(handoff, connection, request, self._pipeline, buffer)
        try:
            await self._pipeline.run(transfer)
        finally:
            transfer.close()
            received_bytes = sum(chunk.size_bytes for chunk in transfer.received)
            self._stats = ReceiverStats(
                chunk_count=self._stats.chunk_count + len(transfer.received),
                received_bytes=self._stats.received_bytes + received_bytes,
                device_bytes=self._stats.device_bytes + (received_bytes if buffer else 0),
            )
        return transfer.damaged

    def drop(self, handoff_id: str, session_id: str | None = None) -> None:
        """Withdraws a handoff that was refused or that no request will load; a request that waits for it stops waiting.

        `session_id` is that of a prefill, which may withdraw only its own; None: this node's engine.
        """
        if not self.handoffs.withdraw(handoff_id, time.monotonic(), session_id):
            return
        if announced := self._announced.get(handoff_id):
            announced.set()
        self._timer.changed()

    def release(self, grant_id: str, session_id: str) -> bool:
        """Ends a handoff: its prefill sends no more chunks. Whether the session has a handoff of this grant."""
        found = self.handoffs.end(grant_id, session_id, time.monotonic())
        self._timer.changed()
        return found

    def _connection(self, source: HandoffSource) -> PeerConnection:
        holder = Holder(instance_id=source.instance_id, epoch=source.epoch, peer_address=source.address)
        connection = self._connections.get(holder)
        if connection is None:
            raise BadMessage(
                f"{source.instance_id!r} of epoch {source.epoch} at {source.address!r} cannot be read from",
                field="peer_address",
            )
        return connection

    # --- Requests of the decode ----------------------------------------------------------------------------------

    def claim(self, handoff_id: str, engine_id: str = "") -> Callable[[], None]:
        """A request for this handoff has arrived at an engine; the caller calls the result when the request ends."""
        self.handoffs.claim(handoff_id, self.buffers.tier_of(engine_id))

        def unclaim() -> None:
            self.handoffs.unclaim(handoff_id)
            self._timer.changed()

        return unclaim

    def promised(self, handoff_id: str, first: int, total: int) -> tuple[int, str]:
        """The number of chunks, of `total`, from `first` on that may arrive without a gap; the prefill's instance."""
        handoff = self.handoffs.find(handoff_id)
        if handoff is None:
            return (0 if self.handoffs.is_closed(handoff_id) else total - first), ""
        if not self.handoffs.is_loadable(handoff):
            return 0, ""
        return min(handoff.promised(first), total - first), handoff.source.instance_id

    async def follow(self, handoff_id: str, progress: Progress, timeout_seconds: float) -> None:
        """Adds chunks as they arrive, until none is missing, the handoff has ended, or the timeout."""
        deadline = time.monotonic() + timeout_seconds
        handoff = await self._announcement(handoff_id, min(timeout_seconds, ANNOUNCE_SECONDS))
        while handoff and self.handoffs.is_loadable(handoff) and (left := deadline - time.monotonic()) > 0:
            handoff.changed.clear()
            progress.find_own()
            arrived = {chunk.key: chunk for chunk in handoff.chunks}
            missing = [(index, arrived.get(progress.keys[index])) for index in sorted(progress.missing)]
            progress.add([(index, chunk) for index, chunk in missing if chunk])
            if not progress.missing or not handoff.is_open:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await handoff.changed.wait()

    async def _announcement(self, handoff_id: str, timeout_seconds: float) -> Handoff | None:
        """Waits until the handoff is announced; None if it is not, or is closed."""
        if not self.handoffs.find(handoff_id) and not self.handoffs.is_closed(handoff_id):
            announced = self._announced.setdefault(handoff_id, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_seconds):
                    await announced.wait()
            except TimeoutError:
                logger.warning("handoff %s was not announced within %.3g s", handoff_id, timeout_seconds)
            finally:
                self._announced.pop(handoff_id, None)
        return self.handoffs.find(handoff_id)

    def _detach_buffer(self, tier: HostTier) -> None:
        self.handoffs.detach_buffer(tier, time.monotonic())
        self._timer.changed()

    def _expire(self) -> float | None:
        """Ends the handoffs whose deadline has passed; returns the next deadline."""
        for handoff in self.handoffs.expire(time.monotonic()):
            logger.warning(
                "handoff %s expired: no message from %s for %.3g s",
                handoff.handoff_id,
                handoff.source.instance_id,
                self.handoffs.timeout_seconds,
            )
        return self.handoffs.next_expiry()
