"""One fetch: asks one holder after the other for what is missing, in batches that overlap. Run by `Peers.fetch`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkv.errors import Full, KvSpecMismatch, LmkvError, NoFreeExtents, Unreachable
from lmkv.transfer import Copy
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.arrivals import Incoming, Landing, Progress, checked_extents
from lmkv_server.node.peer_connection import PeerConnection

if TYPE_CHECKING:
    from lmkv_server.node.peers import Peers

logger = logging.getLogger(__name__)

MIN_BATCH_BYTES = 8 << 20
"""What the first batches ask for: little, so that the first chunks are soon there."""
MAX_BATCH_BYTES = 64 << 20
FAST_SECONDS = 0.05
"""A batch that was read in less is followed by larger ones."""
SLOW_SECONDS = 0.2
"""A batch that took more is followed by smaller ones."""
PIPELINE_DEPTH = 2
"""Batches under way at one peer: one is read while the other is acquired or verified."""
GRANT_MARGIN_SECONDS = 0.5
LEAST_SECONDS = 0.005
"""With less time left nothing is begun."""


@dataclass(kw_only=True, slots=True)
class _Source:
    """One holder, as far as this fetch is concerned."""

    peer: PeerConnection
    matched_count: int
    refused: set[int] = field(default_factory=set)
    """Chunks that it does not have after all, or has damaged."""
    exhausted: bool = False
    """Whether it failed."""

    def has(self, index: int) -> bool:
        """Whether it may hold the chunk."""
        return not self.exhausted and index < self.matched_count and index not in self.refused


class Fetch:
    """The run of one fetch."""

    def __init__(self, peers: Peers, progress: Progress, holders: Sequence[Holder], deadline: float) -> None:
        self.error: LmkvError | None = None
        """The last thing that went wrong."""
        self._peers = peers
        self._progress = progress
        self._spec = progress.spec
        self._deadline = deadline
        self._full = False
        self._batch_bytes = MIN_BATCH_BYTES
        self._sources = [
            _Source(peer=peer, matched_count=holder.matched_chunk_count)
            for holder in sorted(holders, key=lambda holder: -holder.matched_chunk_count)
            if (peer := peers.connection(holder)) and not self._avoided(peer)
        ]

    async def run(self) -> None:
        """Returns when everything is there, nobody has what is missing, or the time is up."""
        progress = self._progress
        while not self._full:
            progress.find_own()
            if not progress.missing:
                return
            if self._left() < LEAST_SECONDS:
                self.error = Unreachable("the time to fetch is up")
                return
            joined = self._peers.flights.join(progress)
            source, wanted = self._choose()
            if source:
                await self._bring(source, wanted)
            elif not joined or not await self._others():
                return

    def _avoided(self, peer: PeerConnection) -> bool:
        """Whether the peer is not to be asked, because of what happened before."""
        if known := peer.mismatches.get(self._spec.fingerprint):
            self.error = known
            return True
        if peer.resting:
            self.error = Unreachable(f"{peer.instance_id} failed a short while ago", instance_id=peer.instance_id)
            return True
        return False

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _step_seconds(self, source: _Source) -> float:
        """How long a step may take: not all the time, if another holder could be asked after it."""
        front = self._progress.next_index
        others = any(other is not source and other.has(front) for other in self._sources)
        return max(self._left() / 2 if others else self._left(), LEAST_SECONDS)

    def _choose(self) -> tuple[_Source | None, list[int]]:
        """The best holder of something that is missing, and what to ask it for."""
        flights, keys = self._peers.flights, self._progress.keys
        mine = []
        for index in sorted(self._progress.missing):
            if keys[index] in flights:
                continue
            if not any(source.has(index) for source in self._sources):
                break  # a hole that nobody fills: what comes behind it is of no use
            mine.append(index)
        for source in self._sources:
            if wanted := [index for index in mine if source.has(index)]:
                return source, wanted
        return None, []

    async def _others(self) -> bool:
        """Waits for something that another fetch brings; False if that is no use, or the time is up."""
        progress = self._progress
        if progress.keys[progress.next_index] not in self._peers.flights:
            return False
        progress.changed.clear()
        try:
            async with asyncio.timeout(self._left()):
                await progress.changed.wait()
        except TimeoutError:
            self.error = Unreachable("the time to fetch is up")
            return False
        return True

    async def _bring(self, source: _Source, wanted: list[int]) -> None:
        """Asks one holder for all it may have."""
        pending = deque(wanted)
        reading = asyncio.Lock()
        try:
            await source.peer.agree(self._spec, self._step_seconds(source))
            async with asyncio.TaskGroup() as group:
                for _ in range(PIPELINE_DEPTH):
                    group.create_task(self._work(source, pending, reading))
        except LmkvError as error:
            self._failed(source, error)
        except BaseExceptionGroup as errors:
            expected, unexpected = errors.split(LmkvError)
            if unexpected or not expected:
                raise
            self._failed(source, _first(expected))
        else:
            source.peer.worked()

    def _failed(self, source: _Source, error: LmkvError) -> None:
        self.error = error
        source.exhausted = True
        if isinstance(error, KvSpecMismatch):
            return
        source.peer.failed()
        self._peers.unreachable += 1
        logger.warning("peer %s failed: %s", source.peer.instance_id, error)

    async def _work(self, source: _Source, pending: deque[int], reading: asyncio.Lock) -> None:
        """Brings batch after batch."""
        while pending and not self._full and self._left() >= LEAST_SECONDS:
            count = max(1, self._batch_bytes // self._spec.chunk_bytes)
            batch = [pending.popleft() for _ in range(min(count, len(pending)))]
            try:
                await self._bring_batch(source, batch, reading)
            except Full as error:  # earlier grants will end
                self.error = error
                pending.extendleft(reversed(batch))
                await asyncio.sleep(float(error.metadata.get("retry_seconds", 0.02)))

    async def _bring_batch(self, source: _Source, batch: list[int], reading: asyncio.Lock) -> None:
        peers, progress = self._peers, self._progress
        batch = [i for i in batch if i in progress.missing and progress.keys[i] not in peers.flights]
        if not batch:
            return
        keys = [progress.keys[index] for index in batch]
        peers.flights.start(keys)
        landing = Landing(peers.tier)
        try:
            incoming = await self._transfer(source, batch, landing, reading)
            for chunk, intact in zip(incoming, await peers.intact(incoming), strict=True):
                if intact:
                    self._commit(source, chunk, landing)
                else:
                    self._reject(source, chunk)
        finally:
            landing.close()
            if landing.quarantined:
                peers.quarantine(landing)
            peers.flights.end(keys)

    async def _transfer(
        self, source: _Source, batch: list[int], landing: Landing, reading: asyncio.Lock
    ) -> list[Incoming]:
        """Acquires and reads a batch; the chunks that are now in the pool, not yet verified."""
        peer, peers = source.peer, self._peers
        keys = [self._progress.keys[index] for index in batch]
        ttl_seconds = self._left() + GRANT_MARGIN_SECONDS
        acquiring = asyncio.create_task(peer.acquire(self._spec, keys, ttl_seconds, self._step_seconds(source)))
        try:
            response = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            peers.release_once_granted(peer, acquiring)
            raise
        try:
            incoming = self._reserve(source, batch, response, landing)
            if incoming:
                copies = [
                    Copy(
                        remote_address=chunk.remote_address,
                        local_address=peers.address + chunk.reserved.offset,
                        size_bytes=chunk.size_bytes,
                    )
                    for chunk in incoming
                ]
                async with reading:
                    started = time.monotonic()
                    await peers.channel.read(peer.name, copies, self._step_seconds(source), landing.write())
                    self._adapt(time.monotonic() - started)
        finally:
            if response.grant.grant_id:
                peers.release(peer, response.grant.grant_id)
        return incoming

    def _reserve(
        self, source: _Source, batch: list[int], response: pb.AcquireResponse, landing: Landing
    ) -> list[Incoming]:
        """Makes room for what the peer offers, as far as there is any."""
        offered = checked_extents(response, len(batch), self._spec, source.peer.regions)
        if not offered:
            source.refused.update(batch)
        incoming = []
        for at, address, extent in offered:
            reserved = landing.reserve(extent.size_bytes)
            if reserved is None:
                self._full = True
                self.error = NoFreeExtents("the own pool is full of chunks in use", retry_seconds=1)
                break
            incoming.append(
                Incoming(
                    index=batch[at],
                    remote_address=address,
                    checksum=extent.checksum,
                    token_count=extent.token_count,
                    size_bytes=extent.size_bytes,
                    reserved=reserved,
                )
            )
        return incoming

    def _adapt(self, seconds: float) -> None:
        if seconds < FAST_SECONDS:
            self._batch_bytes = min(2 * self._batch_bytes, MAX_BATCH_BYTES)
        elif seconds > SLOW_SECONDS:
            self._batch_bytes //= 2

    def _commit(self, source: _Source, incoming: Incoming, landing: Landing) -> None:
        peers, instance_id = self._peers, source.peer.instance_id
        chunk = landing.commit(self._progress.keys[incoming.index], self._spec.fingerprint, incoming)
        peers.fetched_chunks += 1
        peers.fetched_bytes += incoming.size_bytes
        if chunk:
            self._progress.add([(incoming.index, chunk)], instance_id)
            peers.flights.land(chunk, instance_id)

    def _reject(self, source: _Source, incoming: Incoming) -> None:
        source.refused.add(incoming.index)
        self._peers.checksum_mismatches += 1
        logger.warning(
            "chunk %s came damaged from %s and was thrown away",
            self._progress.keys[incoming.index].hex(),
            source.peer.instance_id,
        )


def _first(group: BaseExceptionGroup[LmkvError]) -> LmkvError:
    """Some error in the group."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
