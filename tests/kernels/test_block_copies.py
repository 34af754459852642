"""`gather` and `scatter` against their plain twins, bit for bit."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmkv_kernels
from lmkv_kernels import BlockCopy, Pages, _host, host, reference
from tests.kernels.layouts import Case, cases, large_case, random_bytes

COPY_WAYS = ["wrapper", "portable"]


def gather(case: Case, way: str, threads: int = 1) -> list[int]:
    if way == "wrapper":
        return lmkv_kernels.gather(case.pages, case.pool, case.copies, threads=threads)
    rows, block_ids = host._check(case.pages, case.pool.size, case.copies, threads)
    sums = np.zeros(len(case.copies), np.uint64)
    pages = host._addresses(case.pages), host._geometry(case.pages)
    _host.gather(*pages, case.pool, rows, block_ids, sums, threads, portable=True)
    return list(map(int, sums))


def scatter(case: Case, way: str, threads: int = 1) -> None:
    if way == "wrapper":
        return lmkv_kernels.scatter(case.pages, case.pool, case.copies, threads=threads)
    rows, block_ids = host._check(case.pages, case.pool.size, case.copies, threads)
    pages = host._addresses(case.pages), host._geometry(case.pages)
    return _host.scatter(*pages, case.pool, rows, block_ids, threads, portable=True)


@pytest.mark.parametrize("way", COPY_WAYS)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_gather_writes_the_twins_bytes_and_no_others(way: str, case: Case) -> None:
    memory, pool = case.memory.copy(), case.pool.copy()
    sums = reference.gather(case.pages, pool, case.copies)
    assert gather(case, way) == sums
    assert np.array_equal(case.pool, pool)
    assert np.array_equal(case.memory, memory)


@pytest.mark.parametrize("way", COPY_WAYS)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_scatter_writes_the_twins_bytes_and_no_others(way: str, case: Case) -> None:
    before, pool = case.memory.copy(), case.pool.copy()
    reference.scatter(case.pages, case.pool, case.copies)
    expected = case.memory.copy()
    case.memory[:] = before
    scatter(case, way)
    assert np.array_equal(case.memory, expected)
    assert np.array_equal(case.pool, pool)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_what_was_gathered_comes_back_into_other_blocks(case: Case) -> None:
    lmkv_kernels.gather(case.pages, case.pool, case.copies)
    kept = case.memory.copy()
    case.memory[:] = random_bytes(3, case.memory.size)
    lmkv_kernels.scatter(case.pages, case.pool, case.copies)
    for layer, address in enumerate(case.pages.layer_addresses):
        base = address - case.memory.ctypes.data
        for copy in case.copies:
            for block_id in copy.block_ids:
                for head in range(case.pages.head_count):
                    start = base + block_id * case.pages.block_stride_bytes + head * case.pages.head_stride_bytes
                    tile = slice(start, start + case.pages.tile_bytes)
                    assert np.array_equal(case.memory[tile], kept[tile]), (layer, block_id, head)


@settings(max_examples=60, deadline=None)
@given(tile_words=st.integers(1, 40), heads=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_parts_of_ranks_and_of_blocks_add_up_to_the_whole_checksum(
    tile_words: int, heads: list[int], data: st.DataObject
) -> None:
    layer_count, blocks, tile_bytes = 2, 3, 8 * tile_words
    memory = random_bytes(5, layer_count * blocks * sum(heads) * tile_bytes)
    pool = random_bytes(6, layer_count * blocks * sum(heads) * tile_bytes)
    split = data.draw(st.integers(0, blocks))
    total, first_head = 0, 0
    for head_count in heads:
        pages = Pages(
            layer_addresses=tuple(
                memory.ctypes.data + (layer * sum(heads) + first_head) * blocks * tile_bytes
                for layer in range(layer_count)
            ),
            block_stride_bytes=head_count * tile_bytes,
            head_stride_bytes=tile_bytes,
            tile_bytes=tile_bytes,
            head_count=head_count,
            first_head=first_head,
            kv_head_count=sum(heads),
            block_count=blocks,
        )
        parts = [
            BlockCopy(offset=0, extent_block_count=blocks, first_block=0, block_ids=range(split)),
            BlockCopy(offset=0, extent_block_count=blocks, first_block=split, block_ids=range(split, blocks)),
        ]
        total += sum(lmkv_kernels.gather(pages, pool, parts))
        first_head += head_count
    assert total % 2**64 == lmkv_kernels.checksum(pool) == reference.checksum(pool)


@pytest.mark.parametrize("way", COPY_WAYS)
def test_any_number_of_threads_gives_the_same_bytes_and_checksums(way: str) -> None:
    case = large_case()
    expected_pool = case.pool.copy()
    expected = reference.gather(case.pages, expected_pool, case.copies)
    for threads in (1, 2, 3, 7, 0):
        case.pool[:] = 0
        assert gather(case, way, threads) == expected
        assert np.array_equal(case.pool, expected_pool)
        memory = case.memory.copy()
        case.memory[:] = 0
        scatter(case, way, threads)
        assert np.array_equal(case.memory, memory)


def test_targets_off_a_vector_boundary_are_written_right() -> None:
    case = large_case(layer_count=1, head_count=1, chunk_count=1)
    for shift in (8, 16, 24, 40):
        pool = random_bytes(9, case.pool.size + 64)
        copies = [dataclasses.replace(case.copies[0], offset=shift)]
        expected = pool.copy()
        sums = reference.gather(case.pages, expected, copies)
        assert lmkv_kernels.gather(case.pages, pool, copies) == sums
        assert np.array_equal(pool, expected)


def test_no_copies_copy_nothing() -> None:
    case = large_case(chunk_count=1)
    assert lmkv_kernels.gather(case.pages, case.pool, []) == []
    empty = [dataclasses.replace(case.copies[0], block_ids=())]
    assert lmkv_kernels.gather(case.pages, case.pool, empty) == [0]
    lmkv_kernels.scatter(case.pages, case.pool, [])


def test_other_threads_run_while_a_kernel_copies() -> None:
    case = large_case()
    wakes: list[float] = []
    stop = threading.Event()

    def wake() -> None:
        while not stop.wait(0.0005):
            wakes.append(time.monotonic())

    thread = threading.Thread(target=wake)
    thread.start()
    started = time.monotonic()
    lmkv_kernels.gather(case.pages, case.pool, case.copies * 100)  # one call that takes some 100 ms
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert sum(started < moment < ended for moment in wakes) > 5


Kernel = Callable[..., object]
BOTH: list[Kernel] = [lmkv_kernels.gather, lmkv_kernels.scatter]


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_ids": (0, 8)}, "block 8 is not among the pages' 8"),
        ({"block_ids": (-1, 0)}, "block -1"),
        ({"block_ids": (1, 2, 3)}, "do not fit into 2 blocks"),
        ({"first_block": 1}, "do not fit into 2 blocks"),
        ({"first_block": -1}, "do not fit into 2 blocks"),
        ({"extent_block_count": 0}, "extent_block_count must be positive"),
        ({"extent_block_count": 2**62}, "ends behind the pool"),
        ({"offset": 3 * 2 * 2 * 2 * 32768 + 8}, "ends behind the pool"),
        ({"offset": 2**70}, "ends behind the pool"),
        ({"offset": -8}, "offset -8"),
        ({"offset": 4}, "offset 4 is not a multiple of 8"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_before_a_byte_moves(
    kernel: Kernel, change: dict[str, object], words: str
) -> None:
    case = large_case(layer_count=2, head_count=2)
    bad = dataclasses.replace(case.copies[-1], **change)  # type: ignore[arg-type]
    memory, pool = case.memory.copy(), case.pool.copy()
    with pytest.raises(ValueError, match=words):
        kernel(case.pages, case.pool, [*case.copies[:-1], bad])
    assert np.array_equal(case.memory, memory)
    assert np.array_equal(case.pool, pool)


def test_scatter_refuses_to_write_a_block_twice() -> None:
    case = large_case(layer_count=1, head_count=1)
    twice = [case.copies[0], dataclasses.replace(case.copies[1], block_ids=case.copies[0].block_ids)]
    with pytest.raises(ValueError, match="block 0 would be written twice"):
        lmkv_kernels.scatter(case.pages, case.pool, twice)


def test_gather_refuses_memory_that_it_may_not_write() -> None:
    case = large_case(layer_count=1, head_count=1)
    with pytest.raises(ValueError, match="pool is read-only"):
        lmkv_kernels.gather(case.pages, bytes(case.pool), case.copies)
    lmkv_kernels.scatter(case.pages, bytes(case.pool), case.copies)


def test_threads_below_zero_are_refused() -> None:
    case = large_case(layer_count=1, head_count=1)
    with pytest.raises(ValueError, match="threads"):
        lmkv_kernels.gather(case.pages, case.pool, case.copies, threads=-1)
