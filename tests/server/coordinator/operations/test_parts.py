"""Moves, pins, clears and drains of prompts whose chunks have several parts, over a socket."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from lmkv.errors import ChunkNotFound, LmkvError
from lmkv.internal.v1.report_service_pb2 import Order
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    ClearResult,
    DrainRequest,
    DrainResult,
    LookupRequest,
    MoveProgress,
    MoveRequest,
    MoveResult,
    PinRequest,
)
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import PinnedChunks, Position
from lmkv_server.coordinator.operations import drains
from tests.server.coordinator.cases import HYBRID, MISTRAL, keys_of
from tests.server.coordinator.parted import FULL, KEYS, PROMPT, STATE, WINDOW, item, items
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance, unpacked
from tests.support.operations import wait_for_operation
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA

ITEMS = items(4)
OLDER = [item(WINDOW, 0), item(WINDOW, 1), item(STATE, 1)]
"""Items of the prompt that the hit of all its chunks does not need."""
ALL = [*ITEMS, *OLDER]


class Operator:
    """Calls the coordinator and waits for operations."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.cache: Any = CacheServiceStub(channel)
        self.operations: Any = operations_pb2_grpc.OperationsStub(channel)

    async def ended(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        return await wait_for_operation(self.operations, operation.name)

    async def start_move(self, keys: list[ChunkKey] | None = None, **fields: Any) -> operations_pb2.Operation:
        named: dict[str, Any] = {"chunk_keys": join_keys(keys)} if keys else {"tokens": PROMPT}
        ends = {"old_position": Position(instance_id="a"), "new_position": Position(instance_id="b")}
        request = MoveRequest(**with_prompt(**named, **ends, **fields))
        operation: operations_pb2.Operation = await self.cache.Move(request, timeout=60)
        return operation

    async def move(self, keys: list[ChunkKey] | None = None, **fields: Any) -> MoveResult:
        over = await self.ended(await self.start_move(keys, **fields))
        assert not over.HasField("error"), over.error.message
        result: MoveResult = unpacked(over.response, MoveResult)
        return result

    async def clear(self, keys: list[ChunkKey] | None = None, **fields: Any) -> ClearResult:
        named: dict[str, Any] = {"chunk_keys": join_keys(keys)} if keys else {"tokens": PROMPT}
        over = await self.ended(await self.cache.Clear(ClearRequest(**with_prompt(**(named | fields))), timeout=60))
        assert not over.HasField("error"), over.error.message
        result: ClearResult = unpacked(over.response, ClearResult)
        return result

    async def pin(self, keys: list[ChunkKey] | None = None) -> PinnedChunks:
        named: dict[str, Any] = {"chunk_keys": join_keys(keys)} if keys else {"tokens": PROMPT}
        pinned: PinnedChunks = (
            await self.cache.Pin(PinRequest(position=Position(instance_id="a"), **with_prompt(**named)), timeout=60)
        ).pin
        return pinned

    async def found(self, model_name: str = "") -> dict[str, int]:
        response = await self.cache.Lookup(LookupRequest(prompt=by_tokens(PROMPT, model_name=model_name)), timeout=60)
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}


@pytest.fixture
def operator(channel: grpc.aio.Channel) -> Operator:
    return Operator(channel)


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_a_move_takes_what_the_hit_needs(make: Make, operator: Operator, keys: list[ChunkKey] | None) -> None:
    async with make("a", ALL, HYBRID) as a, make("b", spec=HYBRID) as b:
        operation = await operator.start_move(keys)
        progress = unpacked(operation.metadata, MoveProgress)
        assert (progress.chunk_count, progress.token_count) == (len(ITEMS), 64)
        result = unpacked((await operator.ended(operation)).response, MoveResult)
        assert (result.chunk_count, result.dropped_chunk_count) == (len(ITEMS), len(ITEMS))
        assert (result.token_count, list(result.failures)) == (64, [])
        assert (list(a.chunks), list(b.chunks)) == (OLDER, ITEMS)
        assert await operator.found() == {"b": 64}


async def test_a_copy_leaves_the_source_as_it_is(make: Make, operator: Operator) -> None:
    async with make("a", ALL, HYBRID) as a, make("b", ITEMS[:2], HYBRID) as b:
        result = await operator.move(copy=True)
        assert (result.chunk_count, result.token_count, result.dropped_chunk_count) == (len(ITEMS), 64, 0)
        assert (list(a.chunks), list(b.chunks)) == (ALL, ITEMS)
        assert await operator.found() == {"a": 64, "b": 64}


async def test_a_hit_that_ends_earlier_is_moved_up_to_its_end(make: Make, operator: Operator) -> None:
    held = [*items(2), *KEYS[2:]]  # two more chunks of the full attention, but no state behind them
    async with make("a", held, HYBRID) as a, make("b", spec=HYBRID) as b:
        result = await operator.move(KEYS)
        (failure,) = result.failures
        assert failure.chunk_keys == KEYS[2:]
        assert isinstance(from_status(failure.status), ChunkNotFound)
        assert (result.chunk_count, result.token_count) == (len(items(2)), 32)
        assert (list(a.chunks), list(b.chunks)) == (KEYS[2:], items(2))


async def test_keys_without_a_hit_are_not_found(make: Make, operator: Operator) -> None:
    async with make("a", KEYS, HYBRID) as a, make("b", spec=HYBRID):
        over = await operator.ended(await operator.start_move(KEYS))
        assert isinstance(from_status(over.error), ChunkNotFound)
        assert list(a.chunks) == KEYS
        assert (await operator.move()).chunk_count == 0


async def test_a_move_that_found_no_room_counts_no_tokens_and_can_be_repeated(make: Make, operator: Operator) -> None:
    async with make("a", ITEMS, HYBRID) as a, make("b", spec=HYBRID) as b:
        b.limit = 5
        result = await operator.move()
        assert (result.chunk_count, result.token_count) == (5, 0)
        assert list(a.chunks) == ITEMS[5:]
        b.limit = len(ITEMS)
        assert await operator.found() == {}
        result = await operator.move()
        assert (result.chunk_count, result.token_count) == (len(ITEMS), 64), "what has arrived counts as done"
        assert await operator.found() == {"b": 64}


async def test_a_model_that_slides_in_all_layers_is_moved_without_its_first_chunks(
    make: Make, operator: Operator
) -> None:
    last = items(4, MISTRAL)
    async with make("a", last, MISTRAL) as a, make("b", spec=MISTRAL) as b:
        result = await operator.move(keys_of(PROMPT, MISTRAL)[:4])
        assert (result.chunk_count, result.token_count) == (2, 64)
        assert (list(a.chunks), list(b.chunks)) == ([], last)
        assert await operator.found() == {"b": 64}


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_a_pin_covers_what_the_hit_needs(make: Make, operator: Operator, keys: list[ChunkKey] | None) -> None:
    async with make("a", ALL, HYBRID) as a:
        pinned = await operator.pin(keys)
        assert (pinned.chunk_count, pinned.token_count) == (len(ITEMS), 64)
        assert list(a.pinned.values()) == [ITEMS]


async def test_a_pin_without_a_hit_is_refused(make: Make, operator: Operator) -> None:
    async with make("a", ITEMS[:-1], HYBRID) as a:
        with pytest.raises(grpc.RpcError) as caught:
            await operator.pin()
        error: LmkvError = from_rpc_error(caught.value)
        assert isinstance(error, ChunkNotFound)
        assert a.orders == []


async def test_tokens_that_the_pin_could_not_cover_do_not_count(make: Make, operator: Operator) -> None:
    async with make("a", ITEMS, HYBRID) as a:

        def lose_the_last(instance: ScriptedInstance, _: Order) -> None:
            instance.chunks.pop(ITEMS[-1], None)

        a.before = lose_the_last
        pinned = await operator.pin()
        assert (pinned.chunk_count, pinned.token_count) == (len(ITEMS) - 1, 0)


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_a_clear_drops_all_parts_of_all_chunks(
    make: Make, operator: Operator, keys: list[ChunkKey] | None
) -> None:
    other = keys_of(PROMPT)[:1]
    async with make("a", ALL, HYBRID) as a, make("b", items(2), HYBRID) as b, make("c", other, LLAMA) as c:
        fields = {} if keys else {"model_name": HYBRID.model_name}
        dry = await operator.clear(keys, dry_run=True, **fields)
        result = await operator.clear(keys, **fields)
        assert dry == result
        assert (result.chunk_count, result.token_count) == (len(ALL) + len(items(2)), 64 + 32)
        assert (a.chunks, b.chunks, list(c.chunks)) == ({}, {}, other)


async def test_a_prompt_shorter_than_a_chunk_clears_nothing(make: Make, operator: Operator) -> None:
    async with make("a", ALL, HYBRID) as a:
        result = await operator.clear(tokens=PROMPT[:10], model_name=HYBRID.model_name)
        assert result.chunk_count == 0
        assert list(a.chunks) == ALL


async def test_a_drain_copies_all_parts(make: Make, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)  # scripted instances report nothing by themselves
    async with make("a", ALL, HYBRID), make("b", [item(FULL, 0)], HYBRID) as b:
        over = await operator.ended(await operator.cache.Drain(DrainRequest(instance_id="a"), timeout=60))
        result = unpacked(over.response, DrainResult)
        assert (result.chunk_count, result.remaining_chunk_count) == (len(ALL) - 1, 0)
        assert set(b.chunks) == set(ALL)
        assert await operator.found() == {"a": 64, "b": 64}
