"""One holder at work for one fetch: acquires windows of chunks, reads them in batches, verifies and commits.

acquire ──► read ──► verify ──► commit, hand on      Reads follow each other without a gap: while one runs the next
             read ──► verify ──► commit ...          ones are posted already, and those before are verified.
              read ──► ...                ──► release
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmkv.errors import ChunkNotFound, Full, KvSpecMismatch, LmkvError, NoFreeExtents, Unreachable
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.fetch.inflight import Incoming, Offer, PendingWrites, checked_extents
from lmkv_server.node.fetch.scheduler import HolderState
from lmkv_server.node.peers.connection import PeerConnection

if TYPE_CHECKING:
    from lmkv_server.node.fetch.fetch import Fetch

logger = logging.getLogger(__name__)

READS_AHEAD = 3
"""Reads that are posted at a time: whatever the loop is late by, the wire has something to do."""
GRANT_MARGIN_SECONDS = 0.5


class HolderReader:
    """One holder at work. It is in the plan's `working` until it has run."""

    def __init__(self, fetch: Fetch, peer: PeerConnection, source: HolderState) -> None:
        self._fetch = fetch
        self._peers = fetch.peers
        self._progress = fetch.progress
        self._plan = fetch.plan
        self._spec = fetch.progress.spec
        self._peer = peer
        self._source = source
        self._failure: LmkvError | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._free_at = 0.0
        """When the last read ended, and the next one had the wire for itself."""
        self._task: asyncio.Task[None] | None = None
        self._reads: dict[asyncio.Task[None], set[int]] = {}
        """Batches that are being read, and which of their chunks no other holder has brought since."""
        self._reading_bytes = 0
        self._waiting_count = 0
        """Steps that wait for an answer of the holder."""

    async def run(self) -> None:
        """Brings what the plan wants from this holder. Ends when that is nothing, or the holder fails."""
        fetch, source = self._fetch, self._source
        self._task = asyncio.current_task()
        try:
            with self._watched():
                await self._peer.agree(self._spec, fetch.step_seconds(source))
            while not fetch.is_over and (source.pending or self._plan.take(source)):
                await self._bring_window(list(source.pending))
        except LmkvError as error:
            self._failed(error)
        else:
            if not source.late:
                self._peer.worked()
        finally:
            self._plan.leave(source)

    # --- Late answers --------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, size_bytes: int = 0) -> Iterator[None]:
        """While a step runs: others are asked as well if it takes longer than it should, behind the reads before it."""
        self._reading_bytes += size_bytes
        self._waiting_count += 1
        seconds = self._fetch.late_after_seconds(self._source, self._reading_bytes)
        timer = asyncio.get_running_loop().call_later(seconds, self._late)
        try:
            yield
        finally:
            timer.cancel()
            self._waiting_count -= 1
            self._reading_bytes -= size_bytes

    def _late(self) -> None:
        """A step takes longer than it should."""
        self._peer.was_late()
        if count := self._plan.late(self._source):
            self._peers.hedged += 1
            logger.info("peer %s is late: others are asked for %d of its chunks", self._peer.instance_id, count)

    def _answered(self) -> None:
        """The holder has answered; only so does it count as one that is not late."""
        self._source.late = False
        self._peer.answered()

    def leave(self) -> None:
        """Nothing is missing any more: stops waiting for answers. What they may still write to is quarantined."""
        if self._waiting_count and self._task:
            self._task.cancel()

    def overtaken(self, indices: Sequence[int]) -> None:
        """Another holder has brought these chunks: stops the reads that bring nothing else."""
        for task, left in self._reads.items():
            left.difference_update(indices)
            if not left:
                task.cancel()

    # --- Steps ---------------------------------------------------------------------------------------------------

    def _failed(self, error: LmkvError) -> None:
        self._fetch.error = error
        self._source.exhausted = True
        if isinstance(error, KvSpecMismatch):
            return
        self._peer.failed()
        self._peers.unreachable += 1
        logger.warning("peer %s failed: %s", self._peer.instance_id, error)

    async def _bring_window(self, window: Sequence[int]) -> None:
        """Acquires a window and brings what is granted of it, as far as nobody steals it."""
        if self._releasing:  # one grant at a time: it may take all that this node may have
            await asyncio.wait([self._releasing], timeout=max(self._fetch.left(), 0))
            if self._fetch.is_over:
                return
        try:
            response = await self._acquire(window)
        except Full as error:  # earlier grants will end
            self._fetch.error = error
            self._plan.give_back(self._source, window)
            await asyncio.sleep(float(error.metadata.get("retry_seconds", 0.02)))
            return
        damaged: list[int] = []
        try:
            offers = checked_extents(response, len(window), self._spec, self._peer.regions)
            self._refuse(window, [at for at, _, _ in offers])
            granted = {window[at]: (at, address, extent) for at, address, extent in offers}
            await self._bring(granted, response.grant.grant_id, damaged)
        finally:
            self._plan.give_back(self._source, window)
            if grant_id := response.grant.grant_id:
                places = [place for place, at in enumerate(response.present) if damaged and window[at] in damaged]
                self._releasing = self._peers.connections.release(self._peer, grant_id, places)

    async def _acquire(self, window: Sequence[int]) -> pb.AcquireResponse:
        keys = [self._progress.keys[index] for index in window]
        ttl_seconds = self._fetch.left() + GRANT_MARGIN_SECONDS
        step_seconds = self._fetch.step_seconds(self._source)
        started = time.monotonic()
        acquiring = asyncio.create_task(self._peer.acquire(self._spec, keys, ttl_seconds, step_seconds))
        try:
            with self._watched():
                response = await asyncio.shield(acquiring)
            self._answered()
        except asyncio.CancelledError:
            self._peers.connections.release_once_granted(self._peer, acquiring)
            raise
        now = time.monotonic()
        self._peer.bandwidth.record_response(now - started, now)
        return response

    def _refuse(self, window: Sequence[int], granted: Sequence[int]) -> None:
        """Notes what the holder has lost. What comes after all it grants may be more than it grants at a time."""
        until = granted[-1] if granted else len(window)
        lost = [window[at] for at in sorted({*range(until)} - {*granted})]
        self._source.refused.update(lost)
        instance_id = self._peer.instance_id
        absent = ChunkNotFound(f"{instance_id} does not hold it", instance_id=instance_id)
        self._progress.failures.update((self._progress.keys[index], absent) for index in lost)
        self._plan.give_back(self._source, {*window} - {window[at] for at in granted})

    async def _bring(self, offers: dict[int, Offer], grant_id: str, damaged: list[int]) -> None:
        """Reads, verifies and commits what is granted; notes what came damaged. Raises why a read failed."""
        ahead = asyncio.Semaphore(READS_AHEAD)
        async with asyncio.TaskGroup() as batches:
            while True:
                await ahead.acquire()
                if self._failure or self._fetch.is_over:
                    break
                batch = self._plan.batch(self._source)
                if not batch:
                    break
                offered = [offers[index] for index in batch]
                batches.create_task(self._bring_batch(offered, batch, grant_id, ahead, damaged))
        if self._failure:
            raise self._failure

    async def _bring_batch(
        self,
        offers: Sequence[Offer],
        batch: Sequence[int],
        grant_id: str,
        ahead: asyncio.Semaphore,
        damaged: list[int],
    ) -> None:
        landing = PendingWrites(self._peers.tier)
        try:
            try:
                incoming = self._reserve(offers, batch, landing)
                sums = await self._read(incoming, landing, grant_id) if incoming else None
            finally:
                ahead.release()
            await self._verify(incoming, sums, landing, damaged)
        except LmkvError as error:  # what other batches bring is still good
            self._failure = error
        finally:
            self._plan.give_back(self._source, batch)
            landing.close()
            if landing.quarantined:
                self._peers.quarantine(landing)

    def _reserve(self, offers: Sequence[Offer], batch: Sequence[int], landing: PendingWrites) -> list[Incoming]:
        """Makes room for what the peer offers, as far as there is any."""
        incoming = []
        for index, (_, address, extent) in zip(batch, offers, strict=True):
            reserved = landing.reserve(extent.size_bytes)
            if reserved is None:
                self._fetch.full = True
                self._fetch.error = NoFreeExtents("the own pool is full of chunks in use", retry_seconds=1)
                break
            incoming.append(
                Incoming(
                    index=index,
                    remote_address=address,
                    checksum=extent.checksum,
                    token_count=extent.token_count,
                    size_bytes=extent.size_bytes,
                    reserved=reserved,
                )
            )
        return incoming

    async def _read(self, incoming: Sequence[Incoming], landing: PendingWrites, grant_id: str) -> list[int] | None:
        """Reads into what was reserved; returns the chunks' checksums if they were made on the way."""
        started = time.monotonic()
        step_seconds = self._fetch.step_seconds(self._source)
        size_bytes = sum(chunk.size_bytes for chunk in incoming)
        task = asyncio.current_task()
        assert task
        self._reads[task] = {chunk.index for chunk in incoming} & self._progress.missing
        try:
            with self._watched(size_bytes):
                sums = await self._peers.read(self._peer, incoming, landing, step_seconds, grant_id)
        finally:
            del self._reads[task]
        self._answered()
        now = time.monotonic()
        seconds = now - max(started, self._free_at)
        self._free_at = now
        self._plan.measured(self._source, size_bytes, seconds)
        return sums

    async def _verify(
        self, incoming: Sequence[Incoming], sums: Sequence[int] | None, landing: PendingWrites, damaged: list[int]
    ) -> None:
        """Commits what is what its owner committed, and hands it on."""
        instance_id = self._peer.instance_id
        arrived: list[tuple[int, Chunk]] = []
        for chunk, intact in zip(incoming, await self._peers.verifier.intact(incoming, sums), strict=True):
            if not intact:
                damaged.append(chunk.index)
                self._reject(chunk)
            elif chunk.index not in self._progress.missing:
                continue  # another holder was faster
            elif committed := landing.commit(self._progress.keys, self._spec.fingerprint, chunk):
                self._peers.count(instance_id, committed)
                arrived.append((chunk.index, committed))
        self._progress.add(arrived, instance_id)
        for index, committed in arrived:
            self._plan.land(self._source, index, committed, instance_id)
        self._fetch.landed(self, [index for index, _ in arrived])

    def _reject(self, incoming: Incoming) -> None:
        key, instance_id = self._progress.keys[incoming.index], self._peer.instance_id
        self._source.refused.add(incoming.index)
        self._progress.failures[key] = Unreachable(f"it came damaged from {instance_id}", instance_id=instance_id)
        self._peers.checksum_mismatches += 1
        logger.warning("chunk %s came damaged from %s and was thrown away", key.hex(), instance_id)
