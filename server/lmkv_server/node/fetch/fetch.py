"""One fetch: has one holder or several bring what is missing. Run by `Peers.fetch`.

The plan says who brings what, a carrier has one holder bring it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmkv.errors import LmkvError, Unreachable
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.fetch.holder_reader import HolderReader
from lmkv_server.node.fetch.scheduler import FetchPlan, HolderState
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.tiers.progress import Progress

if TYPE_CHECKING:
    from lmkv_server.node.fetch.fetcher import Peers

MAX_STEP_SECONDS = 10.0
"""A peer that takes longer for one answer or one batch has failed, however much time is left."""
LATE_SHARE = 4
"""A step that takes this fraction (1/4) of the time left is late in any case."""
LEAST_SECONDS = 0.005
"""With less time left nothing is begun."""


class Fetch:
    """The run of one fetch."""

    def __init__(self, peers: Peers, progress: Progress, holders: Sequence[Holder], deadline: float) -> None:
        self.error: LmkvError | None = None
        """The last thing that went wrong."""
        self.full = False
        """Whether the own pool has no room for more."""
        self.peers = peers
        self.progress = progress
        self._deadline = deadline
        known = peers.connections
        self._connections = {
            HolderState(
                matched_count=holder.matched_chunk_count,
                near=known.is_near(peer),
                bandwidth=peer.bandwidth,
                late=peer.is_late,
            ): peer
            for holder in holders
            if (peer := known.get(holder)) and not self._avoided(peer)
        }
        self.plan = FetchPlan(progress, peers.flights, self._connections, peers.together)
        self._carriers: set[HolderReader] = set()

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be begun any more."""
        return self.full or self.left() < LEAST_SECONDS

    def left(self) -> float:
        """Seconds until the time is up."""
        return self._deadline - time.monotonic()

    def step_seconds(self, source: HolderState) -> float:
        """How long a step may take: not all the time, if another holder could be asked after it."""
        front = self.progress.front
        others = any(other is not source and any(map(other.has, front)) for other in self._connections)
        return min(max(self.left() / 2 if others else self.left(), LEAST_SECONDS), MAX_STEP_SECONDS)

    def late_after_seconds(self, source: HolderState, size_bytes: int) -> float:
        """The time after which a step that brings so many bytes is late, so that another holder is asked as well."""
        most = max(self.left() / LATE_SHARE, LEAST_SECONDS)
        measured = source.bandwidth.late_after_seconds(size_bytes)
        return most if measured is None else min(measured, most)

    def landed(self, carrier: HolderReader, indices: Sequence[int]) -> None:
        """A holder has brought these chunks: others that were asked for them need not go on."""
        for other in self._carriers - {carrier}:
            other.overtaken(indices)

    async def run(self) -> None:
        """Returns when everything is there, nobody has what is missing, or the time is up."""
        progress, plan = self.progress, self.plan
        async with asyncio.TaskGroup() as carriers:
            while True:
                plan.changed.clear()
                progress.changed.clear()
                progress.find_own()
                if not progress.missing:
                    for carrier in self._carriers:
                        carrier.leave()
                    return
                if self.full:
                    return
                if self.is_over:
                    self.error = Unreachable("the time to fetch is up")
                    return
                is_brought = self.peers.flights.join(progress)
                for source in plan.join():
                    carriers.create_task(self._carry(HolderReader(self, self._connections[source], source)))
                if not plan.working and not (is_brought and self._is_of_use()):
                    return
                await self._change()

    async def _carry(self, carrier: HolderReader) -> None:
        self._carriers.add(carrier)
        try:
            await carrier.run()
        finally:
            self._carriers.discard(carrier)

    def _avoided(self, peer: PeerConnection) -> bool:
        """Whether the peer is not to be asked, because of what happened before."""
        if known := peer.mismatches.get(self.progress.spec.fingerprint):
            self.error = known
            return True
        if peer.resting:
            self.error = Unreachable(f"{peer.instance_id} failed a short while ago", instance_id=peer.instance_id)
            return True
        return False

    def _is_of_use(self) -> bool:
        """Whether another fetch brings something that would be handed out."""
        return any(self.progress.keys[index] in self.peers.flights for index in self.progress.front)

    async def _change(self) -> None:
        """Waits until somebody may have something to do that had not, or the time is up."""
        changes = [asyncio.ensure_future(event.wait()) for event in (self.plan.changed, self.progress.changed)]
        try:
            await asyncio.wait(changes, timeout=max(self.left(), 0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()
