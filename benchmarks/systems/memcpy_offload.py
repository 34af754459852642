"""Lets vLLM's own `OffloadingConnector` run on CPUs, where it ships no worker: a spec whose copies are NumPy's.

Benchmarks use it by vLLM's `spec_module_path`. Scheduling, tiers and transfers between engines
stay vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pages = NDArray[np.int8]


class MemcpyOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM's classes are Any
    """The tiering spec with a worker that works without an accelerator."""

    _own_worker: MemcpyWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """See vLLM, which refuses CPUs here."""
        if self._own_worker is None:
            self._own_worker = MemcpyWorker(self, kv_caches)
        return self._own_worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages on a thread of its own, block by block."""

    def __init__(self, spec: MemcpyOffloadingSpec, kv_caches: Any) -> None:
        self._blocks_per_chunk: int = spec.blocks_per_chunk
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._tensors: list[tuple[Pages, Pages]] = []
        """Per tensor `[block, bytes]` of the engine, and `[chunk, block of the chunk, bytes]` of the region."""
        for cache in kv_caches.tensors:
            size = cache.page_size_bytes
            view = self._region.create_next_worker_view(size * self._blocks_per_chunk)
            offloaded = view.unflatten(1, (self._blocks_per_chunk, size)).numpy()
            self._tensors.append((cache.tensor.view(torch.int8).view(-1, size).numpy(), offloaded))
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        """Per group of layers the tensors with its blocks, and how much of each page it uses."""
        self._thread = ThreadPoolExecutor(1, "memcpy-offload")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See vLLM."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See vLLM."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """See vLLM."""
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """See vLLM."""
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        """See vLLM."""
        self._thread.shutdown()
        self._tensors.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, offloaded: Any, *, store: bool) -> TransferResult:
        started = time.perf_counter()
        size_bytes = 0
        for group, block, chunk, place in self._places(engine, offloaded):
            for tensor, length in self._groups[group]:
                pages, chunks = self._tensors[tensor]
                if store:
                    chunks[chunk, place, :length] = pages[block, :length]
                else:
                    pages[block, :length] = chunks[chunk, place, :length]
                size_bytes += length
        return TransferResult(job_id, True, size_bytes, time.perf_counter() - started)

    def _places(self, engine: Any, offloaded: Any) -> Iterator[tuple[int, int, int, int]]:
        """Each block of the engine with its group, the chunk that it belongs to, and which block of that it is."""
        blocks, chunks = iter(engine.block_ids), iter(offloaded.block_ids)
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            chunk = -1
            for index in range(first, first + size):
                place = index % self._blocks_per_chunk
                if index == first or place == 0:
                    chunk = int(next(chunks))
                yield group, int(next(blocks)), chunk, place
