"""`CudaCopier` and the CUDA kernels' source, on the emulated device, against the plain twin: bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmkv_kernels import ChunkCopy, Pages, checksum, cuda, packed_rows, token_rows, whole_states
from lmkv_kernels.cuda import CopyPath, CopyPaths, CudaCopier, CudaStream, Device, RegisteredMemory
from lmkv_kernels.cuda.copier import MAX_BUFFERS
from lmkv_kernels.reference import ReferencePages
from tests.kernels.emulation import emulated_device
from tests.kernels.layouts import LAYOUTS, Bytes, Case, cases, kv_cache, random_bytes

WAYS = {way: CopyPaths(gather=way, scatter=way) for way in CopyPath}


def on_device(pages: Pages) -> Pages:
    return dataclasses.replace(pages, device="cuda:0")


@contextmanager
def copier_of(case: Case, ways: CopyPaths, staging_bytes: int = 1 << 20) -> Iterator[CudaCopier]:
    """A copier whose device memory is the case's, and whose registered pool is the case's."""
    with emulated_device() as (device, program), device.current() as driver:
        pool = RegisteredMemory(driver, case.pool.ctypes.data, max(1, case.pool.size))
        pages = on_device(case.pages)
        ways = dataclasses.replace(ways, staging_bytes=staging_bytes)
        copier = CudaCopier(device, program, pages, pool, paths=ways)
        try:
            yield copier
        finally:
            copier.close()
            pool.close()


@settings(max_examples=150, deadline=None)
@given(case=cases(), way=st.sampled_from(CopyPath), staging_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_gather_writes_the_twins_bytes_and_no_others(case: Case, way: CopyPath, staging_bytes: int) -> None:
    assume(case.twin.inside != "packed")
    memory, before = case.memory.copy(), case.pool.copy()
    case.twin.gather(case.pool_tensor, case.copies)
    expected, sums = case.pool.copy(), case.expected_sums()
    case.pool[:] = before
    with copier_of(case, WAYS[way], staging_bytes) as copier:
        copying = copier.gather(case.copies, after=0)
        copying.wait()
        assert copying.checksums == sums
    assert np.array_equal(case.pool, expected)
    assert np.array_equal(case.memory, memory)


@settings(max_examples=150, deadline=None)
@given(case=cases(), way=st.sampled_from(CopyPath), staging_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_scatter_writes_the_twins_bytes_and_no_others(case: Case, way: CopyPath, staging_bytes: int) -> None:
    assume(case.twin.inside != "packed")
    before, pool = case.memory.copy(), case.pool.copy()
    case.twin.scatter(case.pool_tensor, case.copies)
    expected = case.memory.copy()
    case.memory[:] = before
    with copier_of(case, WAYS[way], staging_bytes) as copier:
        copier.scatter(case.copies, after=0).wait()
    assert np.array_equal(case.memory, expected)
    assert np.array_equal(case.pool, pool)


def whole_chunks(chunk_count: int, *, layout: str = "LBHNC", first_head: int = 0, kv_head_count: int = 2) -> Case:
    """Chunks of 2 blocks of 4 tokens of 2 heads: 2 KiB of a layer each, 3 layers."""
    shape = (3, 2 * chunk_count + 1, 2, 4, 64)
    memory, tensors = kv_cache(3, shape, layout, torch.bfloat16)
    pages = token_rows(tensors, first_head, kv_head_count)
    extent = pages.extent_bytes(8)
    copies = [
        ChunkCopy(offset=index * extent, extent_tokens=8, token_count=8, block_ids=(2 * index + 1, 2 * index))
        for index in range(chunk_count)
    ]
    twin = ReferencePages(tensors=tensors, first_head=first_head, kv_head_count=kv_head_count, inside="tokens")
    return Case(pages=pages, twin=twin, memory=memory, pool=random_bytes(4, chunk_count * extent), copies=copies)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("block_size", "content", "part_count"), [(16, 576, 1), (65, 160, 2), (33, 8, 2), (3, 4096, 1)]
)
def test_tiles_of_many_more_pieces_than_threads(layout: str, block_size: int, content: int, part_count: int) -> None:
    memory, tensors = kv_cache(3, (2, 4, 2, block_size, content), layout, torch.bfloat16)
    pages = token_rows(tensors, 1, 4, part_count=part_count)
    tokens = 3 * block_size - 2
    copy = ChunkCopy(offset=0, extent_tokens=tokens, token_count=tokens - 1, first_slot=1, block_ids=(3, 0, 2))
    twin = ReferencePages(tensors=tensors, first_head=1, kv_head_count=4, inside="tokens", part_count=part_count)
    case = Case(pages=pages, twin=twin, memory=memory, pool=random_bytes(4, pages.extent_bytes(tokens)), copies=[copy])
    with copier_of(case, WAYS[CopyPath.DIRECT]) as copier:
        copying = copier.gather(case.copies, after=0)
        copying.wait()
        pool = case.pool.copy()
        case.twin.gather(case.pool_tensor, case.copies)
        assert np.array_equal(pool, case.pool)
        assert copying.checksums == case.expected_sums()
        gathered = case.memory.copy()
        case.memory[:] = 0xEE
        copier.scatter(case.copies, after=0).wait()
    scattered = case.memory.copy()
    case.memory[:] = 0xEE
    case.twin.scatter(case.pool_tensor, case.copies)
    assert np.array_equal(scattered, case.memory)
    assert (scattered == gathered).any()


@pytest.mark.parametrize("way", CopyPath)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_gathered_from_one_layout_is_scattered_into_another(layout: str, way: CopyPath) -> None:
    source, target = whole_chunks(5, layout=layout), whole_chunks(5, layout="BHLNC")
    with copier_of(source, WAYS[way], 8 << 10) as copier:
        copier.gather(source.copies, after=0).wait()
    target.memory[:] = 0xEE
    target.pool[:] = source.pool
    with copier_of(target, WAYS[way], 8 << 10) as copier:
        copier.scatter(target.copies, after=0).wait()
    for theirs, ours in zip(source.twin.tensors, target.twin.tensors, strict=True):
        assert torch.equal(theirs[:10].view(torch.int16), ours[:10].view(torch.int16))


@pytest.mark.parametrize("way", CopyPath)
def test_ranks_fill_one_chunk_and_their_sums_are_its_checksum(way: CopyPath) -> None:
    ranks = [whole_chunks(2, first_head=first, kv_head_count=4) for first in (0, 2)]
    whole = np.zeros_like(ranks[0].pool)
    sums = np.zeros(2, np.uint64)
    for rank in ranks:
        rank.pool[:] = whole
        with copier_of(rank, WAYS[way]) as copier:
            copying = copier.gather(rank.copies, after=0)
            copying.wait()
            sums += np.array(copying.checksums, np.uint64)
        whole[:] = rank.pool
    size = whole.size // 2
    assert sums.tolist() == [checksum(whole, index * size, size) for index in range(2)]


def copy_now(device: Device, stream: CudaStream, target: Bytes, source: Bytes) -> None:
    """Puts a copy of host memory on a stream, as a forward pass would write pages."""
    device.driver.call("cuMemcpyAsync", target.ctypes.data, source.ctypes.data, source.size, stream.handle)


@contextmanager
def model_of(case: Case, copier: CudaCopier, *buffers: Bytes) -> Iterator[CudaStream]:
    """A stream like the model's, on which copies may touch the pages and these buffers."""
    with copier.device.current() as driver:
        known = [RegisteredMemory(driver, one.ctypes.data, one.size) for one in (case.memory, *buffers)]
        stream = CudaStream(driver)
        try:
            yield stream
        finally:
            stream.close()
            for one in known:
                one.close()


@pytest.mark.parametrize("way", CopyPath)
def test_a_gather_waits_for_the_forward_and_the_next_forward_for_its_reads(way: CopyPath) -> None:
    case = whole_chunks(6)
    now, later = random_bytes(10, case.memory.size), random_bytes(11, case.memory.size)
    with copier_of(case, WAYS[way], 8 << 10) as copier, model_of(case, copier, now, later) as model:
        copy_now(copier.device, model, case.memory, now)
        copying = copier.gather(case.copies, after=model.handle)
        assert not copying.read()
        assert not copying.done()
        copying.block_stream_until_read(model.handle)
        copy_now(copier.device, model, case.memory, later)
        with copier.device.current():
            model.event().wait()  # runs the second forward as early as it may
        assert copying.read()
        copying.wait()
    assert np.array_equal(case.memory, later)
    pool = case.pool.copy()
    case.memory[:] = now
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(case.pool, pool)


@pytest.mark.parametrize("way", CopyPath)
def test_a_scatter_waits_for_the_forward_before_it_and_holds_the_one_after_it(way: CopyPath) -> None:
    case = whole_chunks(6)
    old, seen, read = random_bytes(10, case.memory.size), np.zeros_like(case.memory), np.zeros_like(case.memory)
    before = case.memory.copy()
    with copier_of(case, WAYS[way], 8 << 10) as copier, model_of(case, copier, old, seen, read) as model:
        copy_now(copier.device, model, read, case.memory)  # a forward that still reads the pages
        copying = copier.scatter(case.copies, after=model.handle)
        copying.block_stream(model.handle)
        copy_now(copier.device, model, seen, case.memory)  # and one that needs them
        with copier.device.current():
            model.event().wait()
        assert copying.done()
    assert np.array_equal(read, before)
    case.memory[:] = before
    case.twin.scatter(case.pool_tensor, case.copies)
    assert np.array_equal(seen, case.memory)


@pytest.mark.parametrize("way", CopyPath)
def test_copies_are_done_by_asking_alone(way: CopyPath) -> None:
    case = whole_chunks(4)
    with copier_of(case, WAYS[way], 8 << 10) as copier:
        for copying in [copier.gather(case.copies, after=0), copier.gather(case.copies, after=0)]:
            for _ in range(1000):
                if copying.done():
                    break
            assert copying.done()
            assert copying.read()
            copying.block_stream(0)
            assert copying.checksums == case.expected_sums()


def test_many_calls_at_once_share_the_staging_buffer_without_harm() -> None:
    case = whole_chunks(6)
    with copier_of(case, WAYS[CopyPath.STAGED], 8 << 10) as copier:
        started = [copier.gather([copy], after=0) for copy in case.copies] + [copier.gather(case.copies, after=0)]
        started += [copier.scatter([copy], after=0) for copy in case.copies]
        for copying in reversed(started):
            copying.wait()
    pool = case.pool.copy()
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(case.pool, pool)


def test_dma_that_runs_ahead_leaves_the_kernels_what_they_have_not_read() -> None:
    case = whole_chunks(6)
    before = case.memory.copy()
    case.twin.scatter(case.pool_tensor, case.copies)
    expected = case.memory.copy()
    case.memory[:] = before
    with copier_of(case, WAYS[CopyPath.STAGED], 8 << 10) as copier, copier.device.current():
        copying = copier.scatter(case.copies, after=0)
        copier._scatters.dma.event().wait()
        copying.wait()
    assert np.array_equal(case.memory, expected)


def test_calls_beyond_the_bound_are_refused_until_earlier_ones_are_done() -> None:
    case = whole_chunks(1)
    with copier_of(case, WAYS[CopyPath.DIRECT]) as copier:
        started = [copier.gather(case.copies, after=0) for _ in range(MAX_BUFFERS)]
        with pytest.raises(cuda.Busy, match=f"{MAX_BUFFERS} copies are in flight"):
            copier.gather(case.copies, after=0)
        started[0].wait()
        copier.gather(case.copies, after=0).wait()
        for copying in started:
            copying.wait()


def test_a_call_of_no_copies_is_done() -> None:
    case = whole_chunks(1)
    with copier_of(case, WAYS[CopyPath.STAGED]) as copier:
        copying = copier.gather([], after=0)
        copying.wait()
        assert copying.checksums == []
        copier.scatter([], after=0).wait()


def test_sums_may_be_left_out() -> None:
    case = whole_chunks(2)
    with copier_of(case, WAYS[CopyPath.STAGED]) as copier:
        copying = copier.gather(case.copies, after=0, summed=False)
        copying.wait()
        assert copying.checksums == [0, 0]
    pool = case.pool.copy()
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(case.pool, pool)


def test_what_does_not_fit_is_refused_before_a_byte_moves() -> None:
    case = whole_chunks(2)
    pool, memory = case.pool.copy(), case.memory.copy()
    with copier_of(case, WAYS[CopyPath.STAGED]) as copier:
        far = dataclasses.replace(case.copies[0], offset=case.pool.size)
        with pytest.raises(ValueError, match=r"copies\[0\]: "):
            copier.gather([far], after=0)
        with pytest.raises(ValueError, match="twice"):
            copier.scatter([case.copies[0], case.copies[0]], after=0)
    assert np.array_equal(case.pool, pool)
    assert np.array_equal(case.memory, memory)


def test_pages_that_are_not_on_a_device_or_packed_as_the_cpus_are_refused() -> None:
    _, tensors = kv_cache(3, (1, 2, 1, 4, 64), "LBHNC", torch.bfloat16)
    pool = random_bytes(1, 4096)
    with emulated_device() as (device, program), device.current() as driver:
        known = RegisteredMemory(driver, pool.ctypes.data, pool.size)
        with pytest.raises(ValueError, match="on cpu, not on a CUDA device"):
            CudaCopier(device, program, token_rows(tensors, 0, 1), known)
        with pytest.raises(ValueError, match="rows of the pages are not contiguous"):
            CudaCopier(device, program, on_device(packed_rows(tensors, 0, 1)), known)
        known.close()


def test_dma_outside_the_registered_pool_is_an_error_with_the_drivers_words() -> None:
    case = whole_chunks(2)
    with emulated_device() as (device, program), device.current() as driver:
        pool = RegisteredMemory(driver, case.pool.ctypes.data, case.pool.size // 2)
        pool.size_bytes = case.pool.size
        copier = CudaCopier(device, program, on_device(case.pages), pool, paths=WAYS[CopyPath.STAGED])
        with pytest.raises(cuda.CudaError, match=r"cuMemcpyAsync: INVALID_VALUE \(emulated\)"):
            copier.gather(case.copies, after=0)
        copier.close()
        pool.close()


@pytest.mark.parametrize("way", CopyPath)
def test_states_of_two_groups_and_ranks_make_one_extent(way: CopyPath) -> None:
    """Over the same memory, as vLLM has it: each group has its own block ids."""
    state_bytes, page_bytes, blocks = 1000, 1024, 6
    memory = random_bytes(1, blocks * page_bytes)
    tensor = torch.from_numpy(memory).as_strided((blocks, 1, 1, state_bytes), (page_bytes, 1000, 1000, 1))
    pool = random_bytes(2, 4 * state_bytes)
    total = 0
    for run in range(4):
        layer, rank = divmod(run, 2)
        pages = whole_states([tensor], rank, 2, chunk_tokens=256, first_layer=layer, layer_count=2)
        copy = ChunkCopy(offset=0, extent_tokens=256, token_count=256, block_ids=[run + 1])
        twin = ReferencePages(tensors=[tensor], first_head=rank, kv_head_count=2, inside="whole")
        case = Case(pages=pages, twin=twin, memory=memory, pool=pool, copies=[copy])
        with copier_of(case, WAYS[way]) as copier:
            copying = copier.gather(case.copies, after=0)
            copying.wait()
            total += copying.checksums[0]
    states = memory.reshape(blocks, page_bytes)[1:5, :state_bytes]
    assert np.array_equal(pool.reshape(4, state_bytes), states)
    assert total % 2**64 == checksum(pool)
    before = memory.copy()
    case = dataclasses.replace(case, copies=[dataclasses.replace(copy, block_ids=[0])])
    with copier_of(case, WAYS[way]) as copier:
        copier.scatter(case.copies, after=0).wait()
    before[:state_bytes] = states[3]
    assert np.array_equal(memory, before)
