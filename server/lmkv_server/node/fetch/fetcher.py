"""The fetching side of the node: brings chunks that peers hold into the own tier. Used by `TierStack`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv.transfer import Channels, Copy
from lmkv.transfer.bandwidth import Bandwidth, shortest_seconds
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.registry_service_pb2 import PeerTraffic
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.fetch import Fetch
from lmkv_server.node.fetch.inflight import Incoming, InflightFetches, PendingWrites
from lmkv_server.node.fetch.verifier import Verifier
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.tiers.progress import OnChunks, Progress

MAX_TRAFFIC = 1024
"""Peers whose traffic is counted."""


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
        self.unreachable = 0
        """Times that a peer failed."""
        self.hedged = 0
        """Times that a peer was late, and others were asked for chunks that it was to bring."""
        self.tier = tier
        self.channels = channels
        self.connections = PeerConnectionPool(
            instance_id=instance_id, epoch=epoch, channels=channels, host=host, credentials=credentials
        )
        self.verifier = Verifier(pool, enabled=verify_transfers)
        self.flights = InflightFetches()
        self.together = Bandwidth()
        """What several peers at once have given."""
        self._pool_address = pool.address
        self._quarantine: set[PendingWrites] = set()

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
        await self.connections.aclose()
        await self.verifier.aclose()

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
        bandwidths = [self.connections.bandwidth(holder.instance_id) for holder in holders]
        return shortest_seconds(bandwidths, size_bytes, time.monotonic())

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

    def quarantine(self, landing: PendingWrites) -> None:
        """Counts extents that a transfer may still write to."""
        self._quarantine = {*filter(lambda earlier: earlier.quarantined, self._quarantine), landing}

    async def read(
        self,
        connection: PeerConnection,
        incoming: Sequence[Incoming],
        landing: PendingWrites,
        timeout_seconds: float,
        grant_id: str,
    ) -> list[int] | None:
        """Reads chunks under a grant of the peer; returns their checksums if these were made on the way.

        Raises `Unreachable`.
        """
        copies = [
            Copy(
                remote_address=chunk.remote_address,
                local_address=self._pool_address + chunk.reserved.offset,
                size_bytes=chunk.size_bytes,
            )
            for chunk in incoming
        ]
        return await self.channels.read(connection.name, copies, timeout_seconds, landing.write(), grant_id)
