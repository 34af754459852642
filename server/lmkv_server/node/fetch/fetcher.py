"""Fetches chunks that peers hold into this node's tier, from several holders at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.bandwidth import Bandwidth, shortest_seconds
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.fetch.fetch import FetchState, FetchStats
from lmkv_server.node.fetch.holder_reader import HolderReader
from lmkv_server.node.fetch.inflight import InflightFetches
from lmkv_server.node.fetch.pipeline import TransferPipeline, TransferStats
from lmkv_server.node.fetch.scheduler import HolderState
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.tiers.progress import Loaded, Progress


class PeerFetcher:
    """All fetches of this node. One event loop owns it."""

    def __init__(self, pipeline: TransferPipeline, connections: PeerConnectionPool) -> None:
        self.inflight = InflightFetches()
        self._pipeline = pipeline
        self._connections = connections
        self._combined = Bandwidth()
        """The bandwidth of several active holders together."""
        self._running: set[FetchState] = set()
        self._ended = FetchStats()

    def stats(self) -> FetchStats:
        """The counters as they are now."""
        return sum((fetch.stats() for fetch in self._running), start=self._ended)

    def transfers(self) -> TransferStats:
        """The counters of the pipeline, which handoffs use too."""
        return self._pipeline.stats()

    async def fetch(self, progress: Progress, holders: Sequence[Holder], timeout_seconds: float) -> Loaded:
        """Fetches the missing chunks; the caller closes `progress`.

        Each holder's `matched_chunk_count` counts from the first key. Chunks that are in the tier by now are delivered
        too. Returns within `timeout_seconds` with what was fetched by then, and raises nothing. Cancelled, it leaves
        no hold and no grant, and no reservation but of memory that a transfer may still write to.
        """
        fetch = self._begin(progress, holders, time.monotonic() + timeout_seconds)
        self._running.add(fetch)
        try:
            await self._run(fetch)
        finally:
            fetch.plan.end()
            self._running.discard(fetch)
            self._ended += fetch.stats()
        return progress.result(fetch.error)

    def expected_seconds(self, holders: Sequence[Holder], size_bytes: int) -> float | None:
        """The expected time to fetch this many bytes from the best of the holders; None if one of them is unknown."""
        bandwidths = [self._connections.bandwidth(holder.instance_id) for holder in holders]
        return shortest_seconds(bandwidths, size_bytes, time.monotonic())

    def _begin(self, progress: Progress, holders: Sequence[Holder], deadline: float) -> FetchState:
        """Selects the holders that may be asked."""
        error: LmkvError | None = None
        connections = {}
        for holder in holders:
            peer = self._connections.get(holder)
            if peer is None:
                continue
            if known := peer.mismatches.get(progress.spec.fingerprint):
                error = known
            elif peer.is_backing_off:
                error = Unreachable(f"{peer.instance_id} failed a short while ago", instance_id=peer.instance_id)
            else:
                state = HolderState(
                    indices=progress.held_by(holder.matched_chunk_count),
                    is_near=self._connections.is_near(peer),
                    bandwidth=peer.bandwidth,
                    is_late=peer.is_late,
                )
                connections[state] = peer
        return FetchState(progress, connections, self.inflight, self._combined, deadline, error)

    async def _run(self, fetch: FetchState) -> None:
        """Returns when no chunk is missing, no holder has those that are, the pool is full, or the deadline passed."""
        progress, plan = fetch.progress, fetch.plan
        readers: set[HolderReader] = set()

        def on_commit(reader: HolderReader, indices: Sequence[int]) -> None:
            for other in readers - {reader}:
                other.cancel_reads(indices)

        async def run(reader: HolderReader) -> None:
            readers.add(reader)
            try:
                await reader.run()
            finally:
                readers.discard(reader)

        async with asyncio.TaskGroup() as tasks:
            while True:
                progress.changed.clear()
                progress.find_own()
                if not progress.missing:
                    for reader in readers:
                        reader.cancel()
                    return
                if fetch.is_full:
                    return
                if fetch.is_over:
                    fetch.error = Unreachable("the deadline of the fetch has passed")
                    return
                is_subscribed = self.inflight.subscribe(progress)
                for holder in plan.activate():
                    tasks.create_task(run(HolderReader(fetch, self._pipeline, self._connections, holder, on_commit)))
                if not plan.active and not (is_subscribed and fetch.is_waiting_useful()):
                    return
                await fetch.wait()
