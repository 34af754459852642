"""Records that instances report: a coordinator lists, follows, cancels and continues their operations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.longrunning.operations_pb2_grpc import OperationsStub

from lmkv import rpc
from lmkv.errors import LmkvError, OperationCancelled
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.spec import KvSpec
from lmkv.v1.cache_service_pb2 import ClearRequest, ClearResult, DrainRequest, DrainResult, MoveRequest, MoveResult
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv.v1.registry_service_pb2 import OperationRecord
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import drains, operations
from lmkv_server.coordinator.operations import replicator as keeping
from tests.server.coordinator import parted
from tests.server.coordinator.cases import CHUNKS, HYBRID, KEYS, LLAMA, PROMPT
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, unpacked, until

MOVE = MoveRequest(
    old_position=Position(instance_id="a"), new_position=Position(instance_id="b"), tokens=PROMPT, request_id="r"
)


class Elsewhere:
    """Another coordinator, and instances `a` and `b` as it knows them."""

    def __init__(self, channel: grpc.aio.Channel, spec: KvSpec = LLAMA, chunks: Any = CHUNKS) -> None:
        self.cache: Any = CacheServiceStub(channel)
        self.operations: Any = OperationsStub(channel)
        fleet: dict[str, ScriptedInstance] = {}
        self.a = ScriptedInstance(channel, fleet, "a", spec, chunks)
        self.b = ScriptedInstance(channel, fleet, "b", spec)

    async def hear(self, record: OperationRecord, *, orphaned: bool = False) -> operations_pb2.Operation:
        """Makes `b` report a record; returns the operation after that."""
        await self.b.report_record(record, orphaned=orphaned)
        async with asyncio.timeout(60):
            while True:
                with suppress(grpc.RpcError):
                    return await self.get(record.operation.name)

    async def get(self, name: str) -> operations_pb2.Operation:
        found: operations_pb2.Operation = await self.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=name), timeout=60
        )
        return found

    async def wait(self, name: str) -> operations_pb2.Operation:
        ended: operations_pb2.Operation = await self.operations.WaitOperation(
            operations_pb2.WaitOperationRequest(name=name), timeout=60
        )
        assert ended.done
        return ended

    async def refusal(self, name: str) -> LmkvError:
        with pytest.raises(grpc.RpcError) as caught:
            await self.get(name)
        return from_rpc_error(caught.value)


@pytest.fixture
async def elsewhere(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Elsewhere]:
    async with opened_elsewhere(monkeypatch) as made:
        yield made


@asynccontextmanager
async def opened_elsewhere(
    monkeypatch: pytest.MonkeyPatch, spec: KvSpec = LLAMA, chunks: Any = CHUNKS
) -> AsyncIterator[Elsewhere]:
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)  # scripted instances report nothing by themselves
    monkeypatch.setattr(keeping, "SETTLE_SECONDS", 0.05)  # it began just now, and all records will have been reported
    async with (
        Coordinator(port=0, lease_ttl=30.0, cluster_secret="hush") as serving,
        rpc.open_channel(serving.address) as channel,
    ):
        made = Elsewhere(channel, spec, chunks)
        async with made.a, made.b:
            yield made


async def booked(cache: Any, b: ScriptedInstance, request: MoveRequest = MOVE) -> OperationRecord:
    """The record of a move that does not get on."""
    b.going.clear()
    operation = await cache.Move(request, timeout=60)
    await until(lambda: operation.name in b.records)
    return b.records[operation.name]


async def test_the_end_of_a_move_is_stored_though_an_instance_refused_it_at_first(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "STORE_RETRY_SECONDS", 0.01)
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
        b.refused_records = 3  # as instances do whose clocks differ from the coordinator's
        b.going.set()
        await until(lambda: b.records[record.operation.name].operation.done)
        assert b.refused_records == 0


async def test_those_that_a_move_concerns_keep_its_record_until_after_its_end(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        record = await booked(cache, b)
        assert (record.move, record.attempt, record.operation.done, record.cancelled) == (MOVE, 1, False, False)
        b.going.set()
        for instance in (a, b):
            await until(lambda: instance.records[record.operation.name].operation.done)  # noqa: B023 # awaited here
            kept = instance.records[record.operation.name]
            assert unpacked(kept.operation.response, MoveResult).chunk_count == len(CHUNKS)
            assert kept.expire_time.ToNanoseconds() > record.expire_time.ToNanoseconds()


async def test_operations_of_another_coordinator_are_listed_and_end_when_reported(
    make: Make, cache: Any, elsewhere: Elsewhere
) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
        name = record.operation.name
        assert (await elsewhere.refusal(name)).reason == "UNREACHABLE", "it may be reported later"
        assert await elsewhere.hear(record) == record.operation
        assert (await elsewhere.cache.Move(MOVE, timeout=60)).name == name, "by its request_id"
        waiting = asyncio.create_task(elsewhere.wait(name))
        b.going.set()
        await until(lambda: b.records[name].operation.done)
        await elsewhere.hear(b.records[name])
        assert await waiting == b.records[name].operation
        listed = await elsewhere.operations.ListOperations(operations_pb2.ListOperationsRequest(), timeout=60)
        assert list(listed.operations) == [b.records[name].operation]
        await elsewhere.hear(record)  # older news
        assert (await elsewhere.get(name)).done
        await until(lambda: elsewhere.b.records[name].operation.done)  # which is reported to it
        await elsewhere.operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=name), timeout=60)
        await elsewhere.b.report_record(b.records[name])
        assert (await elsewhere.refusal(name)).reason == "OPERATION_NOT_FOUND"


async def test_an_orphaned_operation_continues_where_it_was(make: Make, cache: Any, elsewhere: Elsewhere) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
    await elsewhere.a.evict(KEYS[:1])  # the first chunk was moved
    elsewhere.b.chunks[KEYS[0]] = CHUNKS[KEYS[0]]
    await elsewhere.b.report_chunks(KEYS[:1])
    await elsewhere.hear(record, orphaned=True)
    ended = await elsewhere.wait(record.operation.name)
    result = unpacked(ended.response, MoveResult)
    assert (result.chunk_count, result.token_count, result.dropped_chunk_count) == (3, 40, 3)
    assert (elsewhere.a.chunks, elsewhere.b.chunks) == ({}, CHUNKS)
    assert {(order.operation_name, order.attempt) for order in elsewhere.b.orders} == {(record.operation.name, 2)}
    await until(lambda: elsewhere.b.records[record.operation.name].operation.done)
    assert elsewhere.b.records[record.operation.name].attempt == 2


async def test_a_move_of_several_parts_continues_after_its_source_has_dropped_some(
    make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = MoveRequest(old_position=MOVE.old_position, new_position=MOVE.new_position, tokens=parted.PROMPT)
    chunks = parted.items(4)
    async with make("a", chunks, HYBRID), make("b", spec=HYBRID) as b:
        record = await booked(cache, b, request)
    async with opened_elsewhere(monkeypatch, HYBRID, chunks) as elsewhere:
        await elsewhere.b.store(dict.fromkeys(chunks[:3], 16))
        await elsewhere.a.evict(chunks[:3])
        await elsewhere.hear(record, orphaned=True)
        result = unpacked((await elsewhere.wait(record.operation.name)).response, MoveResult)
        assert (result.chunk_count, result.token_count, result.dropped_chunk_count) == (len(chunks), 64, len(chunks))
        assert (set(elsewhere.a.chunks), set(elsewhere.b.chunks)) == (set(), set(chunks))


async def test_the_instance_that_reported_a_resumed_operation_is_in_the_audit_log(
    make: Make, cache: Any, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
    with caplog.at_level(logging.INFO, "lmkv.audit"):
        await elsewhere.hear(record, orphaned=True)
        await elsewhere.wait(record.operation.name)
    lines = [json.loads(line.message) for line in caplog.records if line.name == "lmkv.audit"]
    line = lines[-1]  # the first may be of the booking
    assert (line["act"], line["operation"], line["caller"]) == ("resume", record.operation.name, "anonymous")
    assert line["request"]["new_position"] == {"instance_id": "b"}


async def test_what_is_orphaned_and_was_cancelled_ends_as_such(make: Make, cache: Any, elsewhere: Elsewhere) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
    record.cancelled = True
    await elsewhere.hear(record, orphaned=True)
    ended = await elsewhere.wait(record.operation.name)
    assert isinstance(from_status(ended.error), OperationCancelled)
    assert elsewhere.a.chunks == CHUNKS


async def test_what_runs_elsewhere_is_cancelled_by_way_of_those_that_keep_it(
    make: Make, cache: Any, elsewhere: Elsewhere
) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        record = await booked(cache, b)
        name = record.operation.name
        await elsewhere.hear(record)
        await elsewhere.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name), timeout=60)
        assert elsewhere.b.orders[-1].cancel.operation_name == name
        record.cancelled = True
        await b.report_record(record)
        await until(lambda: b.records[name].operation.done)
        assert isinstance(from_status(b.records[name].operation.error), OperationCancelled)
        assert a.chunks == CHUNKS


async def test_who_hears_that_another_took_over_stops(make: Make, cache: Any, elsewhere: Elsewhere) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        record = await booked(cache, b)
        name = record.operation.name
        await elsewhere.hear(record, orphaned=True)
        await elsewhere.wait(name)
        await until(lambda: elsewhere.b.records[name].operation.done)
        await b.report_record(elsewhere.b.records[name])
        again = await cache.Move(MOVE, timeout=60)
        assert (again.name, again.done) == (name, True)
        b.going.set()
        assert a.chunks == CHUNKS, "it has not dropped anything itself"


async def test_an_instance_that_has_cleared_repeats_its_outcome_to_the_next_coordinator(
    make: Make, cache: Any, elsewhere: Elsewhere
) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS) as b:
        b.going.clear()
        name = (await cache.Clear(ClearRequest(all=True), timeout=60)).name
        await until(lambda: bool(b.orders))
        record = b.records[name]
    await elsewhere.hear(record, orphaned=True)
    result = unpacked((await elsewhere.wait(name)).response, ClearResult)
    assert result.chunk_count == len(CHUNKS)
    assert [order.order_id for order in elsewhere.b.orders] == [order.order_id for order in b.orders]


async def test_an_orphaned_drain_continues_with_what_only_its_instance_holds(
    make: Make, cache: Any, elsewhere: Elsewhere
) -> None:
    a = make("a", CHUNKS)
    a.epoch = elsewhere.a.epoch  # it is the same process
    async with a, make("b") as b:
        b.going.clear()
        operation = await cache.Drain(DrainRequest(instance_id="a", request_id="d"), timeout=60)
        await until(lambda: bool(b.orders) and operation.name in b.records)
        record = b.records[operation.name]
    assert record.drain == DrainRequest(instance_id="a", request_id="d")
    await elsewhere.b.store({KEYS[0]: CHUNKS[KEYS[0]]})  # the first chunk was copied
    await elsewhere.hear(record, orphaned=True)
    ended = await elsewhere.wait(record.operation.name)
    result = unpacked(ended.response, DrainResult)
    assert (result.chunk_count, result.remaining_chunk_count) == (2, 0)
    assert elsewhere.a.chunks == elsewhere.b.chunks == CHUNKS
    assert {order.attempt for order in elsewhere.b.orders} == {2}
    assert (await elsewhere.cache.Drain(record.drain, timeout=60)).name == operation.name


async def test_an_orphaned_drain_of_an_instance_that_restarted_fails(
    make: Make, cache: Any, elsewhere: Elsewhere
) -> None:
    async with make("a", CHUNKS), make("b") as b:
        b.going.clear()
        operation = await cache.Drain(DrainRequest(instance_id="a"), timeout=60)
        await until(lambda: operation.name in b.records)
    await elsewhere.hear(b.records[operation.name], orphaned=True)
    ended = await elsewhere.wait(operation.name)
    assert from_status(ended.error).reason == "INSTANCE_NOT_FOUND"
    assert not elsewhere.b.chunks


async def test_a_record_without_its_request_cannot_be_resumed(make: Make, cache: Any, elsewhere: Elsewhere) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
    record.ClearField("move")
    await elsewhere.hear(record, orphaned=True)
    ended = await elsewhere.wait(record.operation.name)
    assert "too large for the record" in ended.error.message
    assert elsewhere.a.chunks == CHUNKS


async def test_an_operation_is_lost_once_every_instance_that_reported_it_has_restarted(
    make: Make, cache: Any, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make("a", CHUNKS), make("b") as b:
        record = await booked(cache, b)
        name = record.operation.name
        assert not (await elsewhere.hear(record)).done
        monkeypatch.setattr(operations, "SILENT_SECONDS", 0.0)
        assert not (await elsewhere.get(name)).done, "b runs, and stores the record"
        await elsewhere.b.restart()
        lost = await elsewhere.wait(name)
        assert from_status(lost.error).reason == "UNREACHABLE"
        assert not (await elsewhere.hear(record)).done, "a report is newer than the guess that there is none"
