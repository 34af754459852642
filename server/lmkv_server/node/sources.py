"""Where else chunks can come from: the coordinator says who has them, the peers give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.registry_service_pb2 import SpecConflict
from lmkv_server.node.fleet import Fleet
from lmkv_server.node.host_tier import Chunk
from lmkv_server.node.peers import Fetched, Peers

OnChunks = Callable[[list[tuple[int, Chunk]]], None]
"""Told which chunks, by index, have just been committed; they are held for the callee."""


class Sources:
    """The fleet as one node sees it. Without a coordinator or without peers every question is a miss."""

    def __init__(self, fleet: Fleet, peers: Peers | None, locate_timeout_seconds: float) -> None:
        self._fleet = fleet
        self._peers = peers
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
    ) -> Fetched:
        """Brings chunks into the own tier. Never raises but for cancellation; what did not come is in the result."""
        if self._peers is None or not holders:
            return Fetched()
        return await self._peers.fetch(spec, keys, holders, timeout_seconds, on_chunks)
