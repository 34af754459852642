"""`google.longrunning.Operations` over a socket: listed, waited for, cancelled, forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2 as pb
from google.longrunning import operations_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError
from lmkv.rpc.error_status import from_rpc_error
from lmkv.v1.cache_service_pb2 import ClearRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import operations as core
from lmkv_server.coordinator.operations import operations as operations_module
from tests.server.coordinator.cases import CHUNKS, KEYS
from tests.server.coordinator.scripted_instance import Make
from tests.support.operations import wait_for_operation
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, eventually


@pytest.fixture
def operations(channel: grpc.aio.Channel) -> Any:
    return operations_pb2_grpc.OperationsStub(channel)


async def refused(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def clear(cache: Any) -> str:
    operation = await cache.Clear(ClearRequest(all=True), timeout=WAIT_SECONDS)
    return str(operation.name)


async def names(operations: Any, **fields: Any) -> list[str]:
    response = await operations.ListOperations(pb.ListOperationsRequest(**fields), timeout=WAIT_SECONDS)
    return [operation.name for operation in response.operations]


async def test_operations_are_listed_newest_first_in_pages(cache: Any, operations: Any) -> None:
    begun = [await clear(cache) for _ in range(5)]
    page = await operations.ListOperations(pb.ListOperationsRequest(page_size=2), timeout=WAIT_SECONDS)
    listed = [operation.name for operation in page.operations]
    while page.next_page_token:
        request = pb.ListOperationsRequest(page_size=2, page_token=page.next_page_token)
        page = await operations.ListOperations(request, timeout=WAIT_SECONDS)
        listed += [operation.name for operation in page.operations]
    assert listed == begun[::-1]


async def test_an_operation_that_is_larger_than_a_page_is_a_page_of_its_own(
    cache: Any, operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [await clear(cache) for _ in range(3)]
    monkeypatch.setattr(rpc, "MAX_MESSAGE_BYTES", 2)
    listed, token = [], ""
    for _ in begun:
        page = await operations.ListOperations(pb.ListOperationsRequest(page_token=token), timeout=WAIT_SECONDS)
        listed += [operation.name for operation in page.operations]
        token = page.next_page_token
    assert (listed, token) == (begun[::-1], "")


async def test_a_filter_separates_running_from_ended_operations(make: Make, cache: Any, operations: Any) -> None:
    over = await clear(cache)
    await wait_for_operation(operations, over)
    async with make("a", CHUNKS) as a:
        a.going.clear()
        running = await clear(cache)
        assert await names(operations, filter="done = true") == [over]
        assert await names(operations, filter="done=false") == [running]
        assert await names(operations) == [running, over]
        a.going.set()
    error = await refused(operations.ListOperations(pb.ListOperationsRequest(filter="name=x"), timeout=WAIT_SECONDS))
    assert "done=true" in str(error)


async def test_waiting_ends_with_the_operation_or_the_time(make: Make, cache: Any, operations: Any) -> None:
    async with make("a", CHUNKS) as a:
        a.going.clear()
        name = await clear(cache)
        request = pb.WaitOperationRequest(name=name, timeout=Duration(nanos=20_000_000))
        assert not (await operations.WaitOperation(request, timeout=WAIT_SECONDS)).done
        assert not (await operations.WaitOperation(pb.WaitOperationRequest(name=name), timeout=3.0)).done
        waiting = asyncio.ensure_future(operations.WaitOperation(pb.WaitOperationRequest(name=name), timeout=40))
        a.going.set()
        assert (await waiting).done


async def test_an_operation_that_is_over_can_be_forgotten(cache: Any, operations: Any) -> None:
    name = await clear(cache)
    await wait_for_operation(operations, name)
    await operations.DeleteOperation(pb.DeleteOperationRequest(name=name), timeout=WAIT_SECONDS)
    assert (await refused(operations.GetOperation(pb.GetOperationRequest(name=name), timeout=WAIT_SECONDS))).reason == (
        "OPERATION_NOT_FOUND"
    )


async def test_a_request_id_is_free_again_once_its_operation_is_deleted(
    make: Make, cache: Any, operations: Any
) -> None:
    async with make("a", CHUNKS) as a:
        request = ClearRequest(all=True, request_id="once")
        first = await cache.Clear(request, timeout=WAIT_SECONDS)
        await wait_for_operation(operations, first.name)
        assert (await cache.Clear(request, timeout=WAIT_SECONDS)).name == first.name
        await operations.DeleteOperation(pb.DeleteOperationRequest(name=first.name), timeout=WAIT_SECONDS)
        a.chunks.update(dict.fromkeys(KEYS, LLAMA.chunk_size))
        second = await cache.Clear(request, timeout=WAIT_SECONDS)
        assert second.name != first.name
        assert (await wait_for_operation(operations, second.name)).HasField("response")
        assert not a.chunks, "it was done again"
        other = ClearRequest(instance_id="a", all=True, request_id="once")
        await operations.DeleteOperation(pb.DeleteOperationRequest(name=second.name), timeout=WAIT_SECONDS)
        assert (await cache.Clear(other, timeout=WAIT_SECONDS)).name not in (first.name, second.name)


async def test_a_request_id_is_free_again_once_its_operation_has_expired() -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, operation_ttl=0.001)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        cache: Any = CacheServiceStub(channel)
        request = ClearRequest(all=True, request_id="once")
        first = await cache.Clear(request, timeout=WAIT_SECONDS)

        async def is_another() -> bool:
            return bool((await cache.Clear(request, timeout=WAIT_SECONDS)).name != first.name)

        await eventually(is_another, expected=True)


async def test_unknown_names_are_not_found(operations: Any) -> None:
    for name in ("", "x", "move-zz", "move-" + "f" * 16):
        for call in (
            operations.GetOperation(pb.GetOperationRequest(name=name), timeout=WAIT_SECONDS),
            wait_for_operation(operations, name),
            operations.CancelOperation(pb.CancelOperationRequest(name=name), timeout=WAIT_SECONDS),
            operations.DeleteOperation(pb.DeleteOperationRequest(name=name), timeout=WAIT_SECONDS),
        ):
            assert (await refused(call)).reason == "OPERATION_NOT_FOUND"


async def test_those_that_ended_give_way_in_time_or_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, operation_ttl=0.001)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        name = await clear(CacheServiceStub(channel))
        operations: Any = operations_pb2_grpc.OperationsStub(channel)
        async with asyncio.timeout(WAIT_SECONDS):
            while await names(operations):  # noqa: ASYNC110 # it happens on the other side of a socket
                await asyncio.sleep(0.005)
        error = await refused(operations.GetOperation(pb.GetOperationRequest(name=name), timeout=WAIT_SECONDS))
        assert error.reason == "OPERATION_NOT_FOUND"
    monkeypatch.setattr(operations_module, "MAX_ENDED", 2)
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        operations = operations_pb2_grpc.OperationsStub(channel)
        begun = []
        for _ in range(4):
            begun.append(await clear(CacheServiceStub(channel)))
            await wait_for_operation(operations, begun[-1])
        assert await names(operations) == begun[:1:-1]


async def test_too_many_at_once_are_refused(
    make: Make, cache: Any, operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MAX_RUNNING", 2)
    async with make("a", CHUNKS) as a:
        a.going.clear()
        begun = [await clear(cache) for _ in range(2)]
        assert (await refused(cache.Clear(ClearRequest(all=True), timeout=WAIT_SECONDS))).reason == "FULL"
        for name in begun:
            await operations.CancelOperation(pb.CancelOperationRequest(name=name), timeout=WAIT_SECONDS)
            done = await wait_for_operation(operations, name)
            assert done.error.code == grpc.StatusCode.CANCELLED.value[0]
        assert a.chunks == CHUNKS
        a.going.set()
        assert await clear(cache)
