"""Copies of one rank, as the worker side sees them, and those of a rank whose pages are in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lmkv.pool.pool import Pool
from lmkv_client.plugin import PROCESSORS
from lmkv_kernels import ChunkCopy, Pages, copied_bytes, gather, scatter

if TYPE_CHECKING:
    from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart

INLINE_BYTES = 4 << 20
"""A copy of at most so many bytes takes well below a millisecond: less than handing it to another thread."""
PART_BLOCKS = 64
"""Blocks that a thread fills at the most between looks at its queue."""


class CopyHandle(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it is over. Raises `ValueError` or `RuntimeError` if it failed."""

    def wait(self) -> None:
        """Waits for its end. Raises as `done` does."""

    @property
    def checksums(self) -> list[int]:
        """Of a gather that is done: per copy what its words add to its chunk's checksum."""


class PageCopier(Protocol):
    """One rank's copies between its pages and whichever pool is open. For the worker's main thread."""

    def open(self, pool: Pool) -> None:
        """Takes a pool; it must not be closed before `let_go` says so."""

    def close_pool(self, then: Callable[[], object]) -> None:
        """Waits for what is under way and calls `then` once the pool may be closed, perhaps from another thread."""

    def begin_step(self) -> None:
        """Before a step's loads and its forward, both of which change pages."""

    def gather(self, copies: Sequence[ChunkCopy]) -> CopyHandle:
        """Begins to copy pages into the pool, as the last forward leaves them.

        Raises `ValueError` if a copy does not fit, `RuntimeError` if it cannot be made now.
        """

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Begins to copy into pages, before the next forward reads them if `sync`. Raises as `gather` does.

        The copies are out of the pool, or out of a device buffer, which must then stay until they are done.
        """

    def close(self) -> None:
        """Waits for what is under way, and lets go of everything. Idempotent."""


class ThreadTask:
    """What threads of this process do, or have done."""

    def __init__(self, futures: Sequence[Future[None]] = (), checksums: Sequence[int] = ()) -> None:
        self._futures = futures
        self.checksums = list(checksums)

    def done(self) -> bool:
        """See `Copying`."""
        if not all(future.done() for future in self._futures):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """See `Copying`."""
        for future in self._futures:
            future.result()


class HostPageCopier:
    """See `Copies`. What the forward does not wait for is copied on a thread beside it."""

    def __init__(self, pages: Pages, threads: int) -> None:
        self._pages = pages
        self._threads = threads
        self._pool: Pool | None = None
        self._loader = ThreadPoolExecutor(1, "lmkv-load", initializer=use_processors)

    def open(self, pool: Pool) -> None:
        """See `Copies`."""
        self._pool = pool

    def close_pool(self, then: Callable[[], object]) -> None:
        """See `Copies`."""
        self._loader.submit(int).result()  # comes after all the others; each takes milliseconds
        self._pool = None
        then()

    def begin_step(self) -> None:
        """See `Copies`. What was gathered is in the pool already."""

    def gather(self, copies: Sequence[ChunkCopy]) -> CopyHandle:
        """See `Copies`. Copies now: the pages may change as soon as the step is over."""
        return ThreadTask(checksums=gather(self._pages, self._opened().buffer, copies, threads=self._threads))

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """See `Copies`. Copies here if that must be, or is quicker than waking up another thread."""
        pages, memory = (buffer.pages, buffer.bytes) if buffer else (self._pages, self._opened().buffer)
        copies = buffer.shrunk(copies) if buffer else copies
        begin = partial(scatter, pages, memory, threads=self._threads)
        if sync or copied_bytes(pages, copies) <= INLINE_BYTES:
            begin(copies)
            return ThreadTask()
        return ThreadTask([self._loader.submit(begin, part) for part in split(copies)])

    def close(self) -> None:
        """See `Copies`."""
        self._loader.shutdown(cancel_futures=True)

    def _opened(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("no pool is open")
        return self._pool


def split(copies: Sequence[ChunkCopy]) -> list[list[ChunkCopy]]:
    """The copies in parts that run one after the other."""
    parts: list[list[ChunkCopy]] = []
    count = PART_BLOCKS
    for copy in copies:
        if count >= PART_BLOCKS:
            parts.append([])
            count = 0
        parts[-1].append(copy)
        count += len(copy.block_ids)
    return parts


def use_processors() -> None:
    """Frees the calling thread from the processors that vLLM has pinned its own to."""
    with suppress(OSError):
        os.sched_setaffinity(0, PROCESSORS)
