"""Whole nodes in a fleet: what one holds is found and fetched by another, and orders reach it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.longrunning import operations_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError
from lmkv.keys import join_keys, split_keys
from lmkv.rpc.messages import by_keys
from lmkv.v1 import cache_service_pb2_grpc, chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    ClearResult,
    DrainRequest,
    LookupRequest,
    MoveRequest,
    MoveResult,
    PinRequest,
)
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations.clears import BATCH_CHUNKS
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.node_parts import node_config
from tests.support.operations import wait_for_operation
from tests.support.prompts import with_prompt
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually, until

SPEC = small_spec()


class TwoNodes:
    """A coordinator and two nodes, each with an engine of the same spec."""

    def __init__(self, runtime_dir: Path, **holder_settings: object) -> None:
        self._runtime_dir = runtime_dir
        self._holder_settings = holder_settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TwoNodes:
        self.coordinator = await self._stack.enter_async_context(Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        self.holder_stack = await self._stack.enter_async_context(AsyncExitStack())
        self.holder = await self.holder_stack.enter_async_context(self._node("holder", **self._holder_settings))
        self.asker = await self._stack.enter_async_context(self._node("asker"))
        self.storing = await self.holder_stack.enter_async_context(EngineClient(self.holder, "storing"))
        self.asking = await self._stack.enter_async_context(EngineClient(self.asker, "asking"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _node(self, instance_id: str, **settings: object) -> Node:
        address = (self.coordinator.address,)
        return Node(node_config(self._runtime_dir, instance_id, coordinator_address=address, **settings))

    async def store(self, numbers: list[int]) -> None:
        """Chunks at the holder whose every word is their number; waits until the asker can know of them."""
        credits_ = await self.storing.reserve(len(numbers))
        commits = []
        for number, extent in zip(numbers, credits_, strict=True):
            words(self.holder, extent.offset)[:] = number
            right = checksum(self.holder.pool.buffer, extent.offset, SPEC.chunk_bytes)
            commits.append(self.storing.commit(chunk_key(number), extent, checksum=right))
        await self.storing.say(commit=commits)
        if not self.holder.peer_address:
            return
        request = pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(*numbers))

        async def known() -> int:
            return absent_count(await self.asking.stub.Lookup(request, timeout=WAIT_SECONDS))

        await eventually(known, len(numbers))

    async def load(
        self, ticket: str, first_chunk: int, chunk_count: int, timeout_seconds: int = 5
    ) -> tuple[list[pb.LoadedChunks], LmkvError]:
        """All that the asker says about a load until it is over."""
        load = pb.LoadChunks(lookup_id=ticket, first_chunk=first_chunk, chunk_count=chunk_count)
        load.timeout.FromSeconds(timeout_seconds)
        await self.asking.say(load=[load])
        heard: list[pb.LoadedChunks] = []
        while not heard or not heard[-1].done:
            heard += await self.asking.hear("loaded")
        return heard, rpc.from_status(heard[-1].status)


def words(node: Node, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(node.pool.buffer, np.uint64, SPEC.chunk_bytes // 8, offset)


@pytest.fixture
async def fleet(runtime_dir: Path) -> AsyncIterator[TwoNodes]:
    async with TwoNodes(runtime_dir) as fleet:
        yield fleet


async def test_a_node_without_transfers_is_in_the_fleet_and_nothing_is_fetched_from_it(runtime_dir: Path) -> None:
    keys = chunk_keys(0, 1, 2)
    async with (
        TwoNodes(runtime_dir, enable_p2p=False) as fleet,
        rpc.open_channel(fleet.coordinator.address) as channel,
    ):
        await fleet.store([0, 1, 2])
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)

        async def held() -> list[tuple[str, int, str]]:
            found = await cache.Lookup(LookupRequest(prompt=by_keys(keys)), timeout=WAIT_SECONDS)
            return [(one.instance_id, one.matched_chunk_count, one.peer_address) for one in found.holders]

        await eventually(held, [("holder", 3, "")])
        found = await fleet.asking.lookup("1", keys)
        assert (len(found.own), absent_count(found)) == (0, 0)
        assert len((await fleet.storing.lookup("2", keys)).own) == 3
        for ends in (("holder", "asker"), ("asker", "holder")):
            old, new = (chunk_pb2.Position(instance_id=end) for end in ends)
            with pytest.raises(grpc.RpcError) as caught:
                await cache.Move(
                    MoveRequest(prompt=by_keys(keys), old_position=old, new_position=new), timeout=WAIT_SECONDS
                )
            error = rpc.from_rpc_error(caught.value)
            assert error.reason == "P2P_DISABLED"
            assert "set enable_p2p to true there" in str(error)
        with pytest.raises(grpc.RpcError) as caught:
            await cache.Drain(DrainRequest(instance_id="holder"), timeout=WAIT_SECONDS)
        assert rpc.from_rpc_error(caught.value).reason == "P2P_DISABLED"
        position = chunk_pb2.Position(instance_id="holder")
        pin = (await cache.Pin(PinRequest(prompt=by_keys(keys), position=position), timeout=WAIT_SECONDS)).pin
        assert pin.chunk_count == 3


async def test_what_another_node_holds_is_found_and_brought_in(fleet: TwoNodes) -> None:
    await fleet.store([0, 1, 2, 3])
    found = await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3, 4), reserve_count=5)
    assert (len(found.own), absent_count(found), found.peer_instance_id) == (0, 4, "holder")
    assert len(await fleet.asking.hear("credits")) == 1, "each chunk that is found makes it one fewer"

    heard, _ = await fleet.load("1", 0, 4)
    assert not heard[-1].status.code
    assert heard[-1].peer_instance_id == "holder"
    assert sum(loaded.transferred_bytes for loaded in heard) == 4 * SPEC.chunk_bytes
    chunks = {loaded.first_chunk + index: chunk for loaded in heard for index, chunk in enumerate(loaded.chunks)}
    assert sorted(chunks) == [0, 1, 2, 3]
    for number, chunk in chunks.items():
        assert (words(fleet.asker, chunk.extent.offset) == number).all()
    assert [chunk.holds for chunk in fleet.asker.tier] == [1] * 4
    await fleet.asking.release("1")
    assert len((await fleet.asking.lookup("2", chunk_keys(0, 1, 2, 3))).own) == 4
    await fleet.asking.release("2")
    await fleet.asking.lookup("3", chunk_keys(9))
    assert not any(chunk.holds for node in (fleet.asker, fleet.holder) for chunk in node.tier)


async def test_a_load_may_begin_behind_what_is_there_already(fleet: TwoNodes) -> None:
    await fleet.store([0, 1, 2, 3])
    await fleet.asking.store(chunk_keys(0))
    found = await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3))
    assert (len(found.own), absent_count(found)) == (1, 3)
    heard, _ = await fleet.load("1", 2, 2)
    assert next(loaded.first_chunk for loaded in heard if loaded.chunks) == 2
    values = {int(words(fleet.asker, chunk.extent.offset)[0]) for loaded in heard for chunk in loaded.chunks}
    assert values == {2, 3}


async def test_a_load_that_is_released_brings_nothing_more_and_holds_nothing(fleet: TwoNodes) -> None:
    await fleet.store([0, 1, 2, 3])
    await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3))
    load = pb.LoadChunks(lookup_id="1", first_chunk=0, chunk_count=4)
    load.timeout.FromSeconds(60)
    await fleet.asking.say(load=[load], release=[])
    await fleet.asking.release("1")
    await fleet.asking.lookup("2", chunk_keys(9))
    await until(lambda: not any(chunk.holds for node in (fleet.asker, fleet.holder) for chunk in node.tier))
    fleet.asker.tier.check()


async def test_when_the_holder_is_gone_the_load_says_so_in_time(fleet: TwoNodes) -> None:
    await fleet.store([0, 1])
    await fleet.asking.lookup("1", chunk_keys(0, 1))
    await fleet.holder_stack.aclose()
    async with asyncio.timeout(WAIT_SECONDS):  # far less than the load may take
        heard, error = await fleet.load("1", 0, 2, timeout_seconds=600)
    assert heard[-1].status.code
    assert error.reason == "UNREACHABLE"
    assert not any(loaded.chunks for loaded in heard)
    assert fleet.asker.tier.reserved_count == 0


async def test_a_person_may_have_chunks_brought_in(fleet: TwoNodes) -> None:
    await fleet.store([0, 1])
    request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(0, 1, 2))
    answer = await fleet.asking.stub.Load(request, timeout=WAIT_SECONDS)
    assert (answer.chunk_count, answer.transferred_bytes) == (2, 2 * SPEC.chunk_bytes)
    assert not any(chunk.holds for chunk in fleet.asker.tier)


async def clear(coordinator: Coordinator, **selection: Any) -> ClearResult:
    """Clears, and waits for the end."""
    async with rpc.open_channel(coordinator.address) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        operations: Any = operations_pb2_grpc.OperationsStub(channel)
        operation = await cache.Clear(ClearRequest(**with_prompt(**selection)), timeout=WAIT_SECONDS)
        operation = await wait_for_operation(operations, operation.name)
    result = ClearResult()
    assert operation.response.Unpack(result), operation.error.message
    return result


async def test_a_clear_of_more_chunks_than_one_order_names_drops_all_of_them(fleet: TwoNodes) -> None:
    await fleet.store([0, 1, 2])
    nowhere = chunk_keys(*range(1000, 1000 + BATCH_CHUNKS))
    keys = join_keys([chunk_key(0), *nowhere, chunk_key(1), *nowhere, chunk_key(2)])
    result = await clear(fleet.coordinator, chunk_keys=keys)
    assert (result.chunk_count, len(result.failures)) == (3, 0)
    assert len(fleet.holder.tier) == 0


async def test_a_clear_of_a_model_with_two_specs_drops_the_chunks_of_both(fleet: TwoNodes) -> None:
    other = small_spec(chunk_size=64)
    async with EngineClient(fleet.holder, "other", other) as second:
        await second.store(chunk_keys(10, 11))
        await fleet.store([0, 1])
        assert len(fleet.holder.tier) == 4
        await until(lambda: len(fleet.coordinator.tenants.unnamed.core.instances.named("holder", "").info.specs) == 2)
        result = await clear(fleet.coordinator, model_name=SPEC.model_name)
        assert (result.chunk_count, len(result.failures)) == (4, 0)
        assert len(fleet.holder.tier) == 0


async def test_without_the_coordinator_the_own_chunks_are_still_found(fleet: TwoNodes) -> None:
    await fleet.asking.store(chunk_keys(7))
    await fleet.coordinator.aclose()
    found = await fleet.asking.lookup("1", chunk_keys(7, 8))
    assert len(found.own) == 1


async def test_the_properties_of_each_node_are_reported(fleet: TwoNodes) -> None:
    described = fleet.holder.describe()
    assert (described.instance_id, described.engine_count) == ("holder", 1)
    assert described.peer_address == fleet.holder.peer_address
    assert [spec.fingerprint for spec in described.specs] == [SPEC.fingerprint]
    (usage,) = described.tiers
    assert usage.capacity_bytes == fleet.holder.tier.size_bytes


async def test_load_times_and_avoided_computation_are_reported(fleet: TwoNodes) -> None:
    release = pb.ReleaseChunks(lookup_id="1")
    release.load_duration.FromMilliseconds(250)
    release.avoided_prefill_duration.FromMilliseconds(3500)
    for one in (release, pb.ReleaseChunks(lookup_id="2")):
        await fleet.asking.say(release=[one])
    await fleet.asking.lookup("3", chunk_keys(7))  # what was said before has been acted on
    stats = fleet.asker.describe().stats
    assert stats.load_count == 1
    assert stats.load_duration.ToMilliseconds() == 250
    assert stats.avoided_prefill_duration.ToMilliseconds() == 3500


async def test_hits_and_their_sources_are_reported(fleet: TwoNodes) -> None:
    await fleet.store([0, 1])
    await fleet.asking.store(chunk_keys(7))
    await fleet.asking.lookup("own", chunk_keys(7, 8))
    found = await fleet.asking.lookup("peer", chunk_keys(0, 1, 2))
    assert absent_count(found) == 2
    await fleet.load("peer", 0, 2)
    stats = fleet.asker.describe().stats
    assert (stats.asked_chunks, stats.own_chunks, stats.peer_chunks) == (5, 1, 2)
    (traffic,) = stats.traffic
    assert (traffic.instance_id, traffic.chunk_count) == ("holder", 2)
    assert traffic.transferred_bytes == 2 * SPEC.chunk_bytes


async def test_what_the_coordinator_wants_done_is_done_by_whole_nodes(fleet: TwoNodes) -> None:
    await fleet.store([0, 1, 2, 3])
    keys = join_keys(chunk_keys(0, 1, 2, 3))
    async with rpc.open_channel(fleet.coordinator.address) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        operations: Any = operations_pb2_grpc.OperationsStub(channel)
        here, there = chunk_pb2.Position(instance_id="asker"), chunk_pb2.Position(instance_id="holder")
        pin = await cache.Pin(
            PinRequest(prompt=by_keys(split_keys(keys[:16])), position=there, ttl=Duration(seconds=60)),
            timeout=WAIT_SECONDS,
        )
        assert pin.pin.chunk_count == 1
        move = await cache.Move(
            MoveRequest(prompt=by_keys(split_keys(keys)), old_position=there, new_position=here), timeout=WAIT_SECONDS
        )
        move = await wait_for_operation(operations, move.name)
    result = MoveResult()
    assert move.response.Unpack(result)
    assert (result.chunk_count, result.dropped_chunk_count) == (4, 3)
    assert result.transferred_bytes == 4 * SPEC.chunk_bytes
    assert rpc.from_status(result.failures[0].status).reason == "CHUNK_PINNED"
    for number in range(4):
        chunk = fleet.asker.tier.get(chunk_key(number))
        assert chunk
        assert (words(fleet.asker, chunk.offset) == number).all()
    assert [chunk.key for chunk in fleet.holder.tier] == chunk_keys(0)
    for node in (fleet.asker, fleet.holder):
        node.orders.check()
        node.tier.check()
