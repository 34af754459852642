"""The connector's worker side: copies bytes between one rank's pages and the pool. No gRPC, no lookup, no lock.

vLLM calls it on the worker's main thread; asynchronous loads run on one thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmkv.errors import LmkvError
from lmkv.pool_socket import AttachedPool, attach
from lmkv.spec import KvSpec
from lmkv_client.connector.format import make_pages
from lmkv_client.connector.identity import Share
from lmkv_client.connector.messages import Attachment, Check, Load, Loaded, StepPlan, WorkerReport, Written
from lmkv_client.plugin import PROCESSORS
from lmkv_kernels import ChunkCopy, Pages, checksum, gather, scatter

if TYPE_CHECKING:
    import torch

logger = init_logger("vllm.lmkv")

ATTACH_TIMEOUT_SECONDS = 0.5
ATTACH_RETRY_SECONDS = 5.0
"""So long after a pool could not be mapped it is tried again, for each try may hold up a step."""
INLINE_BYTES = 4 << 20
"""A copy of at most so many bytes takes well below a millisecond: less than handing it to another thread."""


@dataclass(kw_only=True, slots=True)
class Running:
    """A load in progress: the parts still running, and what they made of it."""

    parts: list[Future[bool]]
    started_at: float
    size_bytes: int = 0
    failed_blocks: list[int]
    copied_blocks: list[int]
    final: bool = False

    def done(self) -> bool:
        """Whether nothing runs and nothing more will come."""
        return self.final and all(part.done() for part in self.parts)

    def failed(self) -> bool:
        """Whether a copy could not be made. Only once done."""
        return not all(part.result() for part in self.parts)


class WorkerSide:
    """One rank's copies."""

    def __init__(self, spec: KvSpec, share: Share, *, rank: int, threads: int) -> None:
        self._spec = spec
        self._share = share
        self._rank = rank
        self._threads = threads
        self._pages: Pages | None = None
        self._attachment: Attachment | None = None
        self._pool: AttachedPool | None = None
        self._retry_at = 0.0
        self._loader = ThreadPoolExecutor(1, "lmkv-load", initializer=use_processors)
        self._running: dict[str, Running] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report: WorkerReport | None = None
        self._step_is_poisoned = False

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Where the pages are. Raises `ValueError` if they cannot be copied."""
        self._tensors = list(kv_caches.values())  # keeps the memory alive
        self._pages = make_pages(self._tensors, self._spec, first_head=self._share.first_head)

    def load(self, plan: StepPlan) -> None:
        """Starts the step's loads; those that the forward needs are done on return."""
        self._follow(plan.attachment)
        self._step_is_poisoned = False
        for load in plan.loads:
            running = self._running.setdefault(
                load.request_id,
                Running(parts=[], started_at=time.monotonic(), failed_blocks=[], copied_blocks=[]),
            )
            running.final |= load.final
            running.failed_blocks += load.failed_blocks
            if load.checks:
                running.parts.append(self._loader.submit(self._verify, self._pool, load.checks))
            for part in split(load):
                running.copied_blocks += [block for copy in part for block in copy.block_ids]
                running.size_bytes += self._size_bytes(part)
                running.parts.append(self._submit(running, part))
            if load.sync:
                self._finish(load.request_id, running)
                self._step_is_poisoned |= running.failed() or bool(running.failed_blocks)

    def store(self, plan: StepPlan) -> None:
        """Copies what the step has completed into the pool, before its pages can change."""
        if not plan.stores:
            return
        report = self._reporting()
        if self._pool is None or self._pages is None or self._step_is_poisoned:
            # After a failed synchronous load this step's forward has read pages that were never filled.
            report.skipped.update(copy.offset for copy in plan.stores)
            return
        if not self._share.is_writer:
            report.written.update((copy.offset, Written(rank_count=1, checksum=0)) for copy in plan.stores)
            return
        started = time.perf_counter()
        try:
            checksums = gather(self._pages, self._pool.pool.buffer, plan.stores, threads=self._threads)
        except ValueError as error:
            logger.error("cannot store: %s", error)
            report.skipped.update(copy.offset for copy in plan.stores)
            return
        report.store_seconds = time.perf_counter() - started
        for copy, part in zip(plan.stores, checksums, strict=True):
            report.written[copy.offset] = Written(rank_count=1, checksum=part)

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call, well or not."""
        for request_id, running in list(self._running.items()):
            if running.done():
                self._finish(request_id, running)
                self._finished.add(request_id)
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Pages that loads were to fill and did not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What was copied since the last call."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Waits for running copies, then lets go of the pool."""
        self._loader.shutdown(cancel_futures=True)
        if self._pool:
            self._pool.close()
            self._pool = None

    def _submit(self, running: Running, part: Sequence[ChunkCopy]) -> Future[bool]:
        """Copies on the loader's thread, or here if that is quicker than waking it up."""
        if not running.parts and self._size_bytes(part) <= INLINE_BYTES:
            done: Future[bool] = Future()
            done.set_result(self._scatter(self._pool, part))
            return done
        return self._loader.submit(self._scatter, self._pool, part)

    def _finish(self, request_id: str, running: Running) -> None:
        """Waits for what runs, and reports it."""
        del self._running[request_id]
        failed = running.failed()
        self._failed_blocks.update(running.failed_blocks)
        if failed:
            self._failed_blocks.update(running.copied_blocks)
        self._reporting().loaded[request_id] = Loaded(
            rank_count=1,
            size_bytes=0 if failed else running.size_bytes,
            seconds=time.monotonic() - running.started_at,
            failed=failed,
        )

    def _scatter(self, pool: AttachedPool | None, copies: Sequence[ChunkCopy]) -> bool:
        """Fills pages; False if that could not be done."""
        if pool is None or self._pages is None:
            return False
        try:
            scatter(self._pages, pool.pool.buffer, copies, threads=self._threads)
        except ValueError as error:
            logger.error("cannot load: %s", error)
            return False
        return True

    def _verify(self, pool: AttachedPool | None, checks: Sequence[Check]) -> bool:
        """Whether extents are what their checksums say."""
        if pool is None:
            return False
        buffer = pool.pool.buffer
        damaged = [one for one in checks if checksum(buffer, one.offset, one.size_bytes) != one.checksum]
        for one in damaged:
            logger.error("the chunk at offset %d of the pool is damaged; it is computed instead", one.offset)
        return not damaged

    def _size_bytes(self, copies: Sequence[ChunkCopy]) -> int:
        pages = self._pages
        if pages is None:
            return 0
        rows = sum(pages.row_count(copy.token_count) for copy in copies)
        return rows * len(pages.layer_addresses) * pages.head_count * len(pages.parts) * pages.row_bytes

    def _reporting(self) -> WorkerReport:
        if self._report is None:
            self._report = WorkerReport(engine_id=self._attachment.engine_id if self._attachment else "")
        return self._report

    def _follow(self, attachment: Attachment | None) -> None:
        """Maps the pool that the plan speaks of. The old one is let go of only when nothing is being copied from it."""
        settled = self._pool is not None or time.monotonic() < self._retry_at
        if attachment is None or (attachment == self._attachment and settled):
            return
        for running in self._running.values():
            for part in running.parts:
                part.exception()  # waits: a copy takes milliseconds
        old, self._pool = self._pool, None
        if old:
            old.close()
        self._attachment = attachment
        self._report = None  # of the old attachment: void
        try:
            self._pool = attach(
                attachment.pool_socket, attachment.engine_id, self._rank, attachment.epoch, ATTACH_TIMEOUT_SECONDS
            )
        except LmkvError as error:
            self._retry_at = time.monotonic() + ATTACH_RETRY_SECONDS
            logger.warning("cannot map the node's pool, so nothing is loaded or stored: %s", error)
            return
        threading.Thread(target=populate, args=(self._pool,), name="lmkv-populate", daemon=True).start()


PART_BLOCKS = 64
"""Pages that one part of a load fills at the most: what a thread does between looks at the queue."""


def split(load: Load) -> list[list[ChunkCopy]]:
    """The load's copies in parts that run one after the other."""
    parts: list[list[ChunkCopy]] = []
    count = PART_BLOCKS
    for copy in load.copies:
        if count >= PART_BLOCKS:
            parts.append([])
            count = 0
        parts[-1].append(copy)
        count += len(copy.block_ids)
    return parts


def populate(pool: AttachedPool) -> None:
    """Fills this process's page table ahead of the first copies."""
    use_processors()
    try:
        pool.pool.populate(0, pool.pool.size_bytes)
    except LmkvError as error:
        logger.warning("cannot touch the node's pool ahead of its first use: %s", error)


def use_processors() -> None:
    """Frees the calling thread from the processors that vLLM has pinned its own to."""
    with suppress(OSError):
        os.sched_setaffinity(0, PROCESSORS)
