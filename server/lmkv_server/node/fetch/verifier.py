"""Compares chunks that came into the pool with their checksums, on threads. Used by `Peers`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lmkv.pool.pool import Pool
from lmkv_kernels import checksum
from lmkv_server.node.fetch.inflight import Incoming

THREADS = 2
"""Each takes half of a batch, so that after the last read it is not long until all is verified."""


class Verifier:
    """Says which chunks are what their owner committed. One event loop owns it. It ends by `aclose`."""

    def __init__(self, pool: Pool, *, enabled: bool) -> None:
        self.enabled = enabled
        """Whether anything is compared; otherwise all chunks are taken as they come."""
        self._pool = pool
        self._threads = ThreadPoolExecutor(THREADS, "lmkv-verify")

    async def aclose(self) -> None:
        """Waits for what is being compared. Idempotent."""
        await asyncio.to_thread(self._threads.shutdown)

    async def intact(self, incoming: Sequence[Incoming], sums: Sequence[int] | None) -> list[bool]:
        """Which of the chunks in the pool are what their owner committed. `sums`: their checksums, if known already."""
        if not self.enabled or not incoming:
            return [True] * len(incoming)
        if sums is not None:
            return [made == chunk.checksum for made, chunk in zip(sums, incoming, strict=True)]
        loop, middle = asyncio.get_running_loop(), (len(incoming) + 1) // 2
        halves = [half for half in (incoming[:middle], incoming[middle:]) if half]
        found = await asyncio.gather(*(loop.run_in_executor(self._threads, self._compare, half) for half in halves))
        return [intact for half in found for intact in half]

    def _compare(self, incoming: Sequence[Incoming]) -> list[bool]:
        return [
            checksum(self._pool.buffer, chunk.reserved.offset, chunk.size_bytes) == chunk.checksum for chunk in incoming
        ]
