"""Verifies chunks of this node that arrived damaged at a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from lmkv.errors import Full
from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.runtime.places import Places, most_of
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Chunks that wait to be verified, of which one caller's reports may have 7/8; reports beyond these are ignored, since
peers repeat them."""


class Inspector:
    """Drops chunks whose bytes do not match their checksum in this node's memory; a peer's report alone drops nothing.

    To be used as an async context manager, on the loop that owns the tier.
    """

    def __init__(self, tier: HostTier, pool: Pool) -> None:
        self._damaged_count = 0
        self._tier = tier
        self._pool = pool
        self._pending = Places[int]("chunks to verify", MAX_PENDING, most_of(MAX_PENDING))
        """By generation: each is held."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "lmkv-inspect")

    @property
    def damaged_count(self) -> int:
        """Chunks that were damaged, and dropped, since the start."""
        return self._damaged_count

    async def __aenter__(self) -> Inspector:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Releases the chunks that were not verified. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def inspect(self, chunks: Iterable[Chunk], peer_id: str, caller: str = "") -> None:
        """Verifies chunks that a peer found damaged, on a thread, and drops those that are.

        They take places of the share of the caller that has reported them.
        """
        for chunk in chunks:
            if chunk.dropped or chunk.generation in self._pending:
                continue
            try:
                self._pending.take(chunk.generation, caller)
            except Full:
                return
            self._tier.hold([chunk])
            task = asyncio.create_task(self._verify(chunk, peer_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _verify(self, chunk: Chunk, peer_id: str) -> None:
        verifying = asyncio.get_running_loop().run_in_executor(self._thread, self._sum, chunk)
        try:
            found = await asyncio.shield(verifying)
        except asyncio.CancelledError:
            await asyncio.wait([verifying])  # the thread reads the bytes
            raise
        finally:
            self._pending.release(chunk.generation)
            self._tier.unhold([chunk])
        if found == chunk.checksum:
            logger.warning("chunk %s arrived damaged at %s, but is intact here", chunk.key.hex(), peer_id)
        elif not chunk.dropped:
            self._tier.drop([chunk.key], MissReason.DAMAGED)
            self._damaged_count += 1
            logger.error("chunk %s is damaged in this node's memory and was dropped", chunk.key.hex())

    def _sum(self, chunk: Chunk) -> int:
        return checksum(self._pool.buffer, chunk.offset, chunk.size_bytes)
