"""Where else chunks come from: a handoff, the own disk, peers that the coordinator names, the store that all share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.tiers import Run
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.registry_service_pb2 import SpecConflict
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.fetcher import FetchResult, PeerFetcher
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.handoff.device_buffers import DeviceBuffers
from lmkv_server.node.handoff.receiver import Receiver
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.progress import Progress
from lmkv_server.node.tiers.reader import TierReader
from lmkv_server.node.tiers.remote.tier import RemoteTier

REST_SECONDS = 1.0
"""Most time to fetch from peers what a handoff did not bring."""

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Told which chunks, by index, have just been committed; they are held for the callee."""


class TierStack:
    """All that one node's tier can be filled from. Who is not there, such as a coordinator or a disk, has nothing."""

    def __init__(
        self,
        tier: HostTier,
        fleet: FleetMembership,
        *,
        fetcher: PeerFetcher | None,
        receiver: Receiver | None,
        disk: DiskTier | None,
        remote: RemoteTier | None = None,
        locate_timeout_seconds: float,
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._remote = remote
        self._fleet = fleet
        self._fetcher = fetcher
        self._receiver = receiver
        self._locate_timeout_seconds = locate_timeout_seconds

    @property
    def connected(self) -> bool:
        """Whether asking the coordinator makes sense at all."""
        return self._fetcher is not None and self._fleet.connected

    @property
    def asks(self) -> bool:
        """Whether there is anybody to ask about chunks that are not here."""
        return self.connected or (self._remote is not None and self._remote.is_usable)

    @property
    def conflicts(self) -> Sequence[SpecConflict]:
        """Instances of the same models that share nothing with this one, and why."""
        return self._fleet.conflicts

    @property
    def buffers(self) -> DeviceBuffers | None:
        """The device buffers that engines have lent; None if the node has no peers."""
        return self._receiver.buffers if self._receiver else None

    def on_disk(self, fingerprint: bytes, keys: Sequence[ChunkKey], after: int) -> int:
        """How many chunks of a prompt the own disk has, from `keys[after]` on; those before are in the tier."""
        return self._disk.count(fingerprint, keys, after) if self._disk else 0

    async def in_remote(self, spec: KvSpec, keys: Sequence[ChunkKey], after: int) -> int:
        """How many chunks of a prompt the shared store has, from `keys[after]` on. Bounded; a failure is a miss."""
        return await self._remote.count(spec, keys, after) if self._remote else 0

    async def locate(self, keys: Sequence[ChunkKey], after: int = 0) -> Sequence[Holder]:
        """Peers that hold the chunks from `keys[after]` on, longest run first. Bounded; a failure is a miss.

        What they may hold is counted from `keys[0]`.
        """
        if len(keys) <= after or not self.connected:
            return ()
        holders = await self._fleet.lookup(keys[after:], self._locate_timeout_seconds)
        return [shifted(holder, -after) for holder in holders] if after else holders

    def claim(self, handoff_id: str, engine_id: str) -> Callable[[], None] | None:
        """A request has come to an engine for a handoff; the result, if any, is to be called when it lets go."""
        return self._receiver.claim(handoff_id, engine_id) if handoff_id and self._receiver else None

    def drop_handoff(self, handoff_id: str) -> None:
        """No request of an engine here will load this handoff."""
        if self._receiver:
            self._receiver.drop(handoff_id)

    def promised(self, handoff_id: str, first: int, total: int) -> tuple[int, str]:
        """Of a prompt of `total` chunks, those from `first` on that a handoff may bring, and whose they are."""
        return self._receiver.promised(handoff_id, first, total) if handoff_id and self._receiver else (0, "")

    def fetch_seconds(self, holders: Sequence[Holder], size_bytes: int) -> float | None:
        """How long it should take to bring so many bytes from the best of these; None if that is not known."""
        return self._fetcher.expected_seconds(holders, size_bytes) if self._fetcher else None

    def read_seconds(self, size_bytes: int) -> float | None:
        """How long it should take to read so many bytes from disk; None if that is not known."""
        return self._disk.reader.expected_seconds(size_bytes) if self._disk else None

    def remote_seconds(self, size_bytes: int) -> float | None:
        """How long it should take to read so many bytes from the shared store; None if that is not known."""
        return self._remote.reader.expected_seconds(size_bytes) if self._remote else None

    async def fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        handoff_id: str = "",
    ) -> FetchResult:
        """Brings chunks into the own tier: what a handoff brings, what is on disk, what peers hold, what all share.

        Never raises but for cancellation; what did not come is in the result.
        """
        began = time.monotonic()
        fetched = await self._fetch(spec, keys, holders, timeout_seconds, on_chunks, handoff_id)
        rest_seconds = timeout_seconds - (time.monotonic() - began)
        if self._remote is None or fetched.chunk_count == len(keys) or rest_seconds <= 0:
            return fetched
        progress = Progress(self._tier, spec, keys, fetched.chunk_count, on_chunks)
        try:
            await self._remote.count(spec, keys, fetched.chunk_count)  # most likely known from the lookup
            await self._read(self._remote.reader, progress, rest_seconds)
        finally:
            progress.close()
        return replace(
            fetched,
            chunk_count=fetched.chunk_count + progress.handed_count,
            seconds=time.monotonic() - began,
            error=fetched.error if progress.missing else None,
        )

    async def _fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        handoff_id: str,
    ) -> FetchResult:
        """The same, without what all share."""
        began = time.monotonic()
        progress = Progress(self._tier, spec, keys, 0, on_chunks)
        try:
            if handoff_id and self._receiver:
                await self._receiver.follow(handoff_id, progress, timeout_seconds)
            if self._disk:
                await self._read(self._disk.reader, progress, timeout_seconds - (time.monotonic() - began))
            rest_seconds = timeout_seconds - (time.monotonic() - began)
            if progress.missing and rest_seconds > 0 and self._fetcher:
                if handoff_id:
                    holders, rest_seconds = await self.locate(keys), min(rest_seconds, REST_SECONDS)
                if self._remote and self._remote.is_usable:  # which is asked after them: not all the time
                    rest_seconds /= 2
                if handoff_id or holders:
                    return await self._fetcher.fetch(progress, holders, rest_seconds)
        finally:
            progress.close()
        return FetchResult(chunk_count=progress.handed_count, seconds=time.monotonic() - began)

    async def _read(self, reader: TierReader[Any], progress: Progress, timeout_seconds: float) -> None:
        """Brings what is missing and in a deeper tier."""
        if timeout_seconds <= 0:
            return
        progress.find_own()
        missing = sorted(progress.missing)
        await reader.read(
            progress.spec.fingerprint,
            [progress.keys[index] for index in missing],
            timeout_seconds,
            lambda at, chunk: progress.add([(missing[at], chunk)]),
        )

    def clear(self, fingerprint: bytes) -> int:
        """Forgets every chunk of one spec that is not pinned, in deeper tiers, too; how many the node itself had."""
        keys = {chunk.key for chunk in self._tier if chunk.fingerprint == fingerprint and not chunk.pins}
        if self._disk:
            kept = {chunk.key for chunk in self._tier if chunk.pins}
            keys |= {chunk.key for chunk in self._disk if chunk.fingerprint == fingerprint and chunk.key not in kept}
            self._disk.drop(keys)
        if self._remote:
            self._remote.forget(fingerprint)
        self._tier.drop(keys)
        return len(keys)


def found_runs(**chunk_counts: int) -> tuple[Run, ...]:
    """What a lookup found behind the node's pool, by tier; tiers without chunks are left out."""
    return tuple(Run(tier=tier, chunk_count=count) for tier, count in chunk_counts.items() if count > 0)


def shifted(holder: Holder, chunk_count: int) -> Holder:
    """The holder as seen from so many chunks further into the prompt."""
    copy = Holder()
    copy.CopyFrom(holder)
    copy.matched_chunk_count -= chunk_count
    return copy
