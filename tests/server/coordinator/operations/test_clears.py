"""Clears over a socket: who forgets what, what a dry run says, and what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from lmkv.errors import LmkvError
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import join_keys
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.tiers import DISK, HOST
from lmkv.v1.cache_service_pb2 import ClearProgress, ClearRequest, ClearResult, PinRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import clears
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT, QWEN, keys_of
from tests.server.coordinator.scripted_instance import Make, unpacked, until
from tests.support.operations import wait_for_operation
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS


@pytest.fixture
def operations(channel: grpc.aio.Channel) -> Any:
    return operations_pb2_grpc.OperationsStub(channel)


async def ended(cache: Any, operations: Any, **fields: Any) -> operations_pb2.Operation:
    operation = await cache.Clear(ClearRequest(**with_prompt(**fields)), timeout=60)
    assert operation.name.startswith("clear-")
    return await wait_for_operation(operations, operation.name)


async def cleared(cache: Any, operations: Any, **fields: Any) -> ClearResult:
    operation = await ended(cache, operations, **fields)
    assert not operation.HasField("error"), operation.error.message
    result: ClearResult = unpacked(operation.response, ClearResult)
    return result


async def refused(cache: Any, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await cache.Clear(ClearRequest(**with_prompt(**fields)), timeout=60)
    return from_rpc_error(caught.value)


async def test_a_prompt_is_cleared_everywhere_and_nothing_else(make: Make, cache: Any, operations: Any) -> None:
    other = keys_of(range(64))
    async with make("a", [*KEYS, *other]) as a, make("b", KEYS[:2]) as b:
        result = await cleared(cache, operations, tokens=PROMPT)
        assert (result.chunk_count, result.token_count) == (5, 80)
        assert (list(a.chunks), list(b.chunks)) == (other, [])


async def test_a_prompt_of_several_orders_is_cleared_as_a_whole(
    make: Make, cache: Any, operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clears, "BATCH_CHUNKS", 2)
    async with make("a", CHUNKS) as a:
        result = await cleared(cache, operations, tokens=PROMPT)
        assert (result.chunk_count, result.token_count) == (3, 40)
        assert (len(a.orders), a.chunks) == (2, {})


async def test_a_dry_run_says_what_would_go_and_takes_nothing(make: Make, cache: Any, operations: Any) -> None:
    async with make("a", CHUNKS) as a, make("b", KEYS[:2]) as b:
        result = await cleared(cache, operations, all=True, dry_run=True)
        assert (result.chunk_count, result.token_count) == (5, 72)
        assert len(a.chunks) + len(b.chunks) == 5


async def test_an_instance_a_tier_or_a_model_can_be_cleared_alone(make: Make, cache: Any, operations: Any) -> None:
    qwen = keys_of(range(64), QWEN)
    async with make("a", CHUNKS) as a, make("b", CHUNKS) as b, make("q", qwen, QWEN) as q:
        assert (await cleared(cache, operations, instance_id="a", all=True, tier=DISK)).chunk_count == 0
        assert (await cleared(cache, operations, instance_id="a", all=True, tier=HOST)).chunk_count == 3
        assert (await cleared(cache, operations, model_name="llama")).chunk_count == 3
        assert (a.chunks, b.chunks, list(q.chunks)) == ({}, {}, qwen)
        assert (await cleared(cache, operations, chunk_keys=join_keys(qwen[:1]))).chunk_count == 1
        assert list(q.chunks) == qwen[1:]


async def test_versions_of_the_weights_are_cleared_one_by_one_or_all_but_one(
    make: Make, cache: Any, operations: Any
) -> None:
    specs = [LLAMA, *(replace(LLAMA, weight_version=version) for version in ("41", "42"))]
    of_spec = [keys_of(PROMPT, spec) for spec in specs]
    async with (
        make("none", of_spec[0], specs[0]) as none,
        make("old", of_spec[1], specs[1]) as old,
        make("new", of_spec[2], specs[2]) as new,
    ):
        held = (len(of_spec[0]), len(of_spec[1]), len(of_spec[2]))
        count = (
            await cleared(cache, operations, model_name="llama", kept_weight_version="42", dry_run=True)
        ).chunk_count
        assert count == held[0] + held[1]
        await cleared(cache, operations, model_name="llama", weight_version="41")
        assert (len(none.chunks), len(old.chunks), len(new.chunks)) == (held[0], 0, held[2])
        await cleared(cache, operations, model_name="llama", kept_weight_version="42")
        assert (len(none.chunks), len(old.chunks), len(new.chunks)) == (0, 0, held[2])
        for fields, why in (
            ({"model_name": "llama", "weight_version": "40"}, "registered are: 41, 42"),
            ({"model_name": "llama", "weight_version": "41", "kept_weight_version": "42"}, "exclude each other"),
            ({"all": True, "weight_version": "41"}, "with a model"),
            ({"tokens": PROMPT, "model_name": "llama", "kept_weight_version": "42"}, "set model_name"),
        ):
            error = await refused(cache, **fields)
            assert (error.reason, why in str(error)) == ("BAD_SELECTION", True), error


async def test_a_prompt_of_an_adapter_is_cleared_by_the_adapters_name(make: Make, cache: Any, operations: Any) -> None:
    of_adapter = keys_of(PROMPT, lora="adapter@1")
    async with make("a", [*KEYS, *of_adapter], served={"adapter": "adapter@1"}) as a:
        assert (await cleared(cache, operations, tokens=PROMPT, model_name="adapter")).chunk_count == 3
        assert list(a.chunks) == KEYS
        error = await refused(cache, model_name="adapter")
        assert (error.reason, list(a.chunks)) == ("BAD_SELECTION", KEYS), "its chunks are known by tokens only"
        assert (await cleared(cache, operations, model_name="llama")).chunk_count == 3


async def test_tokens_select_nothing_else_while_no_engine_has_registered(cache: Any) -> None:
    error = await refused(cache, tokens=PROMPT)
    assert (error.reason, "no engine has registered yet" in str(error)) == ("MODEL_NOT_FOUND", True)


async def test_a_prompt_a_model_and_all_exclude_each_other(make: Make, cache: Any) -> None:
    async with make("a", KEYS) as a:
        for prompt in (by_tokens(PROMPT), by_keys(KEYS)):
            for more in ({"all": True}, {"model_name": "llama"}):
                error = await refused(cache, prompt=prompt, **more)
                assert (error.reason, "exclude each other" in str(error)) == ("BAD_SELECTION", True)
        error = await refused(cache, prompt=by_tokens([], model_name="llama"))  # names a model, and no chunk
        assert (error.reason, "nothing is selected" in str(error)) == ("BAD_SELECTION", True)
        assert len(a.chunks) == len(KEYS)


async def test_keys_with_a_fingerprint_are_those_of_that_spec_only(make: Make, cache: Any, operations: Any) -> None:
    async with make("a", KEYS) as a:
        error = await refused(cache, prompt=by_keys(KEYS, fingerprint=bytes(16)))
        assert (error.reason, bytes(16).hex() in str(error)) == ("MODEL_NOT_FOUND", True)
        assert len(a.chunks) == len(KEYS)
        result = await cleared(cache, operations, prompt=by_keys(KEYS[:1], fingerprint=LLAMA.fingerprint))
        assert (result.chunk_count, len(a.chunks)) == (1, len(KEYS) - 1)


async def test_pinned_chunks_stay_and_are_named(make: Make, cache: Any, operations: Any) -> None:
    async with make("a", CHUNKS) as a:
        await cache.Pin(PinRequest(prompt=by_tokens(PROMPT[:16]), position=Position(instance_id="a")), timeout=60)
        result = await cleared(cache, operations, tokens=PROMPT)
        assert result.chunk_count == 2
        (failure,) = result.failures
        assert failure.instance_id == "a"
        assert failure.failures[0].chunk_keys == [KEYS[0]]
        assert from_status(failure.failures[0].status).reason == "CHUNK_PINNED"
        assert list(a.chunks) == KEYS[:1]


async def test_pinned_chunks_outside_the_request_are_counted(make: Make, cache: Any, operations: Any) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS):
        for instance_id, length in (("a", 16), ("b", 32)):
            await cache.Pin(
                PinRequest(prompt=by_tokens(PROMPT[:length]), position=Position(instance_id=instance_id)), timeout=60
            )
        result = await cleared(cache, operations, all=True)
        assert (result.chunk_count, result.pinned_chunk_count) == (2 * len(CHUNKS) - 3, 3)
        assert not result.failures


async def test_an_instance_that_dies_meanwhile_is_named_and_the_others_are_cleared(
    make: Make, cache: Any, operations: Any
) -> None:
    b = make("b", CHUNKS)
    await b.join()
    b.going.clear()
    async with make("a", CHUNKS) as a:
        operation = await cache.Clear(ClearRequest(all=True, request_id="once"), timeout=60)
        await until(lambda: not a.chunks)
        await b.leave()
        successor = make("b")
        await successor.join()
        result = await cleared(cache, operations, all=True, request_id="once")
        assert result.chunk_count == 3
        assert [failure.instance_id for failure in result.failures] == ["b"]
        found = await operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name), timeout=60)
        progress = unpacked(found.metadata, ClearProgress)
        assert (progress.instance_count, progress.done_instance_count) == (2, 2)
        assert (progress.instance_id, progress.dry_run) == ("", False)
        assert progress.end_time.ToNanoseconds() > progress.create_time.ToNanoseconds()
        await successor.leave()


async def test_what_cannot_begin_says_why(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS, LLAMA):
        assert (await refused(cache)).reason == "BAD_SELECTION"
        assert (await refused(cache, instance_id="a")).reason == "BAD_SELECTION"
        assert "'unknown'" in str(await refused(cache, instance_id="unknown", all=True))
        assert (await refused(cache, model_name="gpt")).reason == "MODEL_NOT_FOUND"
        error = await refused(cache, all=True, tier="DISK")
        assert (error.reason, str(error)) == (
            "BAD_SELECTION",
            "tier: 'DISK' is no tier; known tiers are gpu, host, disk, remote",
        )
        assert (await refused(cache, tokens=[-3])).reason == "BAD_TOKENS"


async def test_an_empty_fleet_has_nothing_to_clear(cache: Any, operations: Any) -> None:
    assert (await cleared(cache, operations, all=True)).chunk_count == 0


async def test_a_clear_of_all_waits_for_those_that_have_yet_to_register(
    make: Make, cache: Any, operations: Any, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clears, "SETTLE_SECONDS", WAIT_SECONDS)
    async with make("a", KEYS) as a:
        operation = await cache.Clear(ClearRequest(all=True), timeout=60)
        await until(lambda: not a.chunks)
        async with make("b", KEYS) as b:
            await until(lambda: not b.chunks)
            coordinator.tenants.unnamed.core._complete_time = 0.0  # a lease after the start, all have registered
            ended = await wait_for_operation(operations, operation.name)
        assert unpacked(ended.response, ClearResult).chunk_count == 2 * len(KEYS)
        assert unpacked(ended.metadata, ClearProgress).done_instance_count == 2


async def test_a_node_ends_no_order_of_another_node_and_starts_nothing(
    make: Make, cache: Any, operations: Any, coordinator: Coordinator
) -> None:
    async with make("a", KEYS) as a, make("evil", KEYS) as evil:
        a.going.clear()
        operation = await cache.Clear(ClearRequest(instance_id="a", all=True), timeout=60)
        await until(lambda: bool(a.orders))
        before = coordinator.tenants.unnamed.reports.report_count
        forged = [pb.OrderOutcome(order_id=name, chunk_count=99) for name in (a.orders[0].order_id, operation.name)]
        await evil.report_outcomes(forged)
        # As earlier versions reported that another coordinator's clear has no owner: the field has another type now.
        await evil.report_bytes(b"\x6a\x20" + b"an orphaned record of an operation"[:32])
        await until(lambda: coordinator.tenants.unnamed.reports.report_count >= before + 2)
        found = await operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name), timeout=60)
        assert not found.done
        a.going.set()
        ended = await wait_for_operation(operations, operation.name)
        assert unpacked(ended.response, ClearResult).chunk_count == len(KEYS)
        assert list(evil.chunks) == KEYS
        listed = await operations.ListOperations(operations_pb2.ListOperationsRequest(), timeout=60)
        assert [one.name for one in listed.operations] == [operation.name]
