"""One fetch, and one active holder of it: acquires windows of chunks at the peer, moves them through the pipeline.

connect ──► acquire ──► pipeline: read, verify, commit ──► release ──► acquire ──► ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lmkv.errors import ChunkNotFound, Full, KvSpecMismatch, LmkvError, NoFreeExtents, Unreachable
from lmkv.keys import ChunkKey
from lmkv.transfer.bandwidth import Bandwidth
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.fetch.pipeline import PendingWrites, TransferPipeline
from lmkv_server.node.fetch.scheduler import FetchPlan, HolderState, InflightFetches
from lmkv_server.node.peers.connection import FULL_SECONDS, PeerChunk, PeerConnection, granted_chunks
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.tiers.base import Progress

logger = logging.getLogger(__name__)

MAX_STEP_SECONDS = 10.0
"""A peer that takes longer for one call or one read has failed, whatever the time left."""
LATE_FRACTION = 4
"""A step that takes 1/4 of the time left is late in any case."""
MIN_SECONDS = 0.005
"""No step begins with less time left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchStats:
    """Counts the failures of fetches since the start; `TransferStats` has the transfers."""

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
    ) -> None:
        self.progress = progress
        self.connections = connections
        self.error: LmkvError | None = None
        """The last error; at first why holders are left out of `connections`, if any are."""
        self.is_full = False
        """Whether this node's pool has no room for more."""
        self._failure_count = 0
        self._hedge_count = 0
        self.plan = FetchPlan(progress, inflight, connections, combined)
        self._inflight = inflight
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        """Whether no further step may begin."""
        return self.is_full or self.seconds_left() < MIN_SECONDS

    def stats(self) -> FetchStats:
        """Returns the failures so far."""
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

    def queued_bytes(self, instance_id: str) -> float:
        """Bytes that are to move from this instance: holders are taken to bring equal shares of the missing chunks."""
        others = {peer.instance_id: holder for holder, peer in self.connections.items() if not holder.failed}
        if instance_id not in others:
            return 0.0
        missing_bytes = len(self.progress.missing) * self.progress.mean_bytes
        return missing_bytes * others[instance_id].moved_share / len(others)

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


READS_AHEAD = 3
"""Reads that run at a time, so that the channel is busy even while the event loop is."""
GRANT_MARGIN_SECONDS = 0.5


class HolderReader:
    """Reads the chunks that the plan assigns to one holder. A `Transfer` of the pipeline, window by window."""

    reads_ahead = READS_AHEAD

    def __init__(
        self,
        fetch: FetchState,
        pipeline: TransferPipeline,
        connections: PeerConnectionPool,
        holder: HolderState,
        on_commit: Callable[[HolderReader, Sequence[int]], None],
    ) -> None:
        """`on_commit` is called with the indices of chunks that this holder has delivered."""
        self._fetch = fetch
        self._progress = fetch.progress
        self._plan = fetch.plan
        self._pipeline = pipeline
        self._connections = connections
        self._holder = holder
        self._on_commit = on_commit
        self._peer = fetch.connections[holder]
        self._granted: dict[int, PeerChunk] = {}
        """The chunks of the window that is being transferred, by index."""
        self._grant_id = ""
        self._damaged: set[int] = set()
        """Chunks of this window that were damaged on arrival."""
        self._releasing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._reads: dict[asyncio.Task[None], set[int]] = {}
        """Running reads, and those of their chunks that no other holder has delivered since."""
        self._waiting_count = 0
        """Steps that wait for the holder."""

    # --- What the pipeline asks for ------------------------------------------------------------------------------

    @property
    def tier(self) -> HostTier:
        return self._pipeline.tier

    @property
    def keys(self) -> Sequence[ChunkKey]:
        return self._progress.keys

    def parent(self, index: int) -> ChunkKey | None:
        return self._progress.parent(index)

    @property
    def fingerprint(self) -> bytes:
        return self._progress.spec.fingerprint

    @property
    def instance_id(self) -> str:
        return self._peer.instance_id

    def next_batch(self) -> Sequence[PeerChunk]:
        if self._fetch.is_over:
            return ()
        return [self._granted[index] for index in self._plan.next_batch(self._holder)]

    def reserve(self, chunk: PeerChunk) -> Reservation | None:
        evict = self._progress.evict
        reserved = self.tier.reserve(chunk.size_bytes, evict=evict)
        if reserved is None:
            self._fetch.is_full = True
            reason = "the own pool is full of chunks in use" if evict else "the own pool has no free memory"
            self._fetch.error = NoFreeExtents(reason, retry_seconds=1)
        return reserved

    async def read(self, writes: PendingWrites) -> Sequence[int] | None:
        started = time.monotonic()
        step_seconds = self._fetch.step_seconds(self._holder)
        moved_bytes = sum(chunk.remote.read_bytes for chunk in writes.chunks)
        task = asyncio.current_task()
        assert task
        self._reads[task] = {chunk.remote.index for chunk in writes.chunks} & self._progress.missing
        try:
            with self._watched(moved_bytes):
                checksums = await self._pipeline.read(self._peer, writes, step_seconds, self._grant_id)
        finally:
            del self._reads[task]
        self._record_answer()
        now = time.monotonic()
        busy = self._holder.bandwidth.busy(started, now)
        self._plan.record_read(self._holder, moved_bytes, busy.seconds, busy.share)
        size_bytes = sum(chunk.remote.size_bytes for chunk in writes.chunks)
        self._peer.shares.record(self.fingerprint, moved_bytes, size_bytes)
        return checksums

    def is_missing(self, index: int) -> bool:
        return index in self._progress.missing

    def commit(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        self._progress.add(chunks, self.instance_id)
        for index, chunk in chunks:
            self._plan.commit(self._holder, index, chunk, self.instance_id)
        self._on_commit(self, [index for index, _ in chunks])

    def reject(self, index: int) -> None:
        self._damaged.add(index)
        self._holder.unavailable.add(index)
        self._progress.failures[self.keys[index]] = Unreachable(
            f"it arrived damaged from {self.instance_id}", instance_id=self.instance_id
        )

    def end_batch(self, indices: Sequence[int]) -> None:
        self._plan.unassign(self._holder, indices)

    # --- Windows -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when the plan has nothing more for this holder, or the holder has failed."""
        fetch, holder = self._fetch, self._holder
        self._task = asyncio.current_task()
        try:
            with self._watched():
                await self._peer.connect(self._progress.spec, fetch.step_seconds(holder))
            while not fetch.is_over and (holder.pending or self._plan.assign(holder)):
                await self._transfer_window(list(holder.pending))
        except LmkvError as error:
            fetch.fail_holder(holder, error)
            if not isinstance(error, KvSpecMismatch):
                self._peer.record_failure()
                logger.warning("peer %s failed: %s", self.instance_id, error)
        else:
            if not holder.is_late:
                self._peer.record_success()
        finally:
            self._plan.deactivate(holder)

    async def _transfer_window(self, window: Sequence[int]) -> None:
        """Acquires the chunks of a window, and moves those that are granted and not stolen meanwhile."""
        if self._releasing:  # one grant at a time: it may have all that the peer grants to this node
            await asyncio.wait([self._releasing], timeout=max(self._fetch.seconds_left(), 0))
            if self._fetch.is_over:
                return
        try:
            response = await self._acquire(window)
        except Full as error:  # until earlier grants have ended
            self._fetch.error = error
            self._plan.unassign(self._holder, window)
            await asyncio.sleep(float(error.metadata.get("retry_seconds", FULL_SECONDS)))
            return
        self._granted, self._damaged = {}, set()
        try:
            granted = granted_chunks(
                response, window, self._progress.spec, self._peer.regions, self._progress.size_bytes
            )
            self._granted = {chunk.index: chunk for chunk in granted}
            self._grant_id = response.grant.grant_id
            self._note_absent(window)
            await self._pipeline.run(self)
        finally:
            self._plan.unassign(self._holder, window)
            if grant_id := response.grant.grant_id:
                damaged = [place for place, index in enumerate(self._granted) if index in self._damaged]
                self._releasing = self._connections.release(self._peer, grant_id, damaged)

    async def _acquire(self, window: Sequence[int]) -> pb.AcquireResponse:
        keys = [self.keys[index] for index in window]
        ttl_seconds = self._fetch.seconds_left() + GRANT_MARGIN_SECONDS
        step_seconds = self._fetch.step_seconds(self._holder)
        started = time.monotonic()
        codec = self._pipeline.codec_for(self._progress.spec, self._peer.channel)
        acquiring = asyncio.create_task(self._peer.acquire(self._progress.spec, keys, ttl_seconds, step_seconds, codec))
        try:
            with self._watched():
                response = await asyncio.shield(acquiring)
        except BaseException:
            self._connections.release_once_granted(self._peer, acquiring)
            raise
        self._record_answer()
        now = time.monotonic()
        self._peer.bandwidth.record_response(now - started, now)
        return response

    def _note_absent(self, window: Sequence[int]) -> None:
        """Records the chunks that the holder lacks. Those behind the last one granted may only exceed its limit."""
        last = max(self._granted, default=window[-1])
        absent = [index for index in window if index <= last and index not in self._granted]
        self._holder.unavailable.update(absent)
        error = ChunkNotFound(f"{self.instance_id} does not hold it", instance_id=self.instance_id)
        self._progress.failures.update((self.keys[index], error) for index in absent)
        self._plan.unassign(self._holder, {*window} - {*self._granted})

    # --- Late answers --------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, moved_bytes: int = 0) -> Iterator[None]:
        """Runs one step; marks the holder as late if this takes longer than expected, with all reads that run there."""
        with self._holder.bandwidth.reading(moved_bytes):
            self._waiting_count += 1
            seconds = self._fetch.late_seconds(self._holder, self._holder.bandwidth.reading_bytes)
            timer = asyncio.get_running_loop().call_later(seconds, self._mark_late)
            try:
                yield
            finally:
                timer.cancel()
                self._waiting_count -= 1

    def _mark_late(self) -> None:
        self._peer.mark_late()
        if count := self._fetch.mark_late(self._holder):
            logger.info("peer %s is late: other peers are asked for %d of its chunks", self.instance_id, count)

    def _record_answer(self) -> None:
        """The holder has answered, so it is no longer late."""
        self._holder.is_late = False
        self._peer.record_answer()

    def cancel(self) -> None:
        """Cancels all that waits for the holder: no chunk is missing any more. Its reads go into quarantine."""
        if self._waiting_count and self._task:
            self._task.cancel()

    def cancel_reads(self, indices: Sequence[int]) -> None:
        """Cancels the reads all of whose chunks other holders have delivered; they have just delivered these."""
        for task, left in self._reads.items():
            left.difference_update(indices)
            if not left:
                task.cancel()
