"""The contract of copies between a rank's pages and the pool, and its implementation for pages in host memory."""

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
"""Copies of at most this size run inline: they take less time than starting another thread."""
PART_BLOCKS = 64
"""Most blocks of one task of the copy thread."""


class CopyHandle(Protocol):
    """A copy that runs."""

    def done(self) -> bool:
        """Whether it has ended. Raises `ValueError` or `RuntimeError` if it failed."""

    def wait(self) -> None:
        """Waits until it has ended. Raises as `done` does."""

    @property
    def checksums(self) -> list[int]:
        """Of a gather that is done: for each copy what its words add to its chunk's checksum."""


class PageCopier(Protocol):
    """Copies between one rank's pages and the open pool. Called on the worker's main thread."""

    def open(self, pool: Pool) -> None:
        """Uses a pool, which must stay mapped until the callback of `close_pool`."""

    def close_pool(self, then: Callable[[], object]) -> None:
        """Waits for running copies and calls `then` once the pool may be unmapped, possibly on another thread."""

    def begin_step(self) -> None:
        """Called before a step's loads and its forward pass, both of which change pages."""

    def gather(self, copies: Sequence[ChunkCopy]) -> CopyHandle:
        """Begins to copy pages into the pool, as the last forward leaves them.

        Raises `ValueError` if a copy does not fit, `RuntimeError` if it cannot be made now.
        """

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Begins to copy into pages, before the next forward reads them if `sync`. Raises as `gather` does.

        The copies are out of the pool, or out of a device buffer, which must then stay until they are done.
        """

    def close(self) -> None:
        """Waits for running copies and releases all resources. Idempotent."""


class ThreadTask:
    """A copy or a check on threads of this process."""

    def __init__(self, futures: Sequence[Future[None]] = (), checksums: Sequence[int] = ()) -> None:
        self._futures = futures
        self.checksums = list(checksums)

    def done(self) -> bool:
        """Implements `CopyHandle`."""
        if not all(future.done() for future in self._futures):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Implements `CopyHandle`."""
        for future in self._futures:
            future.result()


class HostPageCopier:
    """Copies for pages in host memory. Copies that the forward pass does not wait for run on a thread."""

    def __init__(self, pages: Pages, threads: int) -> None:
        self._pages = pages
        self._threads = threads
        self._pool: Pool | None = None
        self._loader = ThreadPoolExecutor(1, "lmkv-load", initializer=use_processors)

    def open(self, pool: Pool) -> None:
        """Implements `PageCopier`."""
        self._pool = pool

    def close_pool(self, then: Callable[[], object]) -> None:
        """Implements `PageCopier`."""
        self._loader.submit(int).result()  # comes after all the others; each takes milliseconds
        self._pool = None
        then()

    def begin_step(self) -> None:
        """Does nothing: gathers are done when they return."""

    def gather(self, copies: Sequence[ChunkCopy]) -> CopyHandle:
        """Copies before it returns: the pages may change as soon as the step has ended."""
        return ThreadTask(checksums=gather(self._pages, self._opened().buffer, copies, threads=self._threads))

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Copies before it returns if `sync`, or if that is faster than starting another thread."""
        pages, memory = (buffer.pages, buffer.bytes) if buffer else (self._pages, self._opened().buffer)
        copies = buffer.shrunk(copies) if buffer else copies
        begin = partial(scatter, pages, memory, threads=self._threads)
        if sync or copied_bytes(pages, copies) <= INLINE_BYTES:
            begin(copies)
            return ThreadTask()
        return ThreadTask([self._loader.submit(begin, part) for part in split(copies)])

    def close(self) -> None:
        """Implements `PageCopier`."""
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
