"""Measures the fastest copy path of each direction on this machine, for given pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from lmkv_kernels.copies import ChunkCopy
from lmkv_kernels.cuda.copier import CopyPath, CopyPaths, CudaCopier
from lmkv_kernels.cuda.driver import Device
from lmkv_kernels.cuda.memory import PinnedMemory
from lmkv_kernels.cuda.program import Program
from lmkv_kernels.pages import Pages

SAMPLE_BYTES = 16 << 20
CHUNK_TOKENS = 256
ROUNDS = 3


def fastest_paths(
    device: Device, program: Program, pages: Pages, clock: Callable[[], float] = time.perf_counter
) -> CopyPaths:
    """Copies some blocks to the pool and back by each path, in about 20 ms.

    Leaves the pages unchanged. Nothing else may write to them meanwhile, so it must run before the first forward pass.
    Raises `CudaError` if the device fails.
    """
    copies = sample(pages)
    extent = copies[-1].offset + pages.extent_bytes(copies[-1].extent_tokens)
    seconds: dict[tuple[str, CopyPath], float] = {}
    with device.current() as driver, closing(PinnedMemory(driver, extent)) as memory:
        for path in CopyPath:
            with closing(
                CudaCopier(device, program, pages, memory, paths=CopyPaths(gather=path, scatter=path))
            ) as copier:
                for _ in range(1 + ROUNDS):  # the first round is a warm-up
                    started = clock()
                    copier.gather(copies, after=0).wait()
                    between = clock()
                    copier.scatter(copies, after=0).wait()
                    ended = clock()
                    for direction, took in (("gather", between - started), ("scatter", ended - between)):
                        seconds[direction, path] = min(took, seconds.get((direction, path), took))
    gather, scatter = (
        min(CopyPath, key=lambda path, direction=direction: seconds[direction, path])  # type: ignore[misc]
        for direction in ("gather", "scatter")
    )
    return CopyPaths(gather=gather, scatter=scatter)


def sample(pages: Pages) -> list[ChunkCopy]:
    """Copies of whole chunks of the first blocks, up to `SAMPLE_BYTES`."""
    blocks = min(pages.block_count, max(1, CHUNK_TOKENS // pages.block_tokens))
    tokens = blocks * pages.block_tokens
    extent = pages.extent_bytes(tokens)
    count = max(1, min(pages.block_count // blocks, SAMPLE_BYTES // extent))
    return [
        ChunkCopy(
            offset=index * extent,
            extent_tokens=tokens,
            token_count=tokens,
            block_ids=range(index * blocks, (index + 1) * blocks),
        )
        for index in range(count)
    ]
