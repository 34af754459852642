"""The connector's worker side: copies bytes between one rank's pages and the pool. No gRPC, no lookup.

vLLM calls it on the worker's main thread. Copies run beside that: on threads where the pages are in host memory, on
streams where they are on a device. The pool of a node that has exited is unmapped on another thread if no step runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lmkv.pool.socket import AttachedPool
from lmkv.spec import KvSpec
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.identity import HeadShare
from lmkv_client.connector.messages import (
    AuditedExtent,
    Comparison,
    ExtentChecksum,
    LoadPlan,
    LoadResult,
    StepPlan,
    StoreResult,
    WorkerReport,
)
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.connector.worker.comparison import compare
from lmkv_client.connector.worker.page_copier import HostPageCopier, PageCopier, make_pages
from lmkv_client.connector.worker.running_copies import (
    COPY_ERRORS,
    CopyHandle,
    RunningLoad,
    RunningStore,
    ThreadTask,
    grouped_bytes,
)
from lmkv_client.engine.attachment import Attachment, PoolMapping
from lmkv_client.processors import use_processors
from lmkv_kernels import ChunkCopy, Pages, checksum

if TYPE_CHECKING:
    import torch

    from lmkv_client.connector.worker.device_buffer import BufferAgent
from collections.abc import Callable


class NodeWatch:
    """Waits on a thread until the node of a pool has disconnected, then calls `on_exit`, or until the pool is closed.

    `on_exit` returns after how many seconds it is to be called again; None: never. It may close the pool.
    """

    def __init__(self, pool: AttachedPool, on_exit: Callable[[], float | None]) -> None:
        self._node = pool.watch()
        self._on_exit = on_exit
        threading.Thread(target=self._run, name="lmkv-node-watch", daemon=True).start()

    def _run(self) -> None:
        use_processors()
        self._node.wait()
        pause = threading.Event()
        while (seconds := self._on_exit()) is not None:
            pause.wait(seconds)


logger = init_logger("vllm.lmkv")

MAP_WAIT_SECONDS = 0.5
"""Maximum time that a step waits for a new node's pool; mapping continues on a thread after that."""
IDLE_SECONDS = 0.5
"""Time without a step after which the pool of a node that has exited is unmapped: copies planned before are made."""


class WorkerSide:
    """The loads and stores of one rank."""

    def __init__(
        self,
        spec: KvSpec,
        shares: Sequence[HeadShare],
        *,
        groups: Sequence[LayerGroup],
        rank: int,
        threads: int,
        buffer_backends: tuple[str, ...] = (),
    ) -> None:
        """`shares` are what the rank has of each part of `spec`; `groups` are its layers, by `ChunkCopy.group`.

        `rank` is its number among the engine's workers. With `buffer_backends`, those of NIXL, handoffs are read into a
        buffer on the pages' device, which needs a rank with all layers of all chunks in one group.
        """
        self._groups = tuple(groups)
        self._writes = [shares[group.part].is_writer for group in self._groups]
        self._buffer_backends = buffer_backends
        self._buffer_agent: BufferAgent | None = None
        self._spec = spec
        self._shares = shares
        self._rank = rank
        self._threads = threads
        self._copies: PageCopier | None = None
        self._attachment: Attachment | None = None
        self._mapping: PoolMapping | None = None
        """The pool of the current attachment arrives here, until it is taken."""
        self._pool: AttachedPool | None = None
        self._checker = ThreadPoolExecutor(1, "lmkv-check", initializer=use_processors)
        self._running: dict[str, RunningLoad] = {}
        self._storing: list[RunningStore] = []
        self._comparing: dict[int, Future[Comparison]] = {}
        """Comparisons with held extents, by the offset of the other extent."""
        self._finished: set[str] = set()
        self._stored_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report: WorkerReport | None = None
        self._step_is_poisoned = False
        self._pool_lock = threading.RLock()
        """Held while vLLM's calls use the pool: `_release_pool` runs on another thread."""
        self._used_at = time.monotonic()
        """The time at which vLLM's last call that may use the pool began."""
        self._pages_are_released = False
        """Whether vLLM may have freed the pages' memory: nothing is copied then."""
        self._begins_steps = False
        """Whether `begin_step` is called before pages change, so that stores may run on after their step."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Registers the pages by layer name. Raises `ValueError` or `RuntimeError` if they cannot be copied."""
        self._tensors = list(kv_caches.values())  # keeps the memory alive
        self._pages = [self._pages_of(group, kv_caches) for group in self._groups]
        if self._buffer_backends and (len(self._pages) > 1 or self._pages[0].lacks_layers):
            logger.warning("pd_buffer_device: only for all layers in one group and one stage; the pool is used instead")
            self._buffer_backends = ()
        self._copies = make_copies(self._pages, self._threads)

    def release_pages(self) -> None:
        """Called before vLLM frees or remaps the pages' memory (sleep mode): waits for the copies that run.

        Until `restore_pages` stores are skipped and loads fail. A device buffer for handoffs stays: its memory is not
        vLLM's. Idempotent.
        """
        with self._pool_lock:
            self._pages_are_released = True
            for running in self._running.values():
                running.wait()
            if self._copies:
                self._copies.settle()
            wait(self._comparing.values())

    def restore_pages(self) -> None:
        """Called when the pages have memory again, at the same addresses. Idempotent."""
        self._pages_are_released = False

    def begin_step(self) -> None:
        """Called in each step before pages change. Under a vLLM that does not, stores end in their own step."""
        self._begins_steps = True
        with self._pool_lock:
            if self._copies:
                self._copies.begin_step()

    def load(self, plan: StepPlan) -> None:
        """Starts the step's loads: before the forward pass if it needs one of them, else perhaps after it."""
        with self._pool_lock:
            self._used_at = time.monotonic()
            self._load(plan)

    def _load(self, plan: StepPlan) -> None:
        self._follow(plan.attachment)
        if self._copies:
            self._copies.begin_step()
        self._step_is_poisoned = False
        for load in plan.loads:
            running = self._running.setdefault(
                load.request_id, RunningLoad(sync=load.sync, started_at=time.monotonic())
            )
            running.all_or_none = load.all_or_none
            running.final |= load.final
            running.failed_blocks += load.failed_blocks
            running.lost |= load.failed
            if self._mapping and not self._mapping.tried and not load.sync:
                running.postponed.append(load)
            else:
                self._begin(running, load)
            if load.sync:
                if load.checks:
                    running.wait()
                if running.over():
                    self._finish(load.request_id, running)
                self._step_is_poisoned |= running.failed or running.lost or bool(running.failed_blocks)

    def store(self, plan: StepPlan) -> None:
        """Copies completed chunks into the pool, before their pages can change, and the tails of finished requests."""
        if not plan.stores and not plan.tails:
            return
        with self._pool_lock:
            self._used_at = time.monotonic()
            running = self._store([*plan.stores, *(copy for copies in plan.tails.values() for copy in copies)])
            if running is None:
                self._stored_requests.update(plan.tails)
            else:
                self._storing.append(replace(running, finished_ids=list(plan.tails), audits=plan.audits))

    def _store(self, stores: Sequence[ChunkCopy]) -> RunningStore | None:
        """Begins to copy into the pool; None if nothing is copied."""
        if not stores:
            return None
        copies = self._open_copies()
        if copies is None or not copies.ready or self._step_is_poisoned:
            # After a failed synchronous load this step's forward has read pages that were never filled.
            self._skip(stores)
            return None
        if not all(self._writes):
            own = {copy.offset for copy in stores if self._writes[copy.group]}
            others = {copy.offset for copy in stores} - own
            self._reporting().stores.update({offset: StoreResult(rank_count=1) for offset in others})
            stores = [copy for copy in stores if self._writes[copy.group]]
            if not stores:
                return None
        started = time.perf_counter()
        try:
            copying = copies.gather(stores, beside=self._begins_steps)
        except COPY_ERRORS as error:
            logger.error("cannot store: %s", error)
            self._skip(stores)
            return None
        return RunningStore(copies=stores, copying=copying, started_at=started)

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call, successful or not."""
        with self._pool_lock:
            self._used_at = time.monotonic()
            self._take_pool()
            for request_id, running in list(self._running.items()):
                if running.over():
                    self._finish(request_id, running)
                    if not running.sync:
                        self._finished.add(request_id)
        finished, self._finished = self._finished, set()
        return finished

    def take_stored_requests(self) -> set[str]:
        """Finished requests whose tails are stored, or never will be: their pages are not read any more."""
        with self._pool_lock:
            self._end_stores()
            stored, self._stored_requests = self._stored_requests, set()
        return stored

    def take_failed_blocks(self) -> set[int]:
        """Pages that failed loads did not fill, except loads that fail as a whole."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads have failed as a whole; they are among the finished requests, too."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """The report of copies since the last call; None if there are none."""
        with self._pool_lock:
            self._end_stores()
            report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Waits for running copies, then unmaps the pool."""
        self._checker.shutdown(cancel_futures=True)
        mapping, self._mapping = self._mapping, None
        if mapping:
            mapping.close()
        with self._pool_lock:
            if self._copies:
                self._detach_pool()
                self._copies.close()

    def _pages_of(self, group: LayerGroup, kv_caches: Mapping[str, torch.Tensor]) -> Pages:
        if missing := [name for name in group.layer_names if name not in kv_caches]:
            raise ValueError(f"layer {missing[0]} has no KV cache")
        tensors = [kv_caches[name] for name in group.layer_names]
        return make_pages(tensors, self._spec, group, first_head=self._shares[group.part].first_head)

    def _begin(self, running: RunningLoad, load: LoadPlan) -> None:
        """Begins the checks and copies of one piece of a load."""
        if load.checks:
            running.parts.append(ThreadTask([self._checker.submit(verify, self._pool, load.checks)]))
        if load.copies:
            running.copied_blocks += [block for copy in load.copies for block in copy.block_ids]
            running.begin(partial(self._scatter, running, load))
        if load.buffered:
            running.copied_blocks += [block for copy in load.buffered for block in copy.block_ids]
            running.begin(partial(self._scatter_buffered, running, load))

    def _scatter(self, running: RunningLoad, load: LoadPlan) -> CopyHandle:
        copies = self._open_copies()
        if copies is None:
            raise RuntimeError("the pool is not mapped, or the engine sleeps")
        running.size_bytes += grouped_bytes(self._pages, load.copies)
        return copies.scatter(load.copies, sync=load.sync)

    def _scatter_buffered(self, running: RunningLoad, load: LoadPlan) -> CopyHandle:
        buffer = self._buffer_agent.buffer if self._buffer_agent else None
        copies = self._open_copies()
        if buffer is None or copies is None:
            raise RuntimeError("there is no device buffer, or the engine sleeps")
        running.size_bytes += grouped_bytes(self._pages, load.buffered)
        return copies.scatter(load.buffered, sync=load.sync, buffer=buffer)

    def _open_copies(self) -> PageCopier | None:
        """Returns the copier between pages and pool; None while the pool is not mapped, or the pages have no memory."""
        return self._copies if self._pool and not self._pages_are_released else None

    def _end_stores(self) -> None:
        if self._storing:
            self._storing = [storing for storing in self._storing if not self._stored(storing)]
        if self._comparing:
            ended = [offset for offset, comparing in self._comparing.items() if comparing.done()]
            results = {offset: self._compared(offset) for offset in ended}
            if results:
                self._reporting().stores.update(results)

    def _compared(self, offset: int) -> StoreResult:
        """The result of a comparison that has ended; void if it has failed."""
        try:
            return StoreResult(rank_count=1, comparison=self._comparing.pop(offset).result())
        except COPY_ERRORS as error:
            logger.error("cannot compare: %s", error)
            return StoreResult(rank_count=1, comparison=Comparison(is_void=True))

    def _stored(self, storing: RunningStore) -> bool:
        """Adds a store to the report if it has ended; whether it has."""
        try:
            if not storing.copying.done():
                return False
        except COPY_ERRORS as error:
            logger.error("cannot store: %s", error)
            self._skip(storing.copies)
        else:
            self._add_written(storing)
        self._stored_requests.update(storing.finished_ids)
        return True

    def _add_written(self, storing: RunningStore) -> None:
        report = self._reporting()
        seconds = storing.copying.seconds
        report.store_seconds = time.perf_counter() - storing.started_at if seconds is None else seconds
        sums: dict[int, int] = {}
        for copy, part in zip(storing.copies, storing.copying.checksums, strict=True):
            sums[copy.offset] = sums.get(copy.offset, 0) + part  # an extent has the layers of several groups
        for offset, total in sums.items():
            if audited := storing.audits.get(offset):
                copies = [copy for copy in storing.copies if copy.offset == offset]
                self._comparing[offset] = self._checker.submit(self._compare, copies, audited)
            else:
                report.stores[offset] = StoreResult(rank_count=1, checksum=total & 0xFFFF_FFFF_FFFF_FFFF)

    def _compare(self, copies: Sequence[ChunkCopy], audited: AuditedExtent) -> Comparison:
        """Compares what was written with a held extent, which counts only if it has not changed meanwhile."""
        comparison = Comparison(is_void=self._pool is None or self._pages_are_released)
        if self._pool and not comparison.is_void:
            memory = self._pool.pool.buffer
            for copy in copies:
                part = self._spec.parts[self._groups[copy.group].part]
                comparison.add(compare(self._pages[copy.group], part, memory, copy, audited))
            held = audited.held
            comparison.is_void = checksum(memory, held.offset, held.size_bytes) != held.checksum
        return comparison

    def _skip(self, copies: Sequence[ChunkCopy]) -> None:
        self._reporting().stores.update({copy.offset: StoreResult(rank_count=1, failed=True) for copy in copies})

    def _finish(self, request_id: str, running: RunningLoad) -> None:
        """Adds a load that has ended to the report."""
        del self._running[request_id]
        is_useless = running.failed or running.lost
        if running.all_or_none:
            if is_useless:
                self._failed_requests.add(request_id)
        else:
            self._failed_blocks.update(running.failed_blocks)
            if is_useless:
                self._failed_blocks.update(running.copied_blocks)
        self._reporting().loaded[request_id] = LoadResult(
            rank_count=1,
            size_bytes=0 if is_useless else running.size_bytes,
            seconds=running.seconds(time.monotonic()),
            failed=is_useless,
        )

    def _reporting(self) -> WorkerReport:
        if self._report is None:
            self._report = WorkerReport(engine_id=self._attachment.engine_id if self._attachment else "")
        return self._report

    def _follow(self, attachment: Attachment | None) -> None:
        """Maps the pool of the plan. The old one is unmapped when nothing is being copied from it."""
        if attachment is not self._attachment and attachment is not None and attachment != self._attachment:
            if self._mapping:
                self._mapping.close()
                self._mapping = None
                self._begin_postponed()  # they fail: their pool will not be mapped
            self._detach_pool()
            self._attachment = attachment
            self._drop_stores()
            self._report = None  # of the old attachment: void
            self._mapping = PoolMapping(attachment, self._rank)
            self._mapping.wait(MAP_WAIT_SECONDS)
        self._take_pool()

    def _drop_stores(self) -> None:
        """Stores to a pool that has been unmapped count as ended; no node learns of them."""
        self._comparing.clear()
        for storing in self._storing:
            self._stored_requests.update(storing.finished_ids)
        self._storing.clear()

    def _take_pool(self) -> None:
        """Opens the pool if it has been mapped; begins the loads that waited for the first try to map it."""
        if self._mapping is None or not self._mapping.tried:
            return
        pool = self._mapping.take()
        if pool and self._attachment:
            self._mapping, self._pool = None, pool
            NodeWatch(pool, partial(self._release_pool, pool))
            if self._copies:
                self._copies.open(pool.pool)
            if self._buffer_backends:
                if self._attachment.device_buffer_bytes:
                    self._buffer_agent = self._lend(self._attachment)
                else:
                    logger.warning(
                        "pd_buffer_device: cuda is not used: the node receives no handoffs, or its host has no RDMA "
                        "device and they wait in its pool; set transfer_channel: nixl to read to the GPU in any case"
                    )
        self._begin_postponed()

    def _release_pool(self, pool: AttachedPool) -> float | None:
        """Unmaps the pool of a node that has exited, so that the next node may write to it, unless a step may still use
        it. Returns after how many seconds to try again; None: the pool is unmapped.
        """
        with self._pool_lock:
            if self._pool is not pool:
                return None
            remaining = self._used_at + IDLE_SECONDS - time.monotonic()
            if remaining > 0 or self._running:
                return max(remaining, IDLE_SECONDS / 5)
            self._detach_pool()
            self._drop_stores()
        return None

    def _begin_postponed(self) -> None:
        for running in self._running.values():
            postponed, running.postponed = running.postponed, []
            for load in postponed:
                self._begin(running, load)

    def _lend(self, attachment: Attachment) -> BufferAgent:
        from lmkv_client.connector.worker.device_buffer import BufferAgent  # NIXL is needed only here

        return BufferAgent(
            attachment, self._rank, self._pages[0], sums=self._writes[0], nixl_backends=self._buffer_backends
        )

    def _detach_pool(self) -> None:
        """Ends the device buffer and unmaps the pool once nothing is being copied."""
        for running in self._running.values():
            running.wait()
        wait(self._comparing.values())
        agent, self._buffer_agent = self._buffer_agent, None
        if agent:
            agent.close()
        pool, self._pool = self._pool, None
        if pool and self._copies:
            self._copies.close_pool(pool.close)


def make_copies(pages: Sequence[Pages], threads: int) -> PageCopier:
    """The copier for the device of the pages of all groups. Raises `RuntimeError` if there is none."""
    if pages[0].device == "cpu":
        return HostPageCopier(pages, threads)
    from lmkv_client.connector.worker.device_copier import DevicePageCopier

    return DevicePageCopier(pages, prepare_thread=use_processors)


def verify(pool: AttachedPool | None, checks: Sequence[ExtentChecksum]) -> None:
    """Compares extents with their checksums. Raises `ValueError` if one differs."""
    if pool is None:
        raise ValueError("the pool is not mapped")
    for one in checks:
        if checksum(pool.pool.buffer, one.offset, one.size_bytes) != one.checksum:
            raise ValueError(f"the chunk at offset {one.offset} of the pool is damaged; it is computed instead")
