"""The fetching side of the node: brings chunks that peers hold into the own tier. Used by `Sources`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmkv.errors import KvSpecMismatch, LmkvError, NoFreeExtents, Unreachable
from lmkv.keys import ChunkKey
from lmkv.pool import Pool
from lmkv.spec import KvSpec
from lmkv.transfer import Channel, Copy
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_kernels import checksum
from lmkv_server.node.fetch import Flights, Incoming, Landing, OnChunks, Progress, checked_extents
from lmkv_server.node.host_tier import HostTier
from lmkv_server.node.peer_connection import PeerConnection

logger = logging.getLogger(__name__)

MIN_BATCH_BYTES = 8 << 20
"""What the first batch asks for: small, so that the first chunks are soon there."""
MAX_BATCH_BYTES = 64 << 20
FAST_SECONDS = 0.05
"""A batch that took less is followed by one twice as large."""
SLOW_SECONDS = 0.2
"""A batch that took more is followed by one half as large."""
PIPELINE_DEPTH = 2
"""Batches of one fetch under way at one peer: one is read while the other is acquired or verified."""
MAX_CONNECTIONS = 256
GRANT_MARGIN_SECONDS = 0.5
RELEASE_SECONDS = 0.5
LEAST_SECONDS = 0.005
"""With less time left nothing is begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """How a fetch went."""

    chunk_count: int = 0
    """Chunks handed out, from the first on without a gap."""
    size_bytes: int = 0
    """Bytes that came from peers for it, transferred by itself."""
    seconds: float = 0.0
    instance_ids: tuple[str, ...] = ()
    """Peers that gave any, in order of first use."""
    error: LmkvError | None = None
    """Why it is not whole, if there was an error; a chunk that nobody holds any more is none."""


class Peers:
    """All peers that this node fetches from. One event loop owns it; to be used as an async context manager."""

    def __init__(self, *, instance_id: str, epoch: int, tier: HostTier, channel: Channel, pool: Pool) -> None:
        self.fetched_chunks = 0
        """Chunks brought in whole since the start."""
        self.fetched_bytes = 0
        """Bytes of these."""
        self.checksum_mismatches = 0
        """Chunks that arrived damaged, and were thrown away."""
        self.spec_mismatches = 0
        """Times that a peer turned out to share nothing with one of the own specs."""
        self.unreachable = 0
        """Times that a peer failed."""
        self._instance_id = instance_id
        self._epoch = epoch
        self._tier = tier
        self._channel = channel
        self._pool = pool
        self._connections: OrderedDict[str, PeerConnection] = OrderedDict()  # least recently used first
        self._flights = Flights()
        self._quarantine: set[Landing] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifier = ThreadPoolExecutor(1, "lmkv-verify")
        self._closed = False

    @property
    def quarantined_count(self) -> int:
        """Batches whose extents are kept only because their transfer has not stopped."""
        self._quarantine = {landing for landing in self._quarantine if landing.quarantined}
        return len(self._quarantine)

    async def __aenter__(self) -> Peers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves all peers. Fetches must have ended. Idempotent."""
        self._closed = True
        if self._tasks:  # grants to give back; each is bounded
            await asyncio.wait(self._tasks)
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()
        await asyncio.to_thread(self._verifier.shutdown)

    async def fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        *,
        first: int = 0,
    ) -> Fetched:
        """Brings `keys[first:]` into the own tier; each holder's `matched_chunk_count` counts from `keys[0]`.

        `on_chunks` gets them in order and without a gap, as soon as they are verified, each with a hold that the caller
        ends. Chunks that are in the tier by now are among them. Returns within `timeout_seconds` with what came by
        then; raises nothing but what `on_chunks` raises. Cancelled at any point it leaves no hold and no grant, and no
        reservation but of memory that a transfer may still write to.
        """
        started = time.monotonic()
        progress = Progress(self._tier, spec, keys, first, on_chunks)
        fetch = _Fetch(self, progress, holders, started + timeout_seconds)
        try:
            await fetch.run()
        finally:
            progress.close()
        return Fetched(
            chunk_count=progress.next_index - first,
            size_bytes=progress.size_bytes,
            seconds=time.monotonic() - started,
            instance_ids=tuple(progress.instance_ids),
            error=fetch.error if progress.missing else None,
        )
