"""Handoffs into a device buffer: a real prefill's node, a real decode's node, and workers that lend, in processes.

Host memory takes the device's place here: NIXL reads into DRAM what it would read into VRAM.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey, join_keys
from lmkv.transfer.choice import find_links
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Attachment
from lmkv_server.node.handoff import device_buffer, transfer
from lmkv_server.node.handoff.device_buffer import DeviceBuffer
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.node import Node
from tests.client.connector.lending_worker import SPEC, LendingWorkers
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.peer_parts import RUNTIME_DIR, Parts, keys_of
from tests.waiting import until

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
        assert node._peer_side
        self.receiver = node._peer_side.receiver

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
        """The checksums of the chunks at the prefill."""
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
    monkeypatch.setattr(transfer, "READ_SECONDS", 0.5)
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
