"""Compares the checksums of chunks that were read into the pool, on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lmkv.pool.pool import Pool
from lmkv_kernels import checksum
from lmkv_server.node.fetch.pending_writes import IncomingChunk

THREADS = 2
"""Each compares half of a batch, which halves the time after the last read."""


class ChecksumVerifier:
    """Finds chunks whose bytes are not what their owner committed. One event loop owns it. It ends by `aclose`."""

    def __init__(self, pool: Pool, *, enabled: bool) -> None:
        self.enabled = enabled
        """Whether checksums are compared; otherwise every chunk counts as intact."""
        self._pool = pool
        self._threads = ThreadPoolExecutor(THREADS, "lmkv-verify")

    async def aclose(self) -> None:
        """Waits for running comparisons. Idempotent."""
        await asyncio.to_thread(self._threads.shutdown)

    async def intact(self, chunks: Sequence[IncomingChunk], checksums: Sequence[int] | None) -> list[bool]:
        """Which of the chunks match their checksum. `checksums` are those of the read bytes, if they are known."""
        if not self.enabled or not chunks:
            return [True] * len(chunks)
        if checksums is not None:
            return [found == chunk.remote.checksum for found, chunk in zip(checksums, chunks, strict=True)]
        loop, middle = asyncio.get_running_loop(), (len(chunks) + 1) // 2
        halves = [half for half in (chunks[:middle], chunks[middle:]) if half]
        found = await asyncio.gather(*(loop.run_in_executor(self._threads, self._compare, half) for half in halves))
        return [intact for half in found for intact in half]

    def _compare(self, chunks: Sequence[IncomingChunk]) -> list[bool]:
        return [
            checksum(self._pool.buffer, chunk.reserved.offset, chunk.remote.size_bytes) == chunk.remote.checksum
            for chunk in chunks
        ]
