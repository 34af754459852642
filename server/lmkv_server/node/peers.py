"""The fetching side of the node: brings chunks that peers hold into the own tier. Used by `Sources`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lmkv import rpc
from lmkv.credentials import Credentials
from lmkv.errors import KvSpecMismatch, LmkvError, Unreachable
from lmkv.keys import ChunkKey
from lmkv.pool import Pool
from lmkv.spec import KvSpec
from lmkv.transfer import Channels, Copy
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.registry_service_pb2 import PeerTraffic
from lmkv_kernels import checksum
from lmkv_server.node.arrivals import Flights, Incoming, Landing, OnChunks, Progress
from lmkv_server.node.bandwidth import Bandwidth, quickest
from lmkv_server.node.fetch import Fetch
from lmkv_server.node.host_tier import Chunk, HostTier
from lmkv_server.node.peer_connection import PeerConnection

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Peers to stay connected with; beyond these the one that was not used for longest is left."""
MAX_TRAFFIC = 1024
"""Peers whose traffic is counted."""
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
RELEASE_SECONDS = 0.5
VERIFY_THREADS = 2
"""Each takes half of a batch, so that after the last read it is not long until all is verified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """How a fetch went."""

    chunk_count: int = 0
    """Chunks handed out."""
    size_bytes: int = 0
    """Bytes that came from peers for it."""
    seconds: float = 0.0
    instance_ids: tuple[str, ...] = ()
    """Peers that gave any, in order of first use."""
    error: LmkvError | None = None
    """Why it is not whole, if there was an error; a chunk that nobody holds any more is none."""


class Peers:
    """All peers that this node fetches from. One event loop owns it; to be used as an async context manager."""

    def __init__(
        self,
        *,
        instance_id: str,
        epoch: int,
        tier: HostTier,
        channels: Channels,
        pool: Pool,
        host: str = "127.0.0.1",
        verify_transfers: bool = True,
        credentials: Credentials = rpc.PLAINTEXT,
    ) -> None:
        """`host` is what peers know this machine by; `credentials` are how to speak to them."""
        self.fetched_chunks = 0
        """Chunks brought in whole since the start."""
        self.fetched_bytes = 0
        """Bytes of these."""
        self.traffic: dict[str, PeerTraffic] = {}
        """The same, by the peer they came from."""
        self.checksum_mismatches = 0
        """Chunks that arrived damaged, and were thrown away."""
        self.spec_mismatches = 0
        """Times that a peer turned out to share nothing with one of the own specs."""
        self.unreachable = 0
        """Times that a peer failed."""
        self.tier = tier
        self.channels = channels
        self.address = pool.address
        """Where the own pool begins."""
        self.flights = Flights()
        self.together = Bandwidth()
        """What several peers at once have given."""
        self._instance_id = instance_id
        self._epoch = epoch
        self._pool = pool
        self._connections: OrderedDict[str, PeerConnection] = OrderedDict()  # least recently used first
        self._identified: dict[tuple[str, bytes], Holder] = {}
        """Who serves at an address, by that and by the spec that is shared with it."""
        self._quarantine: set[Landing] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._host = host
        self._credentials = credentials
        self.verifies = verify_transfers
        """Whether the checksum of each chunk is compared."""
        self._verifier = ThreadPoolExecutor(VERIFY_THREADS, "lmkv-verify")

    @property
    def quarantined_count(self) -> int:
        """Batches whose extents are kept only because their transfer has not stopped."""
        return sum(landing.quarantined for landing in self._quarantine)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of these extents."""
        return sum(landing.size_bytes for landing in self._quarantine if landing.quarantined)

    async def __aenter__(self) -> Peers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves all peers. Fetches must have ended. Idempotent."""
        if self._tasks:  # grants to give back; each is bounded
            await asyncio.wait(self._tasks)
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()
        await asyncio.to_thread(self._verifier.shutdown)

    async def fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        *,
        first: int = 0,
    ) -> Fetched:
        """Brings `keys[first:]` into the own tier; each holder's `matched_chunk_count` counts from `keys[0]`.

        `on_chunks` gets them in order and without a gap, as soon as they are verified, each with a hold that the caller
        ends. Chunks that are in the tier by now are among them. Returns within `timeout_seconds` with what came by
        then. Raises nothing, and neither may `on_chunks`. Cancelled at any point it leaves no hold and no grant, and no
        reservation but of memory that a transfer may still write to.
        """
        return await self.bring(Progress(self.tier, spec, keys, first, on_chunks), holders, timeout_seconds)

    async def bring(self, progress: Progress, holders: Sequence[Holder], timeout_seconds: float) -> Fetched:
        """Brings what is missing, as `fetch` does, for a progress that the caller looks into. It is closed then."""
        started = time.monotonic()
        fetch = Fetch(self, progress, holders, started + timeout_seconds)
        try:
            await fetch.run()
        finally:
            progress.close()
        return Fetched(
            chunk_count=progress.handed_count,
            size_bytes=progress.size_bytes,
            seconds=time.monotonic() - started,
            instance_ids=tuple(progress.instance_ids),
            error=fetch.error if progress.missing else None,
        )

    def expected_seconds(self, holders: Sequence[Holder], size_bytes: int) -> float | None:
        """What the best of the holders should take for so many bytes; None if one of them is unknown."""
        known = [self._connections.get(holder.instance_id) for holder in holders]
        bandwidths = [connection.bandwidth if connection else Bandwidth() for connection in known]
        return quickest(bandwidths, size_bytes, time.monotonic())

    def connection(self, holder: Holder) -> PeerConnection | None:
        """The connection to a holder; None if that is this node, has no address, or is an earlier epoch of a peer."""
        known = self._connections.get(holder.instance_id)
        outdated = known is not None and known.epoch > holder.epoch
        if holder.instance_id == self._instance_id or not holder.peer_address or outdated:
            return None
        if known and (known.epoch, known.address) == (holder.epoch, holder.peer_address):
            self._connections.move_to_end(holder.instance_id)
            return known
        if known:
            self._leave(known)
        connection = PeerConnection(
            self._instance_id, self._epoch, self.channels, holder, self._note_mismatch, self._credentials
        )
        self._connections[holder.instance_id] = connection
        if len(self._connections) > MAX_CONNECTIONS:
            self._leave(self._connections.popitem(last=False)[1])
        return connection

    async def identify(self, address: str, spec: KvSpec, timeout_seconds: float) -> PeerConnection | None:
        """The peer whose node serves at this address, asked once until `forget`; None if that is this node.

        Raises `Unreachable`, or `KvSpecMismatch` if the two share no chunks of this spec.
        """
        known = self._identified.get((address, spec.fingerprint))
        if known is None:
            known = await self._ask_who(address, spec, timeout_seconds)
            self._identified[address, spec.fingerprint] = known
            while len(self._identified) > MAX_CONNECTIONS:
                del self._identified[next(iter(self._identified))]
        if known.instance_id == self._instance_id:
            return None
        if connection := self.connection(known):
            return connection
        self.forget(address)
        raise Unreachable(f"{known.instance_id} has left {address}", address=address)

    def forget(self, address: str) -> None:
        """Another node may serve at this address by now."""
        for place in [place for place in self._identified if place[0] == address]:
            del self._identified[place]

    async def _ask_who(self, address: str, spec: KvSpec, timeout_seconds: float) -> Holder:
        async with rpc.open_channel(address, self._credentials) as channel:
            request = pb.InitRequest(instance_id=self._instance_id, epoch=self._epoch, spec=spec.to_proto())
            method: Any = pb_grpc.PeerServiceStub(channel).Init
            answer: pb.InitResponse = await rpc.call(
                method, "lmkv.v1.PeerService/Init", address, request, timeout_seconds
            )
        return Holder(instance_id=answer.instance_id, epoch=answer.epoch, peer_address=address)

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

    def is_near(self, connection: PeerConnection) -> bool:
        """Whether the peer is on this host."""
        return connection.address.rpartition(":")[0] in {self._host, *LOOPBACK}

    def release(self, connection: PeerConnection, grant_id: str, damaged: Sequence[int] = ()) -> asyncio.Task[None]:
        """Gives a grant back, behind the caller's back, and says which of its extents came damaged. Soon done."""
        return self._spawn(connection.release(grant_id, RELEASE_SECONDS, damaged))

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

    def count(self, instance_id: str, chunk: Chunk) -> None:
        """Counts a chunk that came from a peer."""
        self.fetched_chunks += 1
        self.fetched_bytes += chunk.size_bytes
        traffic = self.traffic.get(instance_id)
        if traffic is None:
            if len(self.traffic) >= MAX_TRAFFIC:  # in a fleet whose members come and go
                del self.traffic[min(self.traffic, key=lambda peer: self.traffic[peer].transferred_bytes)]
            traffic = self.traffic[instance_id] = PeerTraffic(instance_id=instance_id)
        traffic.chunk_count += 1
        traffic.transferred_bytes += chunk.size_bytes

    def quarantine(self, landing: Landing) -> None:
        """Counts extents that a transfer may still write to."""
        self._quarantine = {*filter(lambda earlier: earlier.quarantined, self._quarantine), landing}

    async def read(
        self, connection: PeerConnection, incoming: Sequence[Incoming], landing: Landing, timeout_seconds: float
    ) -> list[int] | None:
        """Reads chunks into what was reserved for them; returns their checksums if these were made on the way.

        Raises `Unreachable`.
        """
        copies = [
            Copy(
                remote_address=chunk.remote_address,
                local_address=self.address + chunk.reserved.offset,
                size_bytes=chunk.size_bytes,
            )
            for chunk in incoming
        ]
        return await self.channels.read(connection.name, copies, timeout_seconds, landing.write())

    async def intact(self, incoming: Sequence[Incoming], sums: Sequence[int] | None) -> list[bool]:
        """Which of the chunks in the pool are what their owner committed; all, unless transfers are verified.

        `sums` are their checksums if these are known already.
        """
        if not self.verifies or not incoming:
            return [True] * len(incoming)
        if sums is not None:
            return [made == chunk.checksum for made, chunk in zip(sums, incoming, strict=True)]
        loop, middle = asyncio.get_running_loop(), (len(incoming) + 1) // 2
        halves = [half for half in (incoming[:middle], incoming[middle:]) if half]
        found = await asyncio.gather(*(loop.run_in_executor(self._verifier, self._compare, half) for half in halves))
        return [intact for half in found for intact in half]

    def _compare(self, incoming: Sequence[Incoming]) -> list[bool]:
        return [
            checksum(self._pool.buffer, chunk.reserved.offset, chunk.size_bytes) == chunk.checksum for chunk in incoming
        ]

    def _note_mismatch(self, instance_id: str, error: KvSpecMismatch) -> None:
        self.spec_mismatches += 1
        logger.warning(
            "no chunks are shared with %s: %s is %s there, %s here",
            instance_id,
            error.metadata.get("field", "the spec"),
            error.metadata.get("own_value", "another"),
            error.metadata.get("other_value", "another"),
        )

    def _leave(self, connection: PeerConnection) -> None:
        self._spawn(self._left(connection))

    async def _left(self, connection: PeerConnection) -> None:
        await connection.close()
        try:
            await self.channels.remove_peer(connection.name)
        except LmkvError as error:
            logger.debug("%s is not forgotten by its channel: %s", connection.name, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
