"""Drains over a socket: which chunks are copied to which instance, and when it is safe to stop."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from lmkv.errors import LmkvError
from lmkv.internal.v1.report_service_pb2 import Order
from lmkv.keys import ChunkKey
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import DrainProgress, DrainRequest, DrainResult, PinRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import drains
from lmkv_server.coordinator.operations.operations import MAX_REQUEST_ID_BYTES
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA_FLOAT, PROMPT
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, unpacked, until
from tests.support.operations import wait_for_operation
from tests.waiting import WAIT_SECONDS

MANY = {ChunkKey(number.to_bytes(16, "little")): 16 for number in range(1, 21)}


class Drainer:
    """Drains instance `a`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.cache: Any = CacheServiceStub(channel)
        self.operations: Any = operations_pb2_grpc.OperationsStub(channel)

    async def start(self, instance_id: str = "a", *to: str, **fields: Any) -> operations_pb2.Operation:
        request = DrainRequest(instance_id=instance_id, destination_instance_ids=to, **fields)
        operation: operations_pb2.Operation = await self.cache.Drain(request, timeout=60)
        return operation

    async def finish(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        return await wait_for_operation(self.operations, operation.name)

    async def get(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        found: operations_pb2.Operation = await self.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=operation.name), timeout=60
        )
        return found

    async def cancel(self, operation: operations_pb2.Operation) -> None:
        await self.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)

    async def drain(self, instance_id: str = "a", *to: str, **fields: Any) -> DrainResult:
        """A drain from start to end that copies something, or has nothing to copy."""
        ended = await self.finish(await self.start(instance_id, *to, **fields))
        assert not ended.HasField("error"), ended.error.message
        result: DrainResult = unpacked(ended.response, DrainResult)
        return result

    async def failure(self, instance_id: str = "a", *to: str, **fields: Any) -> LmkvError:
        """The error of a drain that copies nothing."""
        ended = await self.finish(await self.start(instance_id, *to, **fields))
        assert ended.HasField("error")
        return from_status(ended.error)

    async def refusal(self, instance_id: str = "a", *to: str, **fields: Any) -> LmkvError:
        """Why a drain does not start."""
        with pytest.raises(grpc.RpcError) as caught:
            await self.start(instance_id, *to, **fields)
        return from_rpc_error(caught.value)


@pytest.fixture
def drainer(channel: grpc.aio.Channel) -> Drainer:
    return Drainer(channel)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)  # scripted instances report nothing by themselves


async def test_a_drain_copies_what_only_the_instance_holds(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        operation = await drainer.start()
        assert operation.name.startswith("drain-")
        assert unpacked(operation.metadata, DrainProgress).instance_id == "a"
        ended = await drainer.finish(operation)
        result = unpacked(ended.response, DrainResult)
        assert (result.chunk_count, result.token_count, result.transferred_bytes) == (3, 40, 3000)
        assert (result.remaining_chunk_count, list(result.failures)) == (0, [])
        assert a.chunks == b.chunks == CHUNKS, "the instance keeps its chunks"
        progress = unpacked(ended.metadata, DrainProgress)
        assert (progress.chunk_count, progress.done_chunk_count, progress.pass_count) == (3, 3, 1)
        assert progress.end_time.ToNanoseconds() >= progress.create_time.ToNanoseconds()


async def test_a_chunk_that_is_held_elsewhere_is_not_copied(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b", KEYS[:2]) as b, make("c") as c:
        result = await drainer.drain("a", "c")
        assert (result.chunk_count, result.remaining_chunk_count) == (1, 0)
        assert (list(b.chunks), list(c.chunks)) == (KEYS[:2], KEYS[2:])


async def test_an_instance_without_chunks_of_its_own_is_safe_to_stop_at_once(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS) as b:
        result = await drainer.drain()
        assert (result.chunk_count, result.remaining_chunk_count) == (0, 0)
        assert b.orders == []


async def test_the_instance_with_most_free_memory_receives_all_that_it_has_room_for(
    make: Make, drainer: Drainer
) -> None:
    b, c = make("b"), make("c")
    b.used_bytes = 1 << 20
    async with make("a", MANY), b, c:
        await drainer.drain()
        assert (len(b.chunks), len(c.chunks)) == (0, 20)


async def test_named_destinations_are_filled_one_after_the_other(make: Make, drainer: Drainer) -> None:
    async with make("a", MANY), make("b") as b, make("c") as c, make("d") as d:
        b.limit = 5
        result = await drainer.drain("a", "b", "c")
        assert (result.chunk_count, result.remaining_chunk_count) == (20, 0)
        assert (len(b.chunks), len(c.chunks), len(d.chunks)) == (5, 15, 0)
        assert b.chunks | c.chunks == MANY


async def test_what_finds_no_room_is_counted_with_the_reason(make: Make, drainer: Drainer) -> None:
    async with make("a", MANY), make("b") as b, make("c") as c:
        b.limit, c.limit = 5, 3
        result = await drainer.drain()
        assert (result.chunk_count, result.remaining_chunk_count) == (8, 12)
        (failure,) = result.failures
        assert (failure.chunk_count, from_status(failure.status).reason) == (12, "NO_FREE_EXTENTS")


async def test_no_room_anywhere_fails_the_drain(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b") as b:
        b.limit = 0
        error = await drainer.failure()
        assert error.reason == "NO_FREE_EXTENTS"
        assert "nothing was copied, and 3 chunks held by 'a' only: no destination has room" in str(error)


@pytest.mark.parametrize("evict", [False, True])
async def test_destinations_evict_only_if_the_request_allows_it(make: Make, drainer: Drainer, evict: bool) -> None:
    async with make("a", CHUNKS), make("b") as b:
        await drainer.drain(evict=evict)
        (order,) = b.orders
        assert order.fetch.keep_others is not evict


async def test_only_instances_of_the_same_spec_receive_chunks(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("other", spec=LLAMA_FLOAT) as other:
        error = await drainer.failure()
        assert error.reason == "KV_SPEC_MISMATCH"
        assert "no destination can hold them" in str(error)
        async with make("b") as b:
            assert (await drainer.drain()).remaining_chunk_count == 0
            assert (other.chunks, b.chunks) == ({}, CHUNKS)


async def test_the_only_instance_has_no_destination(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS):
        assert "no destination can hold them" in str(await drainer.failure())


async def test_chunks_that_are_stored_meanwhile_are_found_by_the_next_pass(make: Make, drainer: Drainer) -> None:
    async with make("a", KEYS[:2]) as a, make("b") as b:
        stored: list[asyncio.Task[None]] = []

        def store(_: ScriptedInstance, order: Order) -> None:
            if not stored:
                stored.append(asyncio.create_task(a.store({KEYS[2]: 8})))
                b.going.clear()

        b.before = store
        operation = await drainer.start()
        await until(lambda: bool(stored) and stored[0].done())
        await drainer.cache.Pin(PinRequest(prompt=by_tokens(PROMPT), position=Position(instance_id="a")), timeout=60)
        b.going.set()  # what `a` has stored was reported before the pin
        ended = await drainer.finish(operation)
        result = unpacked(ended.response, DrainResult)
        assert (result.chunk_count, result.remaining_chunk_count) == (3, 0)
        assert result.pin_count == 1
        assert unpacked(ended.metadata, DrainProgress).pass_count == 2


async def test_passes_are_bounded(make: Make, drainer: Drainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "MAX_PASSES", 3)
    async with make("a", KEYS[:1]) as a, make("b") as b:
        fresh = iter(MANY)
        stored = []

        async def store() -> None:
            stored.append(next(fresh))
            await a.store({stored[-1]: 16})
            b.going.set()

        def hold(_: ScriptedInstance, order: Order) -> None:
            b.going.clear()
            holding.append(asyncio.create_task(store()))

        holding: list[asyncio.Task[None]] = []
        b.before = hold
        ended = await drainer.finish(await drainer.start())
        result = unpacked(ended.response, DrainResult)
        assert unpacked(ended.metadata, DrainProgress).pass_count == 3
        assert (result.chunk_count, result.remaining_chunk_count) == (3, 1)
        assert "stored during the drain" in result.failures[0].status.message
        await asyncio.gather(*holding)


async def test_a_destination_that_dies_is_replaced_by_another(make: Make, drainer: Drainer) -> None:
    async with make("a", MANY), make("c") as c:
        b = make("b")
        b.going.clear()
        await b.join()
        operation = await drainer.start("a", "b", "c")
        await until(lambda: bool(b.orders))
        await b.leave()
        successor = make("b")  # the next process of this id
        await successor.join()
        result = unpacked((await drainer.finish(operation)).response, DrainResult)
        assert (result.chunk_count, result.remaining_chunk_count) == (20, 0)
        assert successor.chunks | c.chunks == MANY
        await successor.leave()


async def test_copies_that_are_lost_with_their_destination_are_made_again(
    make: Make, drainer: Drainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "BATCH_CHUNKS", 5)
    async with make("a", MANY), make("c") as c:
        b = make("b")
        await b.join()

        def freeze(_: ScriptedInstance, order: Order) -> None:
            if len(b.orders) == 3:
                b.going.clear()

        b.before = freeze
        operation = await drainer.start("a", "b", "c")
        await until(lambda: len(b.orders) == 3)
        await b.leave()
        successor = make("b")
        successor.limit = 0
        await successor.join()
        result = unpacked((await drainer.finish(operation)).response, DrainResult)
        assert result.remaining_chunk_count == 0
        assert c.chunks == MANY
        await successor.leave()


async def test_a_drain_waits_until_the_holders_elsewhere_have_reported_again(
    make: Make, drainer: Drainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 30.0)
    async with make("a", CHUNKS), make("b", CHUNKS) as b, make("c") as c:
        operation = await drainer.start("a", "c")
        await b.evict(KEYS[:1])  # reported after the start of the drain, like the death of `b`
        while not (await drainer.get(operation)).done:
            for instance in (b, c):
                await instance.report_stats()
        result = unpacked((await drainer.finish(operation)).response, DrainResult)
        assert (result.chunk_count, result.remaining_chunk_count) == (1, 0)
        assert list(c.chunks) == KEYS[:1]


async def test_an_instance_that_restarts_ends_its_drain(make: Make, drainer: Drainer) -> None:
    async with make("b") as b:
        a = make("a", CHUNKS)
        b.going.clear()
        await a.join()
        operation = await drainer.start()
        await until(lambda: bool(b.orders))
        await a.leave()
        successor = make("a", CHUNKS)
        await successor.join()
        b.going.set()
        error = from_status((await drainer.finish(operation)).error)
        assert error.reason == "INSTANCE_NOT_FOUND"
        await successor.leave()


async def test_a_drain_that_is_cancelled_keeps_its_copies(
    make: Make, drainer: Drainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "BATCH_CHUNKS", 1)
    async with make("a", CHUNKS) as a, make("b") as b:

        def stop(_: ScriptedInstance, order: Order) -> None:
            if len(b.orders) == 2:
                b.going.clear()

        b.before = stop
        operation = await drainer.start()
        await until(lambda: len(b.orders) == 2)
        await drainer.cancel(operation)
        error = from_status((await drainer.finish(operation)).error)
        assert error.reason == "OPERATION_CANCELLED"
        assert "cancelled after 1 chunks, whose copies stay; 2 chunks held by 'a' only" in str(error)
        assert (a.chunks, len(b.chunks)) == (CHUNKS, 1)
        # A cancelled drain makes no instance leave: the rest can still be copied to it.
        b.before = None
        b.going.set()
        assert (await drainer.drain("b", "a")).remaining_chunk_count == 0


async def test_a_drain_ends_at_its_deadline(make: Make, drainer: Drainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "BATCH_CHUNKS", 1)
    async with make("a", CHUNKS), make("b") as b:

        def stop(_: ScriptedInstance, order: Order) -> None:
            if len(b.orders) == 2:
                b.going.clear()

        b.before = stop
        result = await drainer.drain(timeout=Duration(seconds=3))
        assert (result.chunk_count, result.remaining_chunk_count) == (1, 2)
        assert {from_status(failure.status).reason for failure in result.failures} == {"UNREACHABLE"}
        b.going.set()


async def test_instances_that_leave_together_do_not_rely_on_each_other(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS), make("c") as c:
        c.going.clear()
        first = await drainer.start("a")  # nothing to do: `b` holds it too
        result = unpacked((await drainer.finish(first)).response, DrainResult)
        assert result.remaining_chunk_count == 0
        second = await drainer.start("b")
        await until(lambda: bool(c.orders))  # `a` is about to stop, so `b` is the only holder
        c.going.set()
        assert unpacked((await drainer.finish(second)).response, DrainResult).chunk_count == 3
        assert c.chunks == CHUNKS
        assert (await drainer.refusal("c", "a")).reason == "BAD_SELECTION"


async def test_an_instance_that_another_coordinator_drains_receives_nothing_and_counts_for_nothing(
    make: Make, drainer: Drainer
) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS) as b, make("c") as c:
        await b.report_leaving(600)
        assert (await drainer.drain()).chunk_count == 3, "what `b` holds, too, is lost with it"
        assert c.chunks == CHUNKS
        assert (await drainer.refusal("c", "b")).reason == "BAD_SELECTION"
        await b.report_leaving(0)
        assert (await drainer.drain("c", "b")).remaining_chunk_count == 0


async def test_the_instance_learns_that_it_is_drained_before_anything_is_copied_and_for_how_long(
    make: Make, drainer: Drainer
) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.before = lambda *_: seen.append(list(a.leaving))
        seen: list[list[float]] = []
        await drainer.drain(timeout=Duration(seconds=60))
        assert seen == [[60 + drains.LEAVING_SECONDS]]
        assert a.leaving == [60 + drains.LEAVING_SECONDS, drains.LEAVING_SECONDS]
        b.going.clear()
        await a.store({next(iter(MANY)): 16})
        cancelled = await drainer.start()
        await until(lambda: len(b.orders) == 2)
        await drainer.cancel(cancelled)
        await drainer.finish(cancelled)
        assert a.leaving[-1] == 0
        b.going.set()


async def test_a_drain_without_destinations_waits_for_those_that_have_yet_to_register(
    make: Make, drainer: Drainer, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "SETTLE_SECONDS", WAIT_SECONDS)
    async with make("a", CHUNKS):
        operation = await drainer.start()
        table = coordinator.tenants.unnamed.fleet_operations.table
        progress = table.get(operation.name).progress
        assert isinstance(progress, DrainProgress)
        await until(lambda: progress.pass_count == 1)
        async with make("b") as b:
            coordinator.tenants.unnamed.core._complete_time = 0.0  # a lease after the start, all have registered
            result = unpacked((await drainer.finish(operation)).response, DrainResult)
            assert (result.chunk_count, result.remaining_chunk_count) == (3, 0)
            assert b.chunks == CHUNKS


async def test_an_instance_that_restarted_after_its_drain_is_a_destination_again(make: Make, drainer: Drainer) -> None:
    async with make("b") as b:
        a = make("a", CHUNKS)
        await a.join()
        await drainer.drain("a")
        await a.leave()
        async with make("a") as restarted:
            assert (await drainer.drain("b")).remaining_chunk_count == 0
            assert restarted.chunks == b.chunks == CHUNKS


async def test_a_repeat_of_a_request_id_is_the_same_drain(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b") as b:
        first = await drainer.start(request_id="once")
        await drainer.finish(first)
        assert (await drainer.start(request_id="once")).name == first.name
        assert sum(order.HasField("fetch") for order in b.orders) == 1


async def test_what_cannot_start_reports_why(make: Make, drainer: Drainer) -> None:
    async with make("a", CHUNKS), make("b"):
        assert (await drainer.refusal("unknown")).reason == "INSTANCE_NOT_FOUND"
        assert (await drainer.refusal("a", "unknown")).reason == "INSTANCE_NOT_FOUND"
        assert (await drainer.refusal("a", "b", "a")).reason == "BAD_SELECTION"
        assert (await drainer.refusal("a", *["b"] * (drains.MAX_DESTINATIONS + 1))).reason == "BAD_SELECTION"
        assert (await drainer.refusal(timeout=Duration())).reason == "BAD_SELECTION"
        assert (await drainer.refusal(request_id="x" * (MAX_REQUEST_ID_BYTES + 1))).reason == "BAD_MESSAGE"
