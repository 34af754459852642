"""Reads into a device buffer, from another process's memory, and on into pages: on a CUDA device where there is one.

Everywhere the same code runs in host memory, which takes the device's place: NIXL's DRAM for its VRAM.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkv import rpc
from lmkv.transfer.nixl.channel import NixlChannel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.worker.buffer_reads import BufferReads
from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart
from lmkv_kernels import ChunkCopy, Pages, checksum, scatter, token_rows
from tests.lmkv.transfer.ends import Owner, content, eventually, in_new_process

SHAPE = (12, 2, 16, 128)
"""Blocks, heads, tokens of a block, elements of key and value."""
LAYERS, TOKENS, CHUNKS = 4, 64, 3
OWNED_BYTES = 8 << 20


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: the buffer and NIXL's VRAM segment are tried in host memory only")
    return str(request.param)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:1", Path(folder), size_bytes=OWNED_BYTES) as one:
        yield one


def make_cache(device: str) -> tuple[list[torch.Tensor], Pages]:
    """Empty pages on a device."""
    tensors = [torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return tensors, token_rows(tensors, 0, SHAPE[1])


def order_of(owner: Owner, pages: Pages, **changes: object) -> pb.BufferRead:
    """Reads the chunks that lie at the beginning of the owner's memory, and puts them in the other order."""
    size_bytes = pages.extent_bytes(TOKENS)
    order = pb.BufferRead(
        read_id=7,
        peer_name=owner.name,
        channel_metadata=owner.metadata,
        copies=[
            pb.BufferCopy(
                remote_address=owner.address + index * size_bytes,
                offset=(CHUNKS - 1 - index) * size_bytes,
                size_bytes=size_bytes,
            )
            for index in range(CHUNKS)
        ],
        summed=True,
    )
    order.timeout.FromSeconds(10)
    for name, value in changes.items():
        setattr(order, name, value)
    return order


class Reading:
    """A buffer beside pages, and the reads into it."""

    def __init__(self, pages: Pages) -> None:
        self.buffer = DeviceBufferPart(pages, CHUNKS * pages.extent_bytes(TOKENS))
        self.results: list[pb.BufferReadResult] = []
        self.nixl = NixlChannel("reader:1", self.buffer.region, ("UCX",), self.buffer.prepare_thread)
        self.reads = BufferReads(self.nixl, self.buffer, self.results.append, sums=True)

    async def aclose(self) -> None:
        self.reads.close()
        await self.nixl.aclose()


async def test_what_is_read_is_summed_and_scattered_on_the_device(device: str, owner: Owner) -> None:
    tensors, pages = make_cache(device)
    reading = Reading(pages)
    order = order_of(owner, pages)
    await reading.reads.execute(order)
    (result,) = reading.results
    assert not result.HasField("status"), result.status.message
    size_bytes = pages.extent_bytes(TOKENS)
    memory = content(1, OWNED_BYTES).view(np.uint8)
    assert list(result.checksums) == [checksum(memory, index * size_bytes, size_bytes) for index in range(CHUNKS)]
    assert result.stopped

    blocks = TOKENS // SHAPE[2]
    copies = [
        ChunkCopy(offset=copy.offset, extent_tokens=TOKENS, token_count=TOKENS, block_ids=range(at, at + blocks))
        for copy, at in zip(order.copies, range(0, CHUNKS * blocks, blocks), strict=True)
    ]
    load(pages, reading.buffer, copies)
    expected, host_pages = make_cache("cpu")
    whole = np.concatenate([memory[(CHUNKS - 1 - at) * size_bytes :][:size_bytes] for at in range(CHUNKS)])
    scatter(host_pages, whole, copies)
    for tensor, one in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.cpu().view(torch.uint8), one.view(torch.uint8))
    await reading.aclose()


def load(pages: Pages, buffer: DeviceBufferPart, copies: list[ChunkCopy]) -> None:
    """Copies out of the buffer, as the worker does."""
    from lmkv_client.connector.worker.side import make_copies

    made = make_copies([pages], 1)
    try:
        made.scatter(copies, sync=True, buffer=buffer).wait()
    finally:
        made.close()


async def test_a_read_that_cannot_begin_fails_at_once_and_has_stopped(owner: Owner) -> None:
    _, pages = make_cache("cpu")
    reading = Reading(pages)
    await reading.reads.execute(order_of(owner, pages, peer_name="unknown:1"))
    outside = order_of(owner, pages)
    outside.copies[0].remote_address = owner.address + OWNED_BYTES
    await reading.reads.execute(outside)
    reasons = [rpc.from_status(result.status).reason for result in reading.results]
    assert reasons == ["WRONG_INSTANCE", "UNREACHABLE"]
    assert all(result.stopped for result in reading.results)
    await reading.aclose()


async def frozen_owner() -> None:
    _, pages = make_cache("cpu")
    reading = Reading(pages)
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:1", Path(folder), size_bytes=OWNED_BYTES) as one:
        order = order_of(one, pages)
        await reading.reads.execute(order)
        one.signal(signal.SIGSTOP)
        order.timeout.FromMilliseconds(300)
        running = asyncio.create_task(reading.reads.execute(order))
        await eventually(lambda: len(reading.results) == 2)
        assert rpc.from_status(reading.results[1].status).reason == "UNREACHABLE"
        assert not reading.results[1].stopped, "its bytes may still come"
        one.signal(signal.SIGCONT)
        await running
        assert reading.results[2].stopped
        await reading.aclose()


def test_a_read_from_a_frozen_peer_is_reported_twice() -> None:
    in_new_process(frozen_owner, UCX_TLS="tcp,cuda_copy")
