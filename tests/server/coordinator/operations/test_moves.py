"""Moves and copies over a socket: what arrives, what is dropped when, and where chunks are whatever fails."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError
from lmkv.internal.v1.report_service_pb2 import Order
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_tokens
from lmkv.tiers import DISK, REMOTE, format_position
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import LookupRequest, MoveProgress, MoveRequest, MoveResult, PinRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import moves
from tests.server.coordinator.cases import CHUNKS, KEYS, LLAMA_FLOAT, PROMPT, keys_of
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, unpacked, until
from tests.support.node_stub import registration
from tests.support.operations import wait_for_operation
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA


class Asker:
    """Moves chunks between instances named `a` and `b`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.cache: Any = CacheServiceStub(channel)
        self.operations: Any = operations_pb2_grpc.OperationsStub(channel)

    async def start(self, source: str = "a", destination: str = "b", **fields: Any) -> operations_pb2.Operation:
        """Begins a move of the prompt, unless the fields name something else."""
        if "chunk_keys" not in fields:
            fields.setdefault("tokens", PROMPT)
        ends = {"old_position": Position(instance_id=source), "new_position": Position(instance_id=destination)}
        request = MoveRequest(**with_prompt(**ends, **fields))
        operation: operations_pb2.Operation = await self.cache.Move(request, timeout=60)
        return operation

    async def finish(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """The operation once it is over."""
        return await wait_for_operation(self.operations, operation.name)

    async def move(self, *ends: str, **fields: Any) -> MoveResult:
        """A move from beginning to end, which must do something."""
        ended = await self.finish(await self.start(*ends, **fields))
        assert not ended.HasField("error"), ended.error.message
        result: MoveResult = unpacked(ended.response, MoveResult)
        return result

    async def failure(self, *ends: str, **fields: Any) -> LmkvError:
        """Why a move did nothing."""
        ended = await self.finish(await self.start(*ends, **fields))
        assert ended.HasField("error")
        return from_status(ended.error)

    async def refusal(self, *ends: str, **fields: Any) -> LmkvError:
        """Why a move did not begin."""
        with pytest.raises(grpc.RpcError) as caught:
            await self.start(*ends, **fields)
        return from_rpc_error(caught.value)

    async def holders(self) -> dict[str, int]:
        """Who holds how many tokens of the prompt."""
        response = await self.cache.Lookup(LookupRequest(prompt=by_tokens(PROMPT)), timeout=60)
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}


@pytest.fixture
def asker(channel: grpc.aio.Channel) -> Asker:
    return Asker(channel)


async def test_a_move_takes_a_prompt_from_one_instance_to_the_other(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        operation = await asker.start()
        assert operation.name.startswith("move-")
        booked = unpacked(operation.metadata, MoveProgress)
        assert (booked.chunk_count, booked.token_count) == (3, 40)
        assert format_position(booked.old_position) == "a/host"
        assert format_position(booked.new_position) == "b/host"
        assert not booked.HasField("end_time")
        ended = await asker.finish(operation)
        result = unpacked(ended.response, MoveResult)
        assert (result.chunk_count, result.token_count, result.transferred_bytes) == (3, 40, 3000)
        progress = unpacked(ended.metadata, MoveProgress)
        assert progress.transferred_bytes == 3000
        assert progress.end_time.ToNanoseconds() >= progress.create_time.ToNanoseconds()
        assert (result.dropped_chunk_count, list(result.failures)) == (3, [])
        assert (a.chunks, b.chunks) == ({}, CHUNKS)
        assert await asker.holders() == {"b": 40}


async def test_a_prompt_of_an_adapter_is_moved_by_the_adapters_name(make: Make, asker: Asker) -> None:
    of_adapter = keys_of(PROMPT, lora="adapter@1")
    async with make("a", [*of_adapter, *KEYS], served={"adapter": "adapter@1"}) as a, make("b") as b:
        assert (await asker.move(model_name="adapter")).chunk_count == 3
        assert (list(a.chunks), list(b.chunks)) == (KEYS, of_adapter)


async def test_of_several_specs_of_a_model_the_one_that_the_source_holds_is_moved(make: Make, asker: Asker) -> None:
    of_float = dict(zip(keys_of(PROMPT, LLAMA_FLOAT), (16, 16, 8), strict=True))
    async with make("first", CHUNKS), make("a", of_float, LLAMA_FLOAT) as a, make("b", spec=LLAMA_FLOAT) as b:
        assert (await asker.move(model_name=LLAMA.model_name)).chunk_count == 3
        assert (a.chunks, b.chunks) == ({}, of_float)


async def test_a_copy_leaves_the_source_as_it_is(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        operation = await asker.start(copy=True)
        assert operation.name.startswith("copy-")
        result = unpacked((await asker.finish(operation)).response, MoveResult)
        assert (result.chunk_count, result.dropped_chunk_count) == (3, 0)
        assert a.chunks == b.chunks == CHUNKS
        assert await asker.holders() == {"a": 40, "b": 40}


async def test_the_source_drops_only_chunks_that_have_arrived(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.limit = 2

        def see(_: ScriptedInstance, order: Order) -> None:
            assert order.drop.chunk_keys == join_keys(KEYS[:2])
            assert list(b.chunks) == KEYS[:2]

        a.before = see
        result = await asker.move()
        assert (result.chunk_count, result.dropped_chunk_count) == (2, 2)
        (failure,) = result.failures
        assert failure.chunk_keys == [KEYS[2]]
        assert list(a.chunks) == KEYS[2:]


async def test_what_the_destination_has_already_is_only_dropped_at_the_source(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b", CHUNKS):
        result = await asker.move()
        assert (result.chunk_count, result.transferred_bytes, result.dropped_chunk_count) == (3, 0, 3)
        assert a.chunks == {}


async def test_what_the_source_lost_meanwhile_is_named(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.before = lambda *_: a.chunks.pop(KEYS[1], None)  # type: ignore[assignment]
        result = await asker.move()
        assert (result.chunk_count, result.dropped_chunk_count) == (2, 2)
        assert [failure.chunk_keys for failure in result.failures] == [[KEYS[1]]]
        assert from_status(result.failures[0].status).reason == "CHUNK_NOT_FOUND"


async def test_a_prompt_that_is_held_in_part_moves_in_part(make: Make, asker: Asker) -> None:
    async with make("a", KEYS[:2]), make("b"):
        result = await asker.move()
        assert (result.chunk_count, result.token_count, list(result.failures)) == (2, 32, [])


async def test_a_key_that_the_source_does_not_hold_is_a_failure(make: Make, asker: Asker) -> None:
    async with make("a", KEYS[:1]), make("b"):
        result = await asker.move(chunk_keys=join_keys(KEYS[:2]))
        assert result.chunk_count == 1
        assert [failure.chunk_keys for failure in result.failures] == [[KEYS[1]]]
        error = await asker.failure(chunk_keys=bytes(32))
        assert error.reason == "CHUNK_NOT_FOUND"


async def test_a_key_that_is_named_twice_moves_once(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        result = await asker.move(chunk_keys=join_keys([KEYS[1], KEYS[0], KEYS[1]]))
        assert (result.chunk_count, result.dropped_chunk_count, list(result.failures)) == (2, 2, [])
        assert (list(a.chunks), list(b.chunks)) == (KEYS[2:], [KEYS[1], KEYS[0]])


async def test_a_pinned_chunk_arrives_and_stays(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        pin = PinRequest(prompt=by_tokens(PROMPT[:16]), position=Position(instance_id="a"))
        await asker.cache.Pin(pin, timeout=60)
        result = await asker.move()
        assert (result.chunk_count, result.dropped_chunk_count) == (3, 2)
        assert [from_status(failure.status).reason for failure in result.failures] == ["CHUNK_PINNED"]
        assert list(a.chunks) == KEYS[:1]
        assert b.chunks == CHUNKS


async def test_a_repeat_of_a_request_id_is_the_same_operation(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.going.clear()
        first = await asker.start(request_id="once")
        assert (await asker.start(request_id="once")).name == first.name
        b.going.set()
        await asker.finish(first)
        assert (await asker.start(request_id="once")).done
        assert sum(order.HasField("fetch") for order in b.orders) == 1
        error = await asker.refusal("b", "a", request_id="once")
        assert error.reason == "BAD_SELECTION"
        assert not a.chunks


async def test_what_cannot_begin_says_why(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS), make("b"), make("other", spec=LLAMA_FLOAT):
        assert "'unknown'" in str(await asker.refusal("unknown", "b"))
        assert (await asker.refusal("a", "unknown")).reason == "INSTANCE_NOT_FOUND"
        assert (await asker.refusal("a", "a")).reason == "BAD_SELECTION"
        assert (await asker.refusal(tokens=[])).reason == "BAD_SELECTION"
        assert (await asker.refusal(chunk_keys=b"short")).reason == "BAD_CHUNK_KEY"
        assert (await asker.refusal(model_name="gpt")).reason == "MODEL_NOT_FOUND"
        assert (await asker.refusal("a", "other", model_name="llama")).reason == "KV_SPEC_MISMATCH"
        for tier, reason, message in (
            (DISK, "TIER_UNSUPPORTED", "new_position: instance 'b' has no chunks of its own in 'disk'; use host"),
            (REMOTE, "TIER_UNSUPPORTED", "new_position: instance 'b' has no chunks of its own in 'remote'; use host"),
            ("TIER_HOST", "BAD_SELECTION", "new_position: 'TIER_HOST' is no tier; known tiers are gpu, host, disk"),
        ):
            there = Position(instance_id="b", tier=tier)
            request = MoveRequest(prompt=by_tokens(PROMPT), old_position=Position(instance_id="a"), new_position=there)
            with pytest.raises(grpc.RpcError) as caught:
                await asker.cache.Move(request, timeout=60)
            assert (from_rpc_error(caught.value).reason, message in str(caught.value)) == (reason, True)


async def test_a_destination_that_dies_fails_the_move_and_costs_no_chunk(
    make: Make, asker: Asker, registry: Any
) -> None:
    async with make("a", CHUNKS) as a:
        b = make("b")
        b.going.clear()
        await b.join()
        operation = await asker.start()
        await b.leave()
        c = make("b")  # the next process of this id
        await c.join()
        ended = await asker.finish(operation)
        assert from_status(ended.error).reason == "INSTANCE_NOT_FOUND"
        assert a.chunks == CHUNKS
        await c.leave()


async def test_a_source_that_dies_before_the_drop_is_named(make: Make, asker: Asker) -> None:
    a = make("a", CHUNKS)
    await a.join()
    a.going.clear()
    async with make("b") as b:
        operation = await asker.start()
        await until(lambda: any(order.HasField("drop") for order in a.orders))
        await a.leave()
        successor = make("a")
        await successor.join()
        result = unpacked((await asker.finish(operation)).response, MoveResult)
        assert (result.chunk_count, result.dropped_chunk_count) == (3, 0)
        assert [from_status(failure.status).reason for failure in result.failures] == ["INSTANCE_NOT_FOUND"]
        assert b.chunks == CHUNKS
        await successor.leave()


async def test_an_order_is_sent_again_after_a_broken_stream(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.going.clear()
        operation = await asker.start()
        await until(lambda: bool(b.orders))
        await b.leave()
        await b.join()
        b.going.set()
        result = unpacked((await asker.finish(operation)).response, MoveResult)
        assert result.chunk_count == 3
        first, *repeats = [order for order in b.orders if order.HasField("fetch")]
        assert repeats == [first]
        assert a.chunks == {}


async def test_a_move_that_is_cancelled_stops_and_loses_nothing(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b") as b:
        b.going.clear()
        operation = await asker.start()
        await until(lambda: bool(b.orders))
        await asker.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)
        ended = await asker.finish(operation)
        assert from_status(ended.error).reason == "OPERATION_CANCELLED"
        assert a.chunks == CHUNKS
        await asker.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)


async def test_a_cancel_between_two_batches_leaves_whole_chunks(
    make: Make, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "BATCH_CHUNKS", 1)
    async with make("a", CHUNKS) as a, make("b") as b:

        def stop(_: ScriptedInstance, order: Order) -> None:
            if order.HasField("fetch") and order.fetch.chunk_keys == KEYS[1]:
                b.going.clear()

        b.before = stop
        operation = await asker.start()
        await until(lambda: not b.going.is_set())
        await asker.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name), timeout=60)
        ended = await asker.finish(operation)
        progress = unpacked(ended.metadata, MoveProgress)
        assert a.chunks | b.chunks == CHUNKS
        assert progress.done_chunk_count == len(b.chunks)


async def test_two_moves_that_swap_a_chunk_do_not_both_drop_it(make: Make, asker: Asker) -> None:
    async with make("a", CHUNKS) as a, make("b", CHUNKS) as b:
        a.going.clear()
        b.going.clear()
        there = await asker.start("a", "b")
        back = await asker.start("b", "a")
        a.going.set()
        b.going.set()
        await asyncio.gather(asker.finish(there), asker.finish(back))
        assert a.chunks | b.chunks == CHUNKS


async def test_two_coordinators_that_swap_a_chunk_do_not_both_drop_it(make: Make, asker: Asker) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=30.0, cluster_secret="hush"))
        )
        channel = await stack.enter_async_context(rpc.open_channel(other.address))
        here = [await stack.enter_async_context(make(name, CHUNKS)) for name in "ab"]
        there: list[ScriptedInstance] = []
        fleet: dict[str, ScriptedInstance] = {}
        for one in here:
            same = ScriptedInstance(channel, fleet, one.instance_id, LLAMA)
            same.epoch, same.chunks, same.arrivals = one.epoch, one.chunks, one.arrivals
            there.append(await stack.enter_async_context(same))

        def hold_drops(instance: ScriptedInstance, order: Order) -> None:
            if order.HasField("drop"):
                instance.going.clear()

        (a, _), (_, b) = here, there
        a.before = b.before = hold_drops
        elsewhere = Asker(channel)
        to, fro = await asker.start("a", "b"), await elsewhere.start("b", "a")
        await until(
            lambda: any(one.HasField("drop") for one in a.orders) and any(one.HasField("drop") for one in b.orders)
        )
        a.going.set()
        b.going.set()
        ended = [await asker.finish(to), await elsewhere.finish(fro)]
        assert a.chunks == b.chunks == CHUNKS, "each has seen the copy of the other one"
        for one in ended:
            result = unpacked(one.response, MoveResult)
            assert (result.chunk_count, result.dropped_chunk_count) == (3, 0)
            assert {from_status(failure.status).reason for failure in result.failures} == {"CHUNK_ARRIVED"}


async def test_a_move_that_waits_too_long_for_another_of_the_same_chunks_moves_nothing(
    make: Make, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make("a", CHUNKS) as a, make("b"):
        a.before = lambda instance, order: instance.going.clear() if order.HasField("drop") else None
        first = await asker.start("a", "b")
        await until(lambda: any(one.HasField("drop") for one in a.orders))
        monkeypatch.setattr(moves, "TIMEOUT_SECONDS", 0.0)
        late = await asker.finish(await asker.start("a", "b"))
        assert "waited too long for other moves of the same chunks" in late.error.message
        a.going.set()
        assert unpacked((await asker.finish(first)).response, MoveResult).dropped_chunk_count == 3


async def test_what_only_the_destination_holds_counts_as_done(make: Make, asker: Asker) -> None:
    async with make("a", KEYS[1:]) as a, make("b", dict(list(CHUNKS.items())[:1])) as b:
        result = await asker.move()
        assert (result.chunk_count, result.token_count, result.dropped_chunk_count) == (3, 40, 2)
        assert result.arrived_before_chunk_count == 1
        assert (a.chunks, set(b.chunks)) == ({}, set(KEYS))
        again = await asker.move()
        assert (again.chunk_count, again.arrived_before_chunk_count, again.dropped_chunk_count) == (3, 3, 0)


async def test_an_instance_that_has_yet_to_report_what_it_holds_is_not_moved_from(
    make: Make, asker: Asker, registry: Any
) -> None:
    async with make("b"):
        instance = pb.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000", specs=[LLAMA.to_proto()])
        await registry.Register(registration(instance), timeout=60)
        error = await asker.refusal()
        assert error.reason == "UNREACHABLE"
        assert "instance 'a' has not reported what it holds yet" in str(error)


@given(
    held=st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=3),
    acts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 6)), max_size=6
    ),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_moves_where_no_chunk_is_lost(
    held: list[set[int]], acts: list[tuple[int, int, bool, bool, int]]
) -> None:
    keys = [ChunkKey(bytes([index]) * 16) for index in range(6)]
    fleet: dict[str, ScriptedInstance] = {}
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        asker = Asker(channel)
        instances = [
            ScriptedInstance(channel, fleet, str(number), LLAMA, [keys[index] for index in sorted(chunks)])
            for number, chunks in enumerate(held)
        ]
        for instance in instances:
            await instance.join()
        running = []
        for source, destination, copy, cancel, limit in acts:
            if source == destination:
                continue
            instances[destination].limit = limit
            operation = await asker.start(str(source), str(destination), chunk_keys=join_keys(keys), copy=copy)
            running.append(operation)
            if cancel:
                await asker.operations.CancelOperation(
                    operations_pb2.CancelOperationRequest(name=operation.name), timeout=60
                )
        for operation in running:
            await asker.finish(operation)
        still = {key for instance in instances for key in instance.chunks}
        assert still == {keys[index] for chunks in held for index in chunks}
        for instance in instances:
            await instance.leave()
