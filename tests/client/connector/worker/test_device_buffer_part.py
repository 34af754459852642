"""A rank's part of the device buffer, in host memory here: which bytes of a chunk it reads, sums, and scatters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.identity import HeadShare
from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart
from lmkv_client.connector.worker.device_copier import DevicePageCopier
from lmkv_client.connector.worker.page_copier import HostPageCopier
from lmkv_kernels import ChunkCopy, Pages, checksum, scatter, token_rows
from tests.client.connector.worker.test_device_copier import Model, open_emulated
from tests.kernels.layouts import Bytes, kv_cache, random_bytes
from tests.kernels.test_cuda_emulated import on_device, whole_chunks

TOKENS = 8
STEP = 4096


def pages_of(rank: int, rank_count: int, heads: int, layers: int = 3) -> tuple[Bytes, Pages]:
    """Pages of one rank of an engine, and the memory that they are in."""
    share = HeadShare.of_rank(rank, rank_count, heads)
    memory, tensors = kv_cache(rank, (layers, 7, max(1, heads // rank_count), 4, 64), "LBHNC", torch.bfloat16)
    return memory, token_rows(tensors, share.first_head, heads)


def fill(buffer: DeviceBufferPart, pool: Bytes, chunks: list[pb.BufferCopy]) -> None:
    """Does what a channel does with the reads."""
    for copy in buffer.reads(chunks):
        start = copy.local_address - buffer.device_address
        source = copy.remote_address - pool.ctypes.data
        buffer.bytes[start : start + copy.size_bytes] = pool[source : source + copy.size_bytes]


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4), (8, 4), (4, 1), (2, 6)]),
    sources=st.permutations(range(4)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_ranks_parts_scatter_what_the_whole_chunks_hold_and_their_sums_add_up(
    shape: tuple[int, int], sources: list[int], seed: int
) -> None:
    rank_count, heads = shape
    extent_bytes = pages_of(0, rank_count, heads)[1].extent_bytes(TOKENS)
    room = -(-extent_bytes // STEP) * STEP
    pool = random_bytes(seed, 3 * extent_bytes)
    chunks = [
        pb.BufferCopy(
            remote_address=pool.ctypes.data + index * extent_bytes, offset=place * room, size_bytes=extent_bytes
        )
        for index, place in enumerate(sources[:3])
    ]
    blocks = [[5, 0], [3, 4], [1, 6]]
    sums = [0] * 3
    for rank in range(rank_count):
        memory, pages = pages_of(rank, rank_count, heads)
        before = memory.copy()
        buffer = DeviceBufferPart(pages, 4 * room)
        assert buffer.size_bytes == 4 * room * pages.head_count // heads
        fill(buffer, pool, chunks)
        if HeadShare.of_rank(rank, rank_count, heads).is_writer:
            sums = [(own + more) % 2**64 for own, more in zip(sums, buffer.checksums(chunks), strict=True)]
        copies = [copy_of(chunk.offset, block_ids) for chunk, block_ids in zip(chunks, blocks, strict=True)]
        host = HostPageCopier([pages], threads=1)
        host.scatter(copies, sync=True, buffer=buffer)
        host.close()
        scattered = memory.copy()
        memory[:] = before
        from_pool = [copy_of(index * extent_bytes, block_ids) for index, block_ids in enumerate(blocks)]
        scatter(pages, pool, from_pool)
        assert np.array_equal(scattered, memory)
    assert sums == [checksum(pool, index * extent_bytes, extent_bytes) for index in range(3)]


def copy_of(offset: int, block_ids: list[int]) -> ChunkCopy:
    """A whole chunk."""
    return ChunkCopy(offset=offset, extent_tokens=TOKENS, token_count=TOKENS, block_ids=block_ids)


def test_a_part_that_could_not_begin_where_kernels_can_read_is_refused() -> None:
    _, pages = pages_of(0, 6, 6)
    with pytest.raises(ValueError, match="1 of 6 heads"):
        DeviceBufferPart(pages, 1 << 20)


@pytest.mark.parametrize("sync", [True, False])
def test_kernels_read_the_part_as_it_is(sync: bool) -> None:
    case = whole_chunks(2, first_head=2, kv_head_count=4)  # the second of two ranks
    extent_bytes = case.pages.extent_bytes(TOKENS)
    buffer = DeviceBufferPart(case.pages, 4 * STEP * extent_bytes)
    buffer.pages = on_device(buffer.pages)
    chunks = [
        pb.BufferCopy(
            remote_address=case.pool.ctypes.data + index * extent_bytes,
            offset=(3 - index) * STEP * extent_bytes,
            size_bytes=extent_bytes,
        )
        for index in range(2)
    ]
    fill(buffer, case.pool, chunks)
    copies = [dataclasses.replace(copy, offset=chunk.offset) for copy, chunk in zip(case.copies, chunks, strict=True)]
    before = case.memory.copy()
    seen = np.zeros_like(case.memory)
    model = Model(case, seen, buffer.bytes)
    device = DevicePageCopier(
        [on_device(case.pages)], model_stream=lambda: model.stream.handle, open_device=open_emulated
    )
    try:
        loading = device.scatter(copies, sync=sync, buffer=buffer)
        model.forward(seen, case.memory)
        model.run()
        assert loading.done() == sync
        loading.wait()
    finally:
        device.close()
        model.close()
    loaded = case.memory.copy()
    case.memory[:] = before
    case.twin.scatter(case.pool_tensor, case.copies)
    assert np.array_equal(loaded, case.memory)
    assert np.array_equal(seen, loaded if sync else before)
