"""Where else chunks can come from: a handoff brings them, or peers give what the coordinator says they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.registry_service_pb2 import SpecConflict
from lmkv_server.node.arrivals import Progress
from lmkv_server.node.fleet import Fleet
from lmkv_server.node.host_tier import Chunk
from lmkv_server.node.peers import Fetched, Peers
from lmkv_server.node.receiver import Receiver

REST_SECONDS = 1.0
"""Most time to fetch from peers what a handoff did not bring."""

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Told which chunks, by index, have just been committed; they are held for the callee."""


class Sources:
    """The fleet as one node sees it. Without a coordinator or without peers every question is a miss."""

    def __init__(
        self, fleet: Fleet, peers: Peers | None, receiver: Receiver | None, locate_timeout_seconds: float
    ) -> None:
        self._fleet = fleet
        self._peers = peers
        self._receiver = receiver
        self._locate_timeout_seconds = locate_timeout_seconds

    @property
    def connected(self) -> bool:
        """Whether asking makes sense at all."""
        return self._peers is not None and self._fleet.connected

    @property
    def conflicts(self) -> Sequence[SpecConflict]:
        """Instances of the same models that share nothing with this one, and why."""
        return self._fleet.conflicts

    async def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Holder]:
        """Peers that hold the chunks from the first key on, longest run first. Bounded; a failure is a miss."""
        if not keys or not self.connected:
            return ()
        return await self._fleet.lookup(keys, self._locate_timeout_seconds)

    def claim(self, handoff_id: str) -> Callable[[], None] | None:
        """A request has come for a handoff; the result, if any, is to be called when it lets go."""
        return self._receiver.claim(handoff_id) if handoff_id and self._receiver else None

    def promised(self, handoff_id: str, first: int, total: int) -> tuple[int, str]:
        """Of a prompt of `total` chunks, those from `first` on that a handoff may bring, and whose they are."""
        return self._receiver.promised(handoff_id, first, total) if handoff_id and self._receiver else (0, "")

    def fetch_seconds(self, holders: Sequence[Holder], size_bytes: int) -> float | None:
        """How long it should take to bring so many bytes from the best of these; None if that is not known."""
        return self._peers.expected_seconds(holders, size_bytes) if self._peers else None

    async def fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        handoff_id: str = "",
    ) -> Fetched:
        """Brings chunks into the own tier: what a handoff brings, then what peers hold of the rest.

        Never raises but for cancellation; what did not come is in the result.
        """
        if self._peers is None:
            return Fetched()
        if not handoff_id:
            return await self._peers.fetch(spec, keys, holders, timeout_seconds, on_chunks) if holders else Fetched()
        began = time.monotonic()
        progress = Progress(self._peers.tier, spec, keys, 0, on_chunks)
        try:
            assert self._receiver
            await self._receiver.follow(handoff_id, progress, timeout_seconds)
            rest_seconds = min(timeout_seconds - (time.monotonic() - began), REST_SECONDS)
            if progress.missing and rest_seconds > 0:
                return await self._peers.bring(progress, await self.locate(keys), rest_seconds)
        finally:
            progress.close()
        return Fetched(chunk_count=progress.handed_count, seconds=time.monotonic() - began)
