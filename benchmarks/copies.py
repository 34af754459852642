"""Stores and loads: the kernels between pages and pool, against memcpy of the same bytes into the same memory."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.command import Run
from benchmarks.rows import Row
from lmkv.pool import Pool
from lmkv.spec import KvSpec
from lmkv.units import GB
from lmkv_kernels import ChunkCopy, Pages, gather, scatter, whole_tiles

PROMPT_TOKENS = 4000
SPARE_BLOCKS = 10
"""Pages besides those of the prompt, so that its own lie apart."""

THREADS = (1, 2)

Bytes = NDArray[np.uint8]


def measure(run: Run, spec: KvSpec) -> None:
    """Adds rows for the chunks of one prompt, with one thread and with two."""
    chunk_count = PROMPT_TOKENS // spec.chunk_size
    size_bytes = chunk_count * spec.chunk_bytes
    with Pool.create(size_bytes) as pool:
        pool.populate()
        _measure(run, spec, pool, chunk_count)


def _measure(run: Run, spec: KvSpec, pool: Pool, chunk_count: int) -> None:
    blocks = spec.chunk_size // spec.block_size
    memory, pages = make_pages(spec, chunk_count * blocks + SPARE_BLOCKS)
    order = np.random.default_rng(0).permutation(pages.block_count)
    copies = [
        ChunkCopy(
            offset=chunk * spec.chunk_bytes,
            extent_tokens=spec.chunk_size,
            token_count=spec.chunk_size,
            block_ids=order[chunk * blocks : (chunk + 1) * blocks].tolist(),
        )
        for chunk in range(chunk_count)
    ]
    pool_bytes = np.frombuffer(pool.buffer, np.uint8)
    source = memory[: pool.size_bytes]
    rounds = 10 if run.quick else 40
    with ThreadPoolExecutor(max(THREADS)) as executor:
        for threads in THREADS:
            acts: list[Callable[[], object]] = [
                partial(gather, pages, pool.buffer, copies, threads=threads),
                partial(memcpy, pool_bytes, source, threads, executor),
                partial(scatter, pages, pool.buffer, copies, threads=threads),
                partial(memcpy, source, pool_bytes, threads, executor),
            ]
            store, store_memcpy, load, load_memcpy = timing.in_turns(acts, rounds)
            suffix = "" if threads == 1 else f"_{threads}_threads"
            baseline = "memcpy" if threads == 1 else f"memcpy, {threads} threads"
            run.add(
                rate_row(f"store{suffix}_vs_memcpy", pool.size_bytes, store, baseline, store_memcpy),
                rate_row(f"load{suffix}_vs_memcpy", pool.size_bytes, load, baseline, load_memcpy),
            )


def make_pages(spec: KvSpec, block_count: int) -> tuple[Bytes, Pages]:
    """Memory as vLLM's CPU backend lays its KV cache out, touched, and the pages in it."""
    layer_bytes = block_count * spec.kv_head_count * spec.tile_bytes
    memory = np.frombuffer(mmap.mmap(-1, spec.layer_count * layer_bytes), np.uint8)
    memory[:] = 1
    content = spec.tile_bytes // spec.block_size
    shape = (spec.layer_count, block_count, spec.kv_head_count, spec.block_size, content)
    return memory, whole_tiles(list(torch.from_numpy(memory).view(shape)), 0, spec.kv_head_count)


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
        value=size_bytes / GB / statistics.median(seconds),
        unit="GB/s",
        baseline=baseline,
        baseline_value=size_bytes / GB / statistics.median(baseline_seconds),
        ratio=timing.median_ratio(baseline_seconds, seconds),
    )
