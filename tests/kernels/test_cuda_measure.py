"""The faster way of each direction is found without a change to the pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lmkv_kernels import token_rows
from lmkv_kernels.cuda import CopyPath, CopyPaths
from lmkv_kernels.cuda.copier import ROUNDS, fastest_paths, sample
from tests.kernels.emulation import emulated_device
from tests.kernels.layouts import kv_cache
from tests.kernels.test_cuda_emulated import on_device


def clock(seconds: dict[tuple[str, CopyPath], float]) -> Iterator[float]:
    """A clock by which each way takes what it is said to take."""
    now = 0.0
    for way in CopyPath:
        for _ in range(1 + ROUNDS):
            for direction in ("gather", "scatter"):
                yield now
                now += seconds[direction, way]
            yield now


@pytest.mark.parametrize("gather", CopyPath)
@pytest.mark.parametrize("scatter", CopyPath)
def test_each_direction_takes_the_way_that_was_faster(gather: CopyPath, scatter: CopyPath) -> None:
    seconds = {(direction, way): 2.0 for direction in ("gather", "scatter") for way in CopyPath}
    seconds["gather", gather] = seconds["scatter", scatter] = 1.0
    memory, tensors = kv_cache(5, (2, 40, 2, 16, 64), "LBNHC", torch.float16)
    before = memory.copy()
    ticks = clock(seconds)
    with emulated_device() as (device, program):
        ways = fastest_paths(device, program, on_device(token_rows(tensors, 0, 2)), lambda: next(ticks))
    assert ways == CopyPaths(gather=gather, scatter=scatter)
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("block_count", [1, 7, 600])
@pytest.mark.parametrize("block_size", [1, 16, 512])
def test_the_sample_is_of_whole_chunks_of_blocks_that_there_are(block_count: int, block_size: int) -> None:
    _, tensors = kv_cache(5, (1, block_count, 1, block_size, 16), "LBHNC", torch.uint8)
    pages = token_rows(tensors, 0, 1)
    copies = sample(pages)
    ids = [block_id for copy in copies for block_id in copy.block_ids]
    assert ids == list(range(len(ids)))
    assert 1 <= len(ids) <= block_count
    extent = pages.extent_bytes(copies[0].extent_tokens)
    for index, copy in enumerate(copies):
        assert copy.token_count == copy.extent_tokens == len(copy.block_ids) * block_size
        assert copy.offset == index * extent
