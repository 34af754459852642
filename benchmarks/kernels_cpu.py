"""How fast the host kernels are, in every page layout, against memcpy: `python -m benchmarks.kernels_cpu`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.node.copies import rate_row, scattered_copies, touched_memory
from benchmarks.support import timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row
from lmkv.pool.pool import Pool
from lmkv_kernels import Pages, gather, packed_rows, scatter, token_rows, whole_tiles

TOKENS = 4096
CHUNK_SIZE = 256
SPARE_BLOCKS = 10

MakePages = Callable[[list[torch.Tensor], int, int], Pages]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A KV cache of `bfloat16`, 64 KiB or so a token, and how it is cut into rows."""

    suffix: str
    make: MakePages
    layer_count: int = 16
    head_count: int = 16
    content: int = 128
    block_size: int = 128
    heads_within_tokens: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """The cache, one tensor per layer; memory order is layer, block, and then head and token or token and head."""
        block_count = TOKENS // self.block_size + SPARE_BLOCKS
        inner = (self.block_size, self.head_count) if self.heads_within_tokens else (self.head_count, self.block_size)
        shape = (self.layer_count, block_count, *inner, self.content)
        memory = torch.from_numpy(touched_memory(2 * math.prod(shape))).view(torch.bfloat16).view(shape)
        return list(memory.transpose(2, 3) if self.heads_within_tokens else memory)


LAYOUTS = (
    Layout(suffix="", make=whole_tiles),
    Layout(suffix="_packed", make=packed_rows),
    Layout(suffix="_hnd", make=token_rows, block_size=16),
    Layout(suffix="_nhd", make=token_rows, block_size=16, heads_within_tokens=True),
    Layout(
        suffix="_latent",
        make=partial(token_rows, part_count=1),
        layer_count=48,
        head_count=1,
        content=576,
        block_size=64,
    ),
)
"""Whole blocks as they are; keys turned; heads outside tokens, and inside, in a GPU's small blocks; MLA."""


def measure(run: BenchmarkRun) -> None:
    """Adds rows for one thread, and what summing costs."""
    for layout in LAYOUTS:
        run.say(f"layout {layout.suffix.removeprefix('_') or 'whole tiles'}")
        _measure(run, layout)


def _measure(run: BenchmarkRun, layout: Layout) -> None:
    tensors = layout.tensors()
    pages = layout.make(tensors, 0, layout.head_count)
    copies = scattered_copies(pages, CHUNK_SIZE, TOKENS // CHUNK_SIZE)
    with Pool.create(len(copies) * pages.extent_bytes(CHUNK_SIZE)) as pool:
        pool.populate()
        pool_bytes = np.frombuffer(pool.buffer, np.uint8)
        source = touched_memory(pool.size_bytes)
        acts: list[Callable[[], object]] = [
            partial(gather, pages, pool.buffer, copies),
            partial(gather, pages, pool.buffer, copies, summed=False),
            partial(np.copyto, pool_bytes, source),
            partial(scatter, pages, pool.buffer, copies),
            partial(np.copyto, source, pool_bytes),
        ]
        gathered, unsummed, gather_memcpy, scattered, scatter_memcpy = timing.in_turns(acts, 8 if run.quick else 40)
        run.add(
            rate_row(f"host_gather{layout.suffix}_vs_memcpy", pool.size_bytes, gathered, "memcpy", gather_memcpy),
            rate_row(f"host_scatter{layout.suffix}_vs_memcpy", pool.size_bytes, scattered, "memcpy", scatter_memcpy),
        )
        if not layout.suffix:
            run.add(_cost(gathered, unsummed))


def _cost(summed: list[float], unsummed: list[float]) -> Row:
    ratio = timing.median_ratio(summed, unsummed)
    return Row(
        name="checksum_cost",
        value=100 * (ratio - 1),
        unit="%",
        baseline="ms, not summed",
        baseline_value=1000 * statistics.median(unsummed),
        ratio=ratio,
    )


BENCHMARK = Benchmark(
    name="kernels_cpu",
    description="Measures the host kernels in every page layout.",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
