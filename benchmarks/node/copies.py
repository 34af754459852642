"""Stores and loads as an engine's worker makes them, against memcpy of the same bytes into the same memory."""

from __future__ import annotations

import asyncio
import math
import mmap
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.support import timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from lmkv.pool.pool import Pool
from lmkv.pool.socket import PoolSocket
from lmkv.spec import KvSpec
from lmkv.units import GIB
from lmkv_kernels import ChunkCopy, Pages, whole_tiles

if TYPE_CHECKING:  # importing vLLM takes seconds
    from lmkv_client.connector.worker.side import WorkerSide
    from lmkv_client.engine.attachment import Attachment

PROMPT_TOKENS = 4000
SPARE_BLOCKS = 10
"""Pages besides those of the prompt, so that its own lie apart."""
THREADS = (1, 2)
WAIT_SECONDS = 10.0

Bytes = NDArray[np.uint8]


def measure(run: BenchmarkRun, spec: KvSpec) -> None:
    """Adds rows for the chunks of one prompt, with one thread and with two."""
    from lmkv_client.connector.engine_kv import LayerGroup
    from lmkv_client.connector.identity import head_shares
    from lmkv_client.connector.worker.side import WorkerSide

    chunk_count = PROMPT_TOKENS // spec.chunk_size
    memory, tensors = kv_cache(spec, chunk_count * spec.chunk_size // spec.block_size + SPARE_BLOCKS)
    caches = {str(layer): tensor for layer, tensor in enumerate(tensors)}
    group = LayerGroup(part=0, block_size=spec.block_size, layer_names=tuple(caches))
    copies = scattered_copies(whole_tiles(tensors, 0, spec.kv_head_count), spec.chunk_size, chunk_count)
    with Pool.create(chunk_count * spec.chunk_bytes) as pool, ThreadPoolExecutor(max(THREADS)) as executor:
        pool.populate()
        with served(run, pool) as attachment:
            for threads in THREADS:
                worker = WorkerSide(spec, head_shares(spec, 0, 1), groups=[group], rank=0, threads=threads)
                try:
                    worker.register(caches)
                    acts = Acts(worker, attachment, copies)
                    _measure(run, pool, memory, acts, threads, executor)
                finally:
                    worker.close()


class Acts:
    """One worker's store and load of all the chunks, each a whole step's work."""

    def __init__(self, worker: WorkerSide, attachment: Attachment, copies: list[ChunkCopy]) -> None:
        from lmkv_client.connector.messages import LoadPlan, StepPlan

        self._worker = worker
        self._store = StepPlan(attachment=attachment, stores=copies)
        load = LoadPlan(request_id="r", copies=copies, sync=True, final=True, checks=[], failed_blocks=[])
        self._load = StepPlan(attachment=attachment, loads=[load])
        worker.load(StepPlan(attachment=attachment))  # maps the pool

    def store(self) -> None:
        """Pages to pool."""
        self._worker.store(self._store)
        report = self._worker.take_report()
        assert report
        assert len(report.stores) == len(self._store.stores)

    def load(self) -> None:
        """Pool to pages."""
        self._worker.load(self._load)
        report = self._worker.take_report()
        assert report
        assert not report.loaded["r"].failed


def _measure(
    run: BenchmarkRun, pool: Pool, memory: Bytes, acts: Acts, threads: int, executor: ThreadPoolExecutor
) -> None:
    pool_bytes = np.frombuffer(pool.buffer, np.uint8)
    pages_bytes = memory[: pool.size_bytes]
    calls: list[Callable[[], object]] = [
        acts.store,
        partial(memcpy, pool_bytes, pages_bytes, threads, executor),
        acts.load,
        partial(memcpy, pages_bytes, pool_bytes, threads, executor),
    ]
    store, store_memcpy, load, load_memcpy = timing.in_turns(calls, 10 if run.quick else 40)
    suffix = "" if threads == 1 else f"_{threads}_threads"
    baseline = "memcpy" if threads == 1 else f"memcpy, {threads} threads"
    run.add(
        rate_row(f"store{suffix}_vs_memcpy", pool.size_bytes, store, baseline, store_memcpy),
        rate_row(f"load{suffix}_vs_memcpy", pool.size_bytes, load, baseline, load_memcpy),
    )


@contextmanager
def served(run: BenchmarkRun, pool: Pool) -> Iterator[Attachment]:
    """The pool, as a node hands it to workers."""
    from lmkv_client.engine.attachment import Attachment

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    path = run.folder / "pool.sock"
    socket = PoolSocket(path, pool, 1, on_worker=lambda *_: None, on_worker_gone=lambda *_: None)
    try:
        asyncio.run_coroutine_threadsafe(socket.start(), loop).result(WAIT_SECONDS)
        yield Attachment(engine_id="benchmark", pool_socket=str(path), epoch=1)
        asyncio.run_coroutine_threadsafe(socket.aclose(), loop).result(WAIT_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def scattered_copies(pages: Pages, chunk_size: int, chunk_count: int) -> list[ChunkCopy]:
    """One prompt's chunks, one after the other in the pool, and all over the place in the pages."""
    extent_bytes, blocks = pages.extent_bytes(chunk_size), chunk_size // pages.block_tokens
    order = np.random.default_rng(0).permutation(pages.block_count).tolist()
    return [
        ChunkCopy(
            offset=chunk * extent_bytes,
            extent_tokens=chunk_size,
            token_count=chunk_size,
            block_ids=order[chunk * blocks : (chunk + 1) * blocks],
        )
        for chunk in range(chunk_count)
    ]


def kv_cache(spec: KvSpec, block_count: int) -> tuple[Bytes, list[torch.Tensor]]:
    """Memory as vLLM's CPU backend lays its KV cache out, touched; and the tensors in it, one per layer."""
    content = spec.parts[0].tile_bytes // spec.block_size
    shape = (spec.layer_count, block_count, spec.kv_head_count, spec.block_size, content)
    memory = touched_memory(math.prod(shape))
    return memory, list(torch.from_numpy(memory).view(shape))


def touched_memory(size_bytes: int) -> Bytes:
    """Memory from the start of a page on, as a pool's is: off it, memcpy into it may take four times as long."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory[:] = 1
    return memory


def memcpy(target: Bytes, source: Bytes, threads: int, executor: ThreadPoolExecutor) -> None:
    """Copies all bytes by NumPy, each thread an equal share."""
    if threads == 1:
        np.copyto(target, source)
    else:
        shares = [np.array_split(part, threads) for part in (target, source)]
        list(executor.map(np.copyto, *shares))


def rate_row(name: str, size_bytes: int, seconds: list[float], baseline: str, baseline_seconds: list[float]) -> Row:
    """GB/s (2^30 bytes) against a baseline's, medians; the ratio is the median of the pairs'."""
    return Row(
        name=name,
        value=size_bytes / GIB / statistics.median(seconds),
        unit="GB/s",
        baseline=baseline,
        baseline_value=size_bytes / GIB / statistics.median(baseline_seconds),
        ratio=timing.median_ratio(baseline_seconds, seconds),
    )
