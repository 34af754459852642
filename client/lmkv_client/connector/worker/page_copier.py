"""The contract of copies between a rank's pages and the pool, and its implementation for pages in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lmkv.pool.pool import Pool
from lmkv_client.connector.worker.groups import begin_each, grouped_bytes
from lmkv_client.connector.worker.handles import CopyHandle, ThreadTask
from lmkv_client.plugin import PROCESSORS
from lmkv_kernels import ChunkCopy, Pages, gather, scatter

if TYPE_CHECKING:
    from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart

INLINE_BYTES = 4 << 20
"""Copies of at most this size run inline: they take less time than starting another thread."""
PART_BLOCKS = 64
"""Most blocks of one task of the copy thread."""


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


class HostPageCopier:
    """Copies for pages in host memory. Copies that the forward pass does not wait for run on a thread."""

    def __init__(self, pages: Sequence[Pages], threads: int) -> None:
        """`pages` are those of each KV-cache group."""
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
        if len(self._pages) == 1:
            return self._gather(0, copies)
        return begin_each(copies, len(self._pages), self._gather)

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Copies before it returns if `sync`, or if that is faster than starting another thread."""
        pages, memory = ([buffer.pages], buffer.bytes) if buffer else (self._pages, self._opened().buffer)
        copies = buffer.shrunk(copies) if buffer else copies
        inline = sync or grouped_bytes(pages, copies) <= INLINE_BYTES

        def begin(group: int, own: Sequence[ChunkCopy]) -> CopyHandle:
            copy = partial(scatter, pages[group], memory, threads=self._threads)
            if inline:
                copy(own)
                return ThreadTask()
            return ThreadTask([self._loader.submit(copy, part) for part in split(own)])

        return begin(0, copies) if len(pages) == 1 else begin_each(copies, len(pages), begin)

    def close(self) -> None:
        """Implements `PageCopier`."""
        self._loader.shutdown(cancel_futures=True)

    def _gather(self, group: int, copies: Sequence[ChunkCopy]) -> CopyHandle:
        return ThreadTask(checksums=gather(self._pages[group], self._opened().buffer, copies, threads=self._threads))

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
