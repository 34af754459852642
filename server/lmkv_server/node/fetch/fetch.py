"""One fetch: its plan, its deadline, and what went wrong. Shared by the `HolderReader`s that work for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lmkv.errors import KvSpecMismatch, LmkvError
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.fetch.inflight import InflightFetches
from lmkv_server.node.fetch.scheduler import FetchPlan, HolderState
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.tiers.progress import Progress

MAX_STEP_SECONDS = 10.0
"""A peer that takes longer for one call or one read has failed, whatever the time left."""
LATE_FRACTION = 4
"""A step that takes 1/4 of the time left is late in any case."""
MIN_SECONDS = 0.005
"""With less time left no step begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchStats:
    """What went wrong in fetches since the start; `TransferStats` has the transfers."""

    failure_count: int = 0
    """Times that a peer failed."""
    hedge_count: int = 0
    """Times that a peer was late, and other peers were asked for chunks that were assigned to it."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(
            failure_count=self.failure_count + other.failure_count, hedge_count=self.hedge_count + other.hedge_count
        )


class FetchState:
    """The state of one running fetch."""

    def __init__(
        self,
        progress: Progress,
        connections: Mapping[HolderState, PeerConnection],
        inflight: InflightFetches,
        combined: Bandwidth,
        deadline: float,
        error: LmkvError | None,
    ) -> None:
        """`error` is why holders are left out of `connections`, if any are."""
        self.progress = progress
        self.connections = connections
        self.error = error
        """The last error."""
        self.is_full = False
        """Whether this node's pool has no room for more."""
        self._failure_count = 0
        self._hedge_count = 0
        self.plan = FetchPlan(progress, inflight, connections, combined, progress.changed.set)
        self._inflight = inflight
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        """Whether no further step may begin."""
        return self.is_full or self.seconds_left() < MIN_SECONDS

    def stats(self) -> FetchStats:
        """What went wrong so far."""
        return FetchStats(failure_count=self._failure_count, hedge_count=self._hedge_count)

    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def step_seconds(self, holder: HolderState) -> float:
        """Timeout of one step: half of the time left if another holder could be asked after it, 10 s at most."""
        needed = self.progress.front
        others = any(other is not holder and any(map(other.may_hold, needed)) for other in self.connections)
        left = self.seconds_left()
        return min(max(left / 2 if others else left, MIN_SECONDS), MAX_STEP_SECONDS)

    def late_seconds(self, holder: HolderState, size_bytes: int) -> float:
        """The time after which a step that transfers this many bytes is late, so that other holders are asked too."""
        longest = max(self.seconds_left() / LATE_FRACTION, MIN_SECONDS)
        measured = holder.bandwidth.late_after_seconds(size_bytes)
        return longest if measured is None else min(measured, longest)

    def fail_holder(self, holder: HolderState, error: LmkvError) -> None:
        """Records that a holder failed; a spec that differs is no failure of the peer."""
        self.error = error
        holder.failed = True
        self._failure_count += not isinstance(error, KvSpecMismatch)

    def mark_late(self, holder: HolderState) -> int:
        """Asks other holders for what is assigned to an overdue one; the number of these chunks."""
        count = self.plan.mark_late(holder)
        self._hedge_count += count > 0
        return count

    def is_waiting_useful(self) -> bool:
        """Whether another fetch transfers a chunk that this one could deliver at once."""
        return any(self.progress.keys[index] in self._inflight for index in self.progress.front)

    async def wait(self) -> None:
        """Waits until there may be something new to do, or the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self.seconds_left(), 0)):
                await self.progress.changed.wait()
