"""A rank's part of the device buffer, in host memory here: which bytes of a chunk it reads, sums, and scatters."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey, join_keys
from lmkv.transfer.choice import find_links
from lmkv.transfer.nixl.channel import NixlChannel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.identity import HeadShare
from lmkv_client.connector.worker import device_buffer as module
from lmkv_client.connector.worker.device_buffer import BufferReads, DeviceBufferPart, word_sums
from lmkv_client.connector.worker.device_copier import DevicePageCopier
from lmkv_client.connector.worker.page_copier import HostPageCopier
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import ChunkCopy, Pages, checksum, scatter, token_rows
from lmkv_kernels.reference import checksum as plain_checksum
from lmkv_server.node.handoff import device_buffer, receiver
from lmkv_server.node.handoff.device_buffer import DeviceBuffer
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.node import Node
from tests.client.connector.lending_worker import SPEC, LendingWorkers
from tests.client.connector.worker.test_device_copier import Model, open_emulated
from tests.kernels.layouts import Bytes, kv_cache, random_bytes
from tests.kernels.test_cuda_emulated import on_device, whole_chunks
from tests.lmkv.transfer.ends import Owner, content, eventually, in_new_process
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.peer_parts import RUNTIME_DIR, Parts, keys_of
from tests.waiting import until

PART_TOKENS = 8
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
    extent_bytes = pages_of(0, rank_count, heads)[1].extent_bytes(PART_TOKENS)
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
    return ChunkCopy(offset=offset, extent_tokens=PART_TOKENS, token_count=PART_TOKENS, block_ids=block_ids)


def test_a_part_that_could_not_begin_where_kernels_can_read_is_refused() -> None:
    _, pages = pages_of(0, 6, 6)
    with pytest.raises(ValueError, match="1 of 6 heads"):
        DeviceBufferPart(pages, 1 << 20)


@pytest.mark.parametrize("sync", [True, False])
def test_kernels_read_the_part_as_it_is(sync: bool) -> None:
    case = whole_chunks(2, first_head=2, kv_head_count=4)  # the second of two ranks
    extent_bytes = case.pages.extent_bytes(PART_TOKENS)
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


VECTORS = {
    bytes(8): 0x52C48C46FC4A3B47,
    b"\xff" * 8: 0x52C48C45D826F71F,
    bytes(range(64)): 0x34B80007C694A184,
}


@pytest.mark.parametrize("content", VECTORS)
def test_the_vectors_of_the_documentation(content: bytes) -> None:
    words = torch.frombuffer(bytearray(content), dtype=torch.int64)
    assert word_sums(words[None], torch.zeros(1, dtype=torch.int64)) == VECTORS[content]


@settings(deadline=None)
@given(
    run_count=st.integers(1, 5),
    run_words=st.integers(1, 40),
    slice_words=st.sampled_from([1, 7, 64, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_runs_add_up_to_the_chunk(run_count: int, run_words: int, slice_words: int, seed: int) -> None:
    chunk = np.random.default_rng(seed).integers(0, 256, 8 * run_count * run_words, np.uint8)
    words = torch.from_numpy(chunk).view(torch.int64).view(run_count, run_words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_WORDS", slice_words)
        assert word_sums(words, torch.arange(run_count) * run_words) == checksum(chunk)


@pytest.mark.parametrize("first_word", [0, 1000, 2**32 - 3, 2**33 + 5])
def test_a_run_counts_by_where_it_is_in_the_chunk(first_word: int) -> None:
    run = np.random.default_rng(1).integers(0, 256, 128, np.uint8)
    words = torch.from_numpy(run).view(torch.int64)[None]
    assert word_sums(words, torch.tensor([first_word])) == plain_checksum(run, first_word)


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
    from lmkv_client.connector.worker.side import make_copies

    made = make_copies([pages], 1)
    try:
        made.scatter(copies, sync=True, buffer=buffer).wait()
    finally:
        made.close()


async def test_the_peers_that_were_read_last_stay_connected(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 1)
    _, pages = make_cache("cpu")
    reading = Reading(pages)
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:2", Path(folder), size_bytes=OWNED_BYTES) as two:
        for one in (owner, two, two, owner):
            await reading.reads.execute(order_of(one, pages))
            assert list(reading.reads._peers) == list(reading.nixl._peers) == [one.name]
    assert not any(result.HasField("status") for result in reading.results)
    await reading.aclose()


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


pytestmark = pytest.mark.timeout(600)  # the workers' process imports vLLM

INSTANCE_ID = "decode"
BUFFER_CHUNKS = 12
WAIT_SECONDS = 60.0
KEYS = keys_of(40)
FIRST, SECOND, THIRD = KEYS[:4], KEYS[10:18], KEYS[20:28]


class Decode:
    """A decode's node with one engine, whose workers lend, and the prefill's node that hands prompts to it."""

    def __init__(self, prefill: Parts, node: Node, engine: EngineClient, workers: LendingWorkers) -> None:
        self.prefill = prefill
        self.node = node
        self.engine = engine
        self.workers = workers
        assert node.peer_side
        self.receiver = node.peer_side.receiver

    @property
    def buffer(self) -> DeviceBuffer | None:
        """What handoffs may use now."""
        return self.receiver.buffers.find(SPEC)

    async def hand(self, name: str, keys: list[ChunkKey]) -> HandoffState | None:
        """Hands a prompt over; what became of the handoff."""
        for key in keys:
            if not self.prefill.tier.get(key):
                self.prefill.put(key)
        await self.prefill.hand(name, INSTANCE_ID, keys)
        handoff = self.receiver.handoffs.find(name)
        return handoff.state if handoff else None

    async def meet(self) -> None:
        """Transfers a first prompt by the pool, which connects the two nodes."""
        await until(lambda: self.buffer)
        assert await self.hand("first", FIRST) is HandoffState.COMMITTED
        assert all(self.node.tier.get(key) for key in FIRST)
        self.receiver.handoffs.unclaim("first")
        connection = self.receiver._connections._by_instance["prefill"]
        await until(lambda: connection.nixl_metadata)

    async def load(self, name: str, keys: list[ChunkKey]) -> list[pb.HeldChunk]:
        """The decode's request comes; where its chunks are. They stay there until `release`."""
        lookup = pb.LookupChunks(lookup_id=name, chunk_keys=join_keys(keys), handoff_id=name)
        await self.engine.say(lookup=[lookup])
        (found,) = await self.engine.hear("found")
        own = list(found.own)
        if not absent_count(found):
            return own
        wanted = pb.LoadChunks(lookup_id=name, first_chunk=len(own), chunk_count=absent_count(found))
        wanted.timeout.FromSeconds(60)
        await self.engine.say(load=[wanted])
        chunks, done = own, False
        while not done:
            for loaded in await self.engine.hear("loaded"):
                chunks += loaded.chunks
                done |= loaded.done
        return chunks

    def expected_sums(self, keys: list[ChunkKey]) -> list[int]:
        chunks = [self.prefill.tier.get(key) for key in keys]
        return [chunk.checksum for chunk in chunks if chunk]


Make = Callable[..., "asyncio.Future[Decode]"]


@pytest.fixture(scope="module")
def workers() -> Iterator[LendingWorkers]:
    """The workers of one engine after the other."""
    with LendingWorkers() as workers:
        yield workers


@pytest.fixture
async def make(workers: LendingWorkers) -> AsyncIterator[Make]:
    """Makes one `Decode` with this number of workers."""
    async with AsyncExitStack() as stack:

        async def start(rank_count: int = 1) -> Decode:
            prefill = await stack.enter_async_context(
                Parts("prefill", spec=SPEC, chunk_count=64, transfer_channel="auto")
            )
            config = NodeConfig(
                instance_id=INSTANCE_ID,
                runtime_dir=RUNTIME_DIR,
                max_local_cpu_size=f"{64 * SPEC.chunk_bytes}B",  # type: ignore[arg-type]  # what people write
                pd_buffer_size=BUFFER_CHUNKS * SPEC.chunk_bytes,
                transfer_channel="nixl",  # without an RDMA device no other value reads into buffers
            )
            node = await stack.enter_async_context(Node(config))
            engine = await stack.enter_async_context(EngineClient(node, spec=SPEC, worker_count=rank_count))
            welcome = engine.welcomed
            attachment = Attachment(
                engine_id="engine",
                pool_socket=welcome.pool_socket,
                epoch=welcome.epoch,
                node_address=f"unix:{config.engine_socket}",
                device_buffer_bytes=welcome.device_buffer_bytes,
            )
            await asyncio.to_thread(workers.attach, attachment, rank_count)
            stack.callback(workers.detach)
            return Decode(prefill, node, engine, workers)

        yield start  # type: ignore[misc]


@pytest.mark.parametrize("rank_count", [1, 2])
async def test_a_prompt_is_read_into_the_buffer_and_loaded_out_of_it(make: Make, rank_count: int) -> None:
    decode = await make(rank_count)
    await decode.meet()
    buffer = decode.buffer
    assert buffer
    assert await decode.hand("r", SECOND) is HandoffState.COMMITTED
    assert not any(decode.node.tier.get(key) for key in SECOND), "nothing came through the pool"
    assert all(buffer.tier.get(key) for key in SECOND)
    assert decode.receiver.stats().device_bytes == decode.receiver.buffers.used_bytes
    assert (
        decode.receiver.stats().received_bytes - decode.receiver.stats().device_bytes == len(FIRST) * SPEC.chunk_bytes
    )
    chunks = await decode.load("r", SECOND)
    assert [one.extent.region for one in chunks] == [1] * len(SECOND)
    assert await asyncio.to_thread(decode.workers.loaded_sums, chunks) == decode.expected_sums(SECOND)
    await decode.engine.release("r")
    await until(lambda: len(decode.receiver.handoffs) == 0)
    assert not any(chunk.holds for chunk in buffer.tier)
    buffer.tier.check()

    # A repeated handoff is not sent again, and still correct.
    received = decode.receiver.stats().received_bytes
    assert await decode.hand("again", SECOND) is HandoffState.COMMITTED
    assert decode.receiver.stats().received_bytes == received
    chunks = await decode.load("again", SECOND)
    assert await asyncio.to_thread(decode.workers.loaded_sums, chunks) == decode.expected_sums(SECOND)
    await decode.engine.release("again")


async def test_what_does_not_fit_comes_through_the_pool(make: Make) -> None:
    decode = await make()
    await decode.meet()
    assert await decode.hand("r", SECOND) is HandoffState.COMMITTED
    assert await decode.hand("s", THIRD) is HandoffState.COMMITTED, "8 and 8 chunks do not fit into 12"
    chunks = await decode.load("s", THIRD)
    assert {one.extent.region for one in chunks} == {0}
    assert await asyncio.to_thread(decode.workers.loaded_sums, chunks) == decode.expected_sums(THIRD)
    for name in ("r", "s"):
        await decode.engine.release(name)
        decode.receiver.handoffs.unclaim(name)


async def test_a_damaged_chunk_is_not_taken(make: Make) -> None:
    decode = await make()
    await decode.meet()
    for key in SECOND:
        decode.prefill.put(key)
    decode.prefill.damage(SECOND[2])
    assert await decode.hand("r", SECOND) is HandoffState.ABORTED
    assert decode.receiver._pipeline.stats().checksum_mismatches == 1
    chunks = await decode.load("r", SECOND)
    assert len(chunks) == 2, "what came before it is of use"
    await decode.engine.release("r")


async def test_a_frozen_worker_costs_one_handoff_and_its_memory_is_kept_until_it_resumes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "READ_SECONDS", 0.5)
    monkeypatch.setattr(device_buffer, "ANSWER_SECONDS", 0.1)
    decode = await make()
    await decode.meet()
    buffer = decode.buffer
    assert buffer
    decode.workers.signal(signal.SIGSTOP)
    assert await decode.hand("r", SECOND) is HandoffState.ABORTED
    decode.receiver.handoffs.unclaim("r")
    assert buffer.tier.reserved_bytes == len(SECOND) * SPEC.chunk_bytes, "the worker may still read into it"
    assert decode.receiver._pipeline.stats().quarantined_bytes == len(SECOND) * SPEC.chunk_bytes
    assert await decode.hand("s", THIRD) is HandoffState.COMMITTED
    assert all(decode.node.tier.get(key) for key in THIRD), "the next one comes through the pool"
    decode.workers.signal(signal.SIGCONT)
    await until(lambda: buffer.tier.reserved_bytes == 0)
    assert decode.receiver._pipeline.stats().quarantined_bytes == 0
    decode.receiver.handoffs.unclaim("s")


async def test_the_buffer_goes_with_its_engine(make: Make) -> None:
    decode = await make()
    await decode.meet()
    assert await decode.hand("r", SECOND) is HandoffState.COMMITTED
    await decode.engine.aclose()
    await until(lambda: decode.buffer is None)
    decode.receiver.handoffs.unclaim("r")
    async with EngineClient(decode.node, "other", spec=SPEC) as other:
        assert other.welcomed.device_buffer_bytes == BUFFER_CHUNKS * SPEC.chunk_bytes
        assert decode.buffer is None


async def test_a_request_that_came_to_another_engine_takes_nothing_out_of_the_buffer(make: Make) -> None:
    decode = await make()
    await decode.meet()
    assert await decode.hand("r", SECOND) is HandoffState.COMMITTED
    own = decode.engine
    async with EngineClient(decode.node, "other", spec=SPEC) as decode.engine:
        assert decode.buffer is None, "the engine of the next request is unknown"
        assert await decode.load("r", SECOND) == []
        await decode.engine.release("r")
    await until(lambda: decode.buffer)
    decode.engine = own


async def test_workers_that_die_end_what_was_to_come_to_them(make: Make) -> None:
    decode = await make(2)
    await decode.meet()
    decode.prefill.put(SECOND[0])
    handed = decode.prefill.hand("r", INSTANCE_ID, SECOND)
    await until(lambda: decode.buffer and decode.buffer.tier.get(SECOND[0]))
    decode.workers.signal(signal.SIGKILL)
    await until(lambda: decode.buffer is None)
    handoff = decode.receiver.handoffs.find("r")
    assert handoff
    assert (handoff.state, list(handoff.chunks)) == (HandoffState.ABORTED, [])
    assert await decode.load("r", SECOND) == []
    await decode.engine.release("r")
    decode.prefill.put(SECOND[1])
    assert (await handed).error
    assert await decode.hand("s", THIRD) is HandoffState.COMMITTED
    assert all(decode.node.tier.get(key) for key in THIRD)
    decode.receiver.handoffs.unclaim("s")


async def test_without_an_rdma_device_the_node_asks_engines_for_no_buffer() -> None:
    config = NodeConfig(
        instance_id=INSTANCE_ID,
        runtime_dir=RUNTIME_DIR,
        max_local_cpu_size=f"{64 * SPEC.chunk_bytes}B",  # type: ignore[arg-type]  # what people write
        pd_buffer_size=BUFFER_CHUNKS * SPEC.chunk_bytes,
    )
    async with Node(config) as node, EngineClient(node, spec=SPEC) as engine:
        assert engine.welcomed.device_buffer_bytes == (BUFFER_CHUNKS * SPEC.chunk_bytes if find_links() else 0)
