"""The peers as a `SecondaryTier`: chunks in the pools of other nodes, which a coordinator names.

`PeerFetcher` fetches them into this node's tier, from several holders at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypedDict, Unpack

from lmkv.errors import LmkvError, Unreachable
from lmkv.keys import ChunkKey
from lmkv.prompt import Hit, Items, Tail
from lmkv.runtime.patience import MOST_SECONDS
from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import Bandwidth, shortest_seconds
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.fetch.holder_reader import FetchState, FetchStats, HolderReader
from lmkv_server.node.fetch.pipeline import TransferPipeline, TransferStats
from lmkv_server.node.fetch.scheduler import HolderState, InflightFetches
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.tiers.base import Dropped, Loaded, Needs, Presence, Progress, Selection, TierStats, TierUsage


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

    def expected_seconds(self, holders: Sequence[Holder], spec: KvSpec, size_bytes: int) -> float | None:
        """The expected time to fetch chunks of this many bytes from the best of the holders, behind what other fetches
        wait for there; None if one of them is unknown."""
        sources = []
        for instance_id in [holder.instance_id for holder in holders]:
            peer = self._connections.find(instance_id)
            share = self._moved_share(peer, spec) if peer else None
            if peer is None or share is None:
                return None
            queued_bytes = sum(fetch.queued_bytes(instance_id) for fetch in self._running)
            sources.append((peer.bandwidth, share * size_bytes + queued_bytes))
        return shortest_seconds(sources, time.monotonic())

    def _moved_share(self, peer: PeerConnection, spec: KvSpec) -> float | None:
        """Bytes that reads from a peer move for each byte of chunks; None if these may be encoded, and none was read
        yet."""
        return peer.shares.get(spec.fingerprint) if self._pipeline.codec_for(spec, peer.channel) else 1.0

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
                    moved_share=self._moved_share(peer, progress.spec) or 1.0,
                    is_late=peer.is_late,
                )
                connections[state] = peer
        fetch = FetchState(progress, connections, self.inflight, self._combined, deadline)
        fetch.error = error
        return fetch

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


NAME = "peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHolders:
    """The answer of the coordinators to a lookup; its fields are those of `lmkv.internal.v1.LookupResponse`."""

    holders: Sequence[Holder] = ()
    partial_token_counts: Sequence[int] = ()
    key_index: int = 0
    prefix_key: bytes = b""
    prefix_token_count: int = 0
    is_answered: bool = True
    """Whether a coordinator that has all snapshots answered, or each that was asked; if not, others may hold more."""


class LookupFields(TypedDict, total=False):
    """Further fields of a lookup, as those of `lmkv.internal.v1.LookupRequest`."""

    fingerprint: bytes
    """Finds instances that hold what a hit needs of the spec's chunks, the longest hit first."""
    parent_key: bytes
    """The key of the chunk before the first: finds also the lengths of partial chunks behind the longest run."""
    any_key: bool
    """Finds instances that hold the first key that any of them holds."""
    prefix_digests: bytes
    """With `any_key`: finds also a chunk that has more of the prompt."""


class Coordinators(Protocol):
    """Finds the instances that hold chunks: `FleetMembership`."""

    @property
    def connected(self) -> bool:
        """Whether one answers, according to the last attempts."""

    def answers_within(self, seconds: float, /) -> bool:
        """Whether one may answer a lookup within this time: none that has been silent for longer."""

    @property
    def is_configured(self) -> bool:
        """Whether there are any."""

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float, /, **fields: Unpack[LookupFields]
    ) -> FoundHolders:
        """The other instances that hold the first key, longest contiguous run first; a failure is a miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerPresence(Presence):
    """The chunks that peers have, and the peers."""

    holders: Sequence[Holder] = ()
    """The longest run first; each `matched_chunk_count` counts from the first key of the prompt."""
    spec: KvSpec | None = None
    """That of the chunks."""

    def with_tail(self, tail: Presence, chunk_count: int) -> Self:
        """Adds a tail as `Presence.with_tail` does. Its holders count as holders of the chunks before it, too."""
        found = tail.holders if isinstance(tail, PeerPresence) else ()
        of_tail = [_counted_from_start(one, chunk_count) for one in found]
        others = [one for one in self.holders if all(one.instance_id != other.instance_id for other in of_tail)]
        return replace(Presence.with_tail(self, tail, chunk_count), holders=[*of_tail, *others])


class PeerTier:
    """The `SecondaryTier` between a node's disk and the remote store."""

    name = NAME
    is_local = False

    def __init__(self, fetcher: PeerFetcher, coordinators: Coordinators, lookup_seconds: float) -> None:
        """`lookup_seconds` limits the time of one lookup at the coordinators, unless its answer is worth more."""
        self._fetcher = fetcher
        self._coordinators = coordinators
        self._lookup_seconds = lookup_seconds

    @property
    def usable(self) -> bool:
        """Whether a coordinator may answer."""
        return self._coordinators.answers_within(MOST_SECONDS)

    @property
    def is_down(self) -> bool:
        """Whether there are coordinators, and none answers."""
        return self._coordinators.is_configured and not self._coordinators.connected

    async def lookup(self, needs: Needs) -> PeerPresence:
        """The needed chunks that the peer with the longest run has. Coordinators match whole hits only."""
        if not (needs.indices or needs.prefix_digests) or not self.usable:
            return PeerPresence(asked=needs.indices)
        return replace(await self._lookup(needs), spec=needs.spec)

    async def _lookup(self, needs: Needs) -> PeerPresence:
        if needs.any_of:
            return await self._lookup_any(needs)
        if needs.items and not needs.in_order:
            return await self._lookup_items(needs, needs.items)
        first, last = needs.indices[0], needs.indices[-1]
        parent_key = (needs.keys[first - 1] if first else needs.root) if needs.root else b""
        found = await self._coordinators.lookup(
            needs.keys[first : last + 1], needs.seconds(self._lookup_seconds), parent_key=parent_key or b""
        )
        holders = [_counted_from_start(holder, first) for holder in found.holders]
        end = max((holder.matched_chunk_count for holder in holders), default=first)
        return PeerPresence(
            asked=needs.indices,
            indices=[index for index in needs.indices if index < end],
            source=holders[0].instance_id if holders else "",
            end=end,
            partial_lengths=found.partial_token_counts,
            holders=holders,
            is_answered=found.is_answered,
        )

    async def _lookup_any(self, needs: Needs) -> PeerPresence:
        """The first of the needed chunks that a peer has. The engine has waited for one lookup already."""
        keys = [needs.keys[index] for index in needs.indices]
        found = await self._coordinators.lookup(
            keys,
            needs.seconds(self._lookup_seconds / 2),
            parent_key=needs.root or b"",
            any_key=True,
            fingerprint=b"" if needs.spec.matches_prefixes else needs.spec.fingerprint,
            prefix_digests=needs.prefix_digests,
        )
        holders = found.holders
        beginning: Tail | None = None
        indices: Sequence[int] = ()
        if holders and found.prefix_key and found.prefix_token_count > 0:
            beginning = Tail(
                key=ChunkKey(found.prefix_key),
                token_count=found.prefix_token_count,
                stored_token_count=holders[0].matched_token_count,
            )
        elif holders and 0 <= found.key_index < len(keys):
            indices = [needs.indices[found.key_index]]
        else:
            return PeerPresence(asked=needs.indices, is_answered=found.is_answered)
        return PeerPresence(
            asked=needs.indices,
            indices=indices,
            source=holders[0].instance_id,
            beginning=beginning,
            holders=holders,
        )

    async def _lookup_items(self, needs: Needs, items: Items) -> PeerPresence:
        """The needed items of the longest hit that each peer has. A peer may have others, of other hits."""
        prompt = items.prompt
        found = await self._coordinators.lookup(
            prompt.keys,
            needs.seconds(self._lookup_seconds),
            fingerprint=needs.spec.fingerprint,
            parent_key=needs.root or b"",
        )
        holders = found.holders
        counts = {min(holder.matched_chunk_count, len(prompt)) for holder in holders}
        held = {index for count in counts for index in items.in_hit(Hit(count))}
        indices = [index for index in needs.indices if index in held]
        source = holders[0].instance_id if indices else ""
        return PeerPresence(
            asked=needs.indices,
            indices=indices,
            source=source,
            end=max(counts, default=0),
            partial_lengths=found.partial_token_counts,
            holders=holders,
            is_answered=found.is_answered,
        )

    async def read(self, progress: Progress, presence: Presence, timeout_seconds: float) -> LmkvError | None:
        """Fetches missing chunks from the peers that the lookup found; returns why chunks are missing, if known."""
        holders = presence.holders if isinstance(presence, PeerPresence) else ()
        return (await self._fetcher.fetch(progress, holders, timeout_seconds)).error

    def expected_seconds(self, presence: Presence, size_bytes: int) -> float | None:
        """The expected time to fetch this many bytes from the best of the peers; None if one of them is unknown."""
        if not isinstance(presence, PeerPresence) or presence.spec is None:
            return None
        return self._fetcher.expected_seconds(presence.holders, presence.spec, size_bytes)

    async def drop(self, selection: Selection) -> Dropped:
        """Drops nothing: chunks at peers belong to these."""
        del selection
        return Dropped()

    def usage(self) -> TierUsage | None:
        """Returns None: this node does not know how full its peers are."""
        return None

    def stats(self) -> TierStats:
        """Counts the reads of fetches and handoffs."""
        transfers, fetches = self._fetcher.transfers(), self._fetcher.stats()
        return TierStats(
            read_chunks=transfers.chunk_count,
            read_bytes=transfers.transferred_bytes,
            damaged_chunks=transfers.checksum_mismatches,
            failures=fetches.failure_count,
        )


def _counted_from_start(holder: Holder, skipped_count: int) -> Holder:
    """A holder that was looked up without the first keys of the prompt, as if these had matched too."""
    if not skipped_count:
        return holder
    counted = Holder()
    counted.CopyFrom(holder)
    counted.matched_chunk_count = holder.matched_chunk_count + skipped_count
    return counted
