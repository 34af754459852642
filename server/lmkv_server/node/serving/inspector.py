"""Looks after chunks that peers say came damaged from here. Used by `PeerService`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from lmkv.pool.pool import Pool
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Chunks to look at; what is said to be damaged beyond these is not looked at: it will be said again."""


class Inspector:
    """Drops chunks whose bytes are not what was committed. It believes only its own eyes: peers may be wrong, or lie.

    To be used as an async context manager, on the loop that owns the tier.
    """

    def __init__(self, tier: HostTier, pool: Pool) -> None:
        self.damaged_count = 0
        """Chunks that were damaged, and dropped, since the start."""
        self._tier = tier
        self._pool = pool
        self._pending: dict[int, Chunk] = {}  # by generation: what is held to be looked at
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "lmkv-inspect")

    async def __aenter__(self) -> Inspector:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Lets go of what has not been looked at. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def suspect(self, chunks: Iterable[Chunk], peer_id: str) -> None:
        """Looks at chunks that a peer found damaged, and drops those that are; soon, and off the loop."""
        for chunk in chunks:
            if chunk.dropped or chunk.generation in self._pending or len(self._pending) >= MAX_PENDING:
                continue
            self._pending[chunk.generation] = chunk
            self._tier.hold([chunk])
            task = asyncio.create_task(self._look(chunk, peer_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, chunk: Chunk, peer_id: str) -> None:
        looking = asyncio.get_running_loop().run_in_executor(self._thread, self._sum, chunk)
        try:
            found = await asyncio.shield(looking)
        except asyncio.CancelledError:
            await asyncio.wait([looking])  # the bytes stay where they are while somebody reads them
            raise
        finally:
            del self._pending[chunk.generation]
            self._tier.unhold([chunk])
        if found == chunk.checksum:
            logger.warning("chunk %s came damaged to %s, but is whole here", chunk.key.hex(), peer_id)
        elif not chunk.dropped:
            self._tier.drop([chunk.key])
            self.damaged_count += 1
            logger.error("chunk %s is damaged in this node's memory and was dropped", chunk.key.hex())

    def _sum(self, chunk: Chunk) -> int:
        return checksum(self._pool.buffer, chunk.offset, chunk.size_bytes)
