"""One fetch: asks one holder after the other for what is missing. Run by `Peers.fetch`.

From each it acquires windows of chunks, and reads these in batches; while one is read, the one before is verified.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkv.errors import ChunkNotFound, Full, KvSpecMismatch, LmkvError, NoFreeExtents, Unreachable
from lmkv.transfer import Copy
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.arrivals import Incoming, Landing, Offer, Progress, checked_extents
from lmkv_server.node.host_tier import Chunk
from lmkv_server.node.peer_connection import PeerConnection

if TYPE_CHECKING:
    from lmkv_server.node.peers import Peers

logger = logging.getLogger(__name__)

WINDOW_BYTES = 256 << 20
"""Most bytes that one `Acquire` asks for."""
WINDOW_CHUNKS = 1024
FIRST_BATCH_BYTES = 8 << 20
"""What is read first: little, so that the first chunks are soon there."""
MAX_BATCH_BYTES = 32 << 20
"""What is read at a time: little, so that not much is left to verify after the last."""
FAST_SECONDS = 0.05
"""A batch that took less is followed by a larger one."""
SLOW_SECONDS = 0.2
"""A batch that took more is followed by a smaller one."""
GRANT_MARGIN_SECONDS = 0.5
MAX_STEP_SECONDS = 10.0
"""A peer that takes longer for one answer or one batch has failed, however much time is left."""
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
        self._batch_bytes = FIRST_BATCH_BYTES
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
        front = self._progress.front
        others = any(other is not source and any(map(other.has, front)) for other in self._sources)
        return min(max(self._left() / 2 if others else self._left(), LEAST_SECONDS), MAX_STEP_SECONDS)

    def _choose(self) -> tuple[_Source | None, list[int]]:
        """The best holder of something that is missing, and what to ask it for."""
        flights, keys = self._peers.flights, self._progress.keys
        mine = []
        for index in sorted(self._progress.missing):
            if keys[index] in flights:
                continue
            if any(source.has(index) for source in self._sources):
                mine.append(index)
            elif self._progress.in_order:
                break  # a hole that nobody fills: what comes behind it is of no use
        for source in self._sources:
            if wanted := [index for index in mine if source.has(index)]:
                return source, wanted
        return None, []

    async def _others(self) -> bool:
        """Waits for something that another fetch brings; False if that is no use, or the time is up."""
        progress = self._progress
        if not any(progress.keys[index] in self._peers.flights for index in progress.front):
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
        try:
            await source.peer.agree(self._spec, self._step_seconds(source))
            while pending and not self._full and self._left() >= LEAST_SECONDS:
                await self._bring_window(source, pending)
        except LmkvError as error:
            self._failed(source, error)
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

    async def _bring_window(self, source: _Source, pending: deque[int]) -> None:
        """Brings the first of `pending`, as many as fit into a window, and takes them off it."""
        flights, progress = self._peers.flights, self._progress
        count = max(1, min(WINDOW_BYTES // self._spec.chunk_bytes, WINDOW_CHUNKS, len(pending)))
        window = [pending.popleft() for _ in range(min(count, len(pending)))]
        window = [i for i in window if i in progress.missing and progress.keys[i] not in flights]
        if not window:
            return
        keys = [progress.keys[index] for index in window]
        flights.start(keys)
        try:
            granted = await self._read_window(source, window)
        except Full as error:  # earlier grants will end
            self.error = error
            pending.extendleft(reversed(window))
            await asyncio.sleep(float(error.metadata.get("retry_seconds", 0.02)))
        else:
            if granted:  # what was not may be lost, or more than the peer grants at a time
                pending.extendleft(index for index in reversed(window) if index not in granted)
            else:
                instance_id = source.peer.instance_id
                source.refused.update(window)
                absent = ChunkNotFound(f"{instance_id} does not hold it", instance_id=instance_id)
                progress.failures.update(dict.fromkeys(keys, absent))
        finally:
            flights.end(keys)

    async def _read_window(self, source: _Source, window: list[int]) -> set[int]:
        """Acquires, reads, verifies and commits; the indices of the chunks that the peer granted."""
        response = await self._acquire(source, window)
        landings: list[Landing] = []
        failure: LmkvError | None = None
        try:
            offered = deque(checked_extents(response, len(window), self._spec, source.peer.regions))
            granted = {window[at] for at, _, _ in offered}
            async with asyncio.TaskGroup() as verifying:
                try:
                    while offered and not self._full:
                        landing = Landing(self._peers.tier)
                        landings.append(landing)
                        incoming = self._reserve(window, self._next_batch(offered), landing)
                        await self._read(source, incoming, landing)
                        verifying.create_task(self._verify(source, incoming, landing))
                except LmkvError as error:  # what came before is still good
                    failure = error
                self._release(source, response)
            if failure:
                raise failure
        finally:
            self._release(source, response)
            for landing in landings:
                landing.close()
                if landing.quarantined:
                    self._peers.quarantine(landing)
        return granted

    def _next_batch(self, offered: deque[Offer]) -> list[Offer]:
        count = max(1, self._batch_bytes // self._spec.chunk_bytes)
        return [offered.popleft() for _ in range(min(count, len(offered)))]

    async def _acquire(self, source: _Source, window: list[int]) -> pb.AcquireResponse:
        keys = [self._progress.keys[index] for index in window]
        ttl_seconds = self._left() + GRANT_MARGIN_SECONDS
        acquiring = asyncio.create_task(source.peer.acquire(self._spec, keys, ttl_seconds, self._step_seconds(source)))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            self._peers.release_once_granted(source.peer, acquiring)
            raise

    def _release(self, source: _Source, response: pb.AcquireResponse) -> None:
        """Gives the grant back, once."""
        if response.grant.grant_id:
            self._peers.release(source.peer, response.grant.grant_id)
            response.grant.grant_id = ""

    def _reserve(self, window: list[int], batch: list[Offer], landing: Landing) -> list[Incoming]:
        """Makes room for what the peer offers, as far as there is any."""
        incoming = []
        for at, address, extent in batch:
            reserved = landing.reserve(extent.size_bytes)
            if reserved is None:
                self._full = True
                self.error = NoFreeExtents("the own pool is full of chunks in use", retry_seconds=1)
                break
            incoming.append(
                Incoming(
                    index=window[at],
                    remote_address=address,
                    checksum=extent.checksum,
                    token_count=extent.token_count,
                    size_bytes=extent.size_bytes,
                    reserved=reserved,
                )
            )
        return incoming

    async def _read(self, source: _Source, incoming: Sequence[Incoming], landing: Landing) -> None:
        copies = [
            Copy(
                remote_address=chunk.remote_address,
                local_address=self._peers.address + chunk.reserved.offset,
                size_bytes=chunk.size_bytes,
            )
            for chunk in incoming
        ]
        started = time.monotonic()
        await self._peers.channels.read(source.peer.name, copies, self._step_seconds(source), landing.write())
        seconds = time.monotonic() - started
        if seconds < FAST_SECONDS:
            self._batch_bytes = min(2 * self._batch_bytes, MAX_BATCH_BYTES)
        elif seconds > SLOW_SECONDS:
            self._batch_bytes //= 2

    async def _verify(self, source: _Source, incoming: Sequence[Incoming], landing: Landing) -> None:
        """Commits what is what its owner committed, and hands it on."""
        arrived: list[tuple[int, Chunk]] = []
        for chunk, intact in zip(incoming, await self._peers.intact(incoming), strict=True):
            if not intact:
                self._reject(source, chunk)
            elif committed := landing.commit(self._progress.keys[chunk.index], self._spec.fingerprint, chunk):
                self._peers.count(source.peer.instance_id, committed)
                arrived.append((chunk.index, committed))
        self._progress.add(arrived, source.peer.instance_id)
        for _, committed in arrived:
            self._peers.flights.land(committed, source.peer.instance_id)

    def _reject(self, source: _Source, incoming: Incoming) -> None:
        key, instance_id = self._progress.keys[incoming.index], source.peer.instance_id
        source.refused.add(incoming.index)
        self._progress.failures[key] = Unreachable(f"it came damaged from {instance_id}", instance_id=instance_id)
        self._peers.checksum_mismatches += 1
        logger.warning("chunk %s came damaged from %s and was thrown away", key.hex(), instance_id)
