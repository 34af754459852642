"""The handlers of `PeerService`, on the node's tier, read grants, channels and handoffs. Every node serves it.

The channels make progress while a peer has a grant, and for `LINGER_SECONDS` before and after. `Inspector` verifies
chunks of this node that arrived damaged at a peer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf import timestamp_pb2

from lmkv.auth.caller import caller_identity, client_identity
from lmkv.errors import BadMessage, Full, KvSpecMismatch, WrongInstance
from lmkv.keys import ChunkKey, listed_keys
from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.runtime.places import Places, most_of
from lmkv.spec import KvSpec
from lmkv.transfer import Channels
from lmkv.transfer.channel import new_grant_id
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.encoded_copies import EncodedCopies, offer_copies
from lmkv_server.node.handoff.receiver import HandoffReceiver
from lmkv_server.node.handoff.sender import LentChunks
from lmkv_server.node.serving.read_grants import PeerSessions, ReadGrants
from lmkv_server.node.sessions.session import add_granted
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.disk.tier import DiskTier

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Chunks that wait to be verified, of which one caller's reports may have 7/8; reports beyond these are ignored, since
peers repeat them."""


class Inspector:
    """Drops chunks whose bytes do not match their checksum in this node's memory; a peer's report alone drops nothing.

    To be used as an async context manager, on the loop that owns the tier.
    """

    def __init__(self, tier: HostTier, pool: Pool) -> None:
        self._damaged_count = 0
        self._tier = tier
        self._pool = pool
        self._pending = Places[int]("chunks to verify", MAX_PENDING, most_of(MAX_PENDING))
        """The chunks to verify, by generation; each is held."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "lmkv-inspect")

    @property
    def damaged_count(self) -> int:
        """Chunks that were damaged, and dropped, since the start."""
        return self._damaged_count

    async def __aenter__(self) -> Inspector:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Releases the chunks that were not verified. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def inspect(self, chunks: Iterable[Chunk], peer_id: str, caller: str = "") -> None:
        """Verifies chunks that a peer found damaged, on a thread, and drops those that are.

        They take places of the share of the caller that has reported them.
        """
        for chunk in chunks:
            if chunk.dropped or chunk.generation in self._pending:
                continue
            try:
                self._pending.take(chunk.generation, caller)
            except Full:
                return
            self._tier.hold([chunk])
            task = asyncio.create_task(self._verify(chunk, peer_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _verify(self, chunk: Chunk, peer_id: str) -> None:
        verifying = asyncio.get_running_loop().run_in_executor(self._thread, self._sum, chunk)
        try:
            found = await asyncio.shield(verifying)
        except asyncio.CancelledError:
            await asyncio.wait([verifying])  # the thread reads the bytes
            raise
        finally:
            self._pending.release(chunk.generation)
            self._tier.unhold([chunk])
        if found == chunk.checksum:
            logger.warning("chunk %s arrived damaged at %s, but is intact here", chunk.key.hex(), peer_id)
        elif not chunk.dropped:
            self._tier.drop([chunk.key], MissReason.DAMAGED)
            self._damaged_count += 1
            logger.error("chunk %s is damaged in this node's memory and was dropped", chunk.key.hex())

    def _sum(self, chunk: Chunk) -> int:
        return checksum(self._pool.buffer, chunk.offset, chunk.size_bytes)


MAX_ACQUIRE_KEYS = 4096
MAX_ID_BYTES = 256
MAX_PROMOTED_BYTES = 64 << 20
PROMOTED_SHARE = 8
"""Chunks on disk are read into the pool for a peer: `MAX_PROMOTED_BYTES` per call, and at most 1/8 of the pool."""
PROMOTE_SECONDS = 2.0
LINGER_SECONDS = 1.0
"""Time for which the channels make progress after `Init`, for the caller to connect, and after a grant.

A reader that has given up reads keeps their memory in quarantine until they have stopped.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedNode:
    """This node, of which peers read chunks, and which receives their handoffs."""

    instance_id: str
    epoch: int
    tier: HostTier
    pool: Pool
    """The memory of `tier`, at the address that peers read from."""
    engines: EngineSessions
    disk: DiskTier | None = None
    """Chunks on disk are read into `tier` for peers."""
    codec: ChunkCodec | None = None
    """The codec of transfers between hosts."""


class PeerService(pb_grpc.PeerServiceServicer):
    """The handlers, as `peer_service.proto` specifies them. An async context manager; one event loop owns it."""

    def __init__(
        self,
        node: ServedNode,
        channels: Channels,
        inspector: Inspector,
        receiver: HandoffReceiver,
        *,
        grant_ttl_seconds: float,
    ) -> None:
        self.sessions = PeerSessions(channels.access)
        self._copies = EncodedCopies(node.tier, node.pool, node.codec)
        self.grants = ReadGrants(node.tier, channels.access, node.pool.address, self._copies)
        self._instance_id = node.instance_id
        self._epoch = node.epoch
        self._tier = node.tier
        self._engines = node.engines
        self._channels = channels
        self._region = pb.Region(address=node.pool.address, size_bytes=node.tier.size_bytes)
        self._grant_ttl_seconds = grant_ttl_seconds
        self._inspector = inspector
        self._receiver = receiver
        self._disk = node.disk
        self._lending_count = 0
        self._serve_until = 0.0
        self._timer = DeadlineTimer(self._expire)

    async def __aenter__(self) -> PeerService:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends every grant. Idempotent."""
        await self._timer.aclose()
        self.grants.clear()
        await self._copies.aclose()
        self._serve_until = 0.0
        self._serve()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the pool that encoded copies take."""
        return self._copies.used_bytes

    async def Init(self, request: pb.InitRequest, context: Any) -> pb.InitResponse:
        if request.peer_instance_id or request.peer_epoch:
            self._check_epoch(request.peer_epoch, request.peer_instance_id)
        if not 0 < len(request.instance_id.encode()) <= MAX_ID_BYTES or not request.instance_id.isprintable():
            raise BadMessage(f"instance_id must have 1 to {MAX_ID_BYTES} bytes, all printable", field="instance_id")
        spec = KvSpec.from_proto(request.spec)
        self._check_spec(spec)
        channel = await self._channels.offer(request.channels) if request.channels else None
        session = self.sessions.open(caller_identity(context), request.instance_id, request.epoch, request.session_id)
        response = pb.InitResponse(instance_id=self._instance_id, epoch=self._epoch, session_id=session.session_id)
        response.kv_inputs.extend(writer.to_proto() for writer in self._engines.writers(spec.fingerprint))
        if channel:
            self._linger()
            response.channel, response.channel_metadata = channel.name, channel.metadata_for(session.reader)
            response.regions.append(self._region)
        return response

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:
        self._check_epoch(request.peer_epoch)
        session = self.sessions.get(caller_identity(context), request.session_id)
        keys = listed_keys(request.chunk_keys, limit=MAX_ACQUIRE_KEYS)
        async with self._promoted(request.fingerprint, keys):
            held = [(index, chunk) for index, key in enumerate(keys) if (chunk := self._tier.get(key))]
            held = [(index, chunk) for index, chunk in held if chunk.fingerprint == request.fingerprint]
            self._tier.use(chunk for _, chunk in held)
            wish = request.ttl.ToNanoseconds() / 1e9
            ttl_seconds = min(wish, self._grant_ttl_seconds) if wish > 0 else self._grant_ttl_seconds
            chunks = [chunk for _, chunk in held]
            grant = self.grants.acquire(session, chunks, time.monotonic(), ttl_seconds)
            if grant is not None and request.codec:
                await self.grants.encode(grant, request.codec)
        self._serve()
        if grant is None:
            return pb.AcquireResponse()
        expire_time = timestamp_pb2.Timestamp()
        expire_time.FromNanoseconds(time.time_ns() + round(ttl_seconds * 1e9))
        spec = self._engines.spec(request.fingerprint)
        response = pb.AcquireResponse(
            grant=chunk_pb2.Grant(grant_id=grant.grant_id, expire_time=expire_time),
            present=[index for index, _ in held[: len(grant.chunks)]],
        )
        add_granted(response.grant.chunks, grant.chunks, spec.chunk_size if spec else None)
        offer_copies(response.grant.chunks, grant.chunks, grant.copies)
        return response

    @asynccontextmanager
    async def _promoted(self, fingerprint: bytes, keys: Sequence[ChunkKey]) -> AsyncIterator[None]:
        """Reads chunks that are on disk and not in the pool, up to the limits, and holds them in this context.

        A peer calls again for the chunks behind those that it is granted.
        """
        promoted: list[Chunk] = []
        on_disk: list[ChunkKey] = []
        room = min(MAX_PROMOTED_BYTES, self._tier.size_bytes // PROMOTED_SHARE)
        for key in keys if self._disk else ():
            assert self._disk
            if self._tier.get(key) is None and (chunk := self._disk.get(key)):
                room -= chunk.size_bytes
                if room < 0 and on_disk:
                    break
                on_disk.append(key)

        def on_read(_: int, chunk: Chunk) -> None:
            self._tier.hold([chunk])
            promoted.append(chunk)

        try:
            if self._disk and on_disk:
                await self._disk.reader.read(fingerprint, on_disk, PROMOTE_SECONDS, on_read)
            yield
        finally:
            self._tier.unhold(promoted)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        self._check_epoch(request.peer_epoch)
        session = self.sessions.get(caller_identity(context), request.session_id)
        return await self._receiver.allocate(request, session.session_id, client_identity(context))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        session = self.sessions.find(caller_identity(context), request.session_id)
        return await self._receiver.commit(request, session.session_id if session else "")

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        session = self.sessions.find(caller_identity(context), request.session_id)
        if session is None:
            return pb.ReleaseResponse()
        if request.handoff_id:
            self._receiver.drop(request.handoff_id, session.session_id)
            return pb.ReleaseResponse()
        if grant := self.grants.get(request.grant_id, session):
            places = {place for place in request.damaged if 0 <= place < len(grant.chunks)}
            damaged = [grant.chunks[place] for place in sorted(places)]
            self._inspector.inspect(damaged, session.instance_id, client_identity(context))
            self.grants.release(grant)
            self._linger()
        else:
            self._receiver.release(request.grant_id, session.session_id)
        return pb.ReleaseResponse()

    @asynccontextmanager
    async def lending(self, peer_name: str, chunks: Sequence[Chunk], codec: str) -> AsyncIterator[LentChunks]:
        """Lets a peer read these chunks, which the caller holds, in this context; encoded, if it names this codec."""
        copies = await self._copies.make(chunks, codec)
        grant_id = new_grant_id()
        self._channels.access.open(grant_id, self.grants.runs(chunks, copies), peer_name=peer_name)
        self._lending_count += 1
        self._serve()
        try:
            yield LentChunks(grant_id=grant_id, copies=copies)
        finally:
            self._channels.access.close(grant_id)
            self._copies.release(copies.values())
            self._lending_count -= 1
            self._linger()

    def _check_epoch(self, epoch: int, instance_id: str | None = None) -> None:
        if epoch != self._epoch or instance_id not in (None, self._instance_id):
            raise WrongInstance(
                f"this is {self._instance_id} of epoch {self._epoch}",
                instance_id=self._instance_id,
                epoch=self._epoch,
            )

    def _check_spec(self, other: KvSpec) -> None:
        """Raises `KvSpecMismatch` if the node has engines of the same model, but none with this spec."""
        specs = list(self._engines.specs)
        if any(own.fingerprint == other.fingerprint for own in specs):
            return
        for own in specs:
            if own.model_name == other.model_name and (field := own.first_difference(other)):
                own_value, other_value = own.shown(field), other.shown(field)
                logger.warning("a peer has another spec: %s is %s here, %s there", field, own_value, other_value)
                raise KvSpecMismatch(
                    f"{self._instance_id} serves {own.model_name!r} with {field} {own_value!r}, not {other_value!r}",
                    model_name=own.model_name,
                    field=field,
                    own_value=own_value,
                    other_value=other_value,
                )

    def _linger(self) -> None:
        """Has the channels make progress for `LINGER_SECONDS`."""
        self._serve_until = time.monotonic() + LINGER_SECONDS
        self._serve()

    def _serve(self) -> None:
        """Has the channels make progress exactly while a reader may need it."""
        is_needed = len(self.grants) > 0 or self._lending_count > 0 or time.monotonic() < self._serve_until
        self._channels.serve(is_needed)
        self._timer.changed()

    def _expire(self) -> float | None:
        """Ends the grants that have expired; returns the next deadline."""
        now = time.monotonic()
        if count := self.grants.expire(now):
            logger.warning("%d read grants expired: their readers have ended, or are too slow", count)
            self._linger()
        self._serve()
        times = [self._serve_until] if now < self._serve_until else []
        if (expiry := self.grants.next_expiry()) is not None:
            times.append(expiry)
        return min(times, default=None)
