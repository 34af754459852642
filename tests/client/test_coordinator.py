"""The SDK against a real coordinator and instances that obey it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import (
    BadChunkKey,
    BadRequest,
    BadTokens,
    ChunkNotFound,
    InstanceNotFound,
    LmkvError,
    OperationCancelled,
    OperationNotFound,
    Unreachable,
)
from lmkv.keys import ChunkKey
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.rpc.messages import by_keys
from lmkv.tiers import HOST, format_position
from lmkv.v1 import registry_service_pb2
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.chunk_pb2 import Position
from lmkv_client import Coordinator, MoveOperation
from lmkv_client.chunks import MAX_REQUEST_BYTES
from lmkv_client.operation import RetryDeadline
from tests.client.conftest import Fleet
from tests.server.coordinator.cases import KEYS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance, until
from tests.support.node_stub import NodeStub, registration
from tests.support.specs import LLAMA


@pytest.fixture
async def coordinator(fleet: Fleet) -> AsyncIterator[Coordinator]:
    async with Coordinator(fleet.address) as opened:
        yield opened


async def holders(coordinator: Coordinator) -> dict[str, int]:
    answer = await coordinator.lookup(PROMPT)
    return {holder.instance_id: holder.matched_token_count for holder in answer.holders}


async def test_a_prompt_is_looked_up_by_tokens_or_by_keys(coordinator: Coordinator) -> None:
    by_tokens = await coordinator.lookup(PROMPT, model_name="llama")
    by_keys = await coordinator.lookup(keys=KEYS)
    assert [holder.instance_id for holder in by_tokens.holders] == ["a"]
    assert by_tokens.holders[0].matched_token_count == len(PROMPT)
    assert by_keys.holders == by_tokens.holders
    assert (await coordinator.lookup(PROMPT, cache_salt="another")).holders == []


async def test_a_move_ends_with_what_it_did(coordinator: Coordinator) -> None:
    move = await coordinator.move(PROMPT, source="a", destination=Position(instance_id="b", tier=HOST))
    assert (move.kind, move.progress.chunk_count, move.progress.token_count) == ("move", 3, 40)
    result = await move.wait(60)
    assert (result.chunk_count, result.token_count, result.dropped_chunk_count) == (3, 40, 3)
    assert (move.done, move.state, move.error, move.result) == (True, "done", None, result)
    assert await holders(coordinator) == {"b": 40}
    assert await move.wait(60) == result  # again


async def test_a_copy_leaves_the_source_as_it_was(coordinator: Coordinator) -> None:
    copy = await coordinator.copy(keys=KEYS[:2], source="a", destination="b/host")
    assert copy.kind == "copy"
    assert (await copy.wait(60)).dropped_chunk_count == 0
    assert await holders(coordinator) == {"a": 40, "b": 32}


async def test_an_order_repeated_by_its_request_id_is_carried_out_once(coordinator: Coordinator) -> None:
    request_id = str(uuid.uuid4())
    moves = [await coordinator.move(PROMPT, source="a", destination="b", request_id=request_id) for _ in range(2)]
    assert moves[0].name == moves[1].name
    other = await coordinator.copy(PROMPT, source="a", destination="b")
    assert other.name != moves[0].name


async def test_a_move_to_an_instance_that_has_yet_to_report_starts_once_it_has(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rpc.open_channel(fleet.address) as channel, Coordinator(fleet.address) as coordinator:
        c = await registered(channel, ScriptedInstance(channel, {"a": fleet.a}, "c", LLAMA))
        waited = []

        async def report(_: RetryDeadline, error: LmkvError) -> None:
            waited.append(str(error))
            await c.join()

        monkeypatch.setattr(RetryDeadline, "wait_to_retry", report)
        move = await coordinator.move(PROMPT, source="a", destination="c")
        monkeypatch.undo()
        assert (await move.wait()).chunk_count == 3
        assert waited == ["instance 'c' has not reported what it holds yet; retry shortly"]
        await c.leave()


async def test_a_move_to_an_instance_that_never_reports_is_refused_within_the_time_of_a_call(fleet: Fleet) -> None:
    async with rpc.open_channel(fleet.address) as channel, Coordinator(fleet.address, timeout_seconds=1) as coordinator:
        await registered(channel, ScriptedInstance(channel, {}, "c", LLAMA))
        with pytest.raises(Unreachable, match="has not reported"):
            await coordinator.move(PROMPT, source="a", destination="c")


async def registered(channel: grpc.aio.Channel, instance: ScriptedInstance) -> ScriptedInstance:
    """An instance that its coordinator knows, but not yet what it holds."""
    message = registry_service_pb2.Instance(
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        peer_address="127.0.0.1:7000",
        specs=[instance.spec.to_proto()],
    )
    node: Any = NodeStub(channel)
    await node.Register(registration(message), timeout=60)
    return instance


async def test_times_are_seconds_and_the_longest_ones_are_those_of_durations(
    coordinator: Coordinator, fleet: Fleet
) -> None:
    drain = await coordinator.drain("a", deadline_seconds=100.0)
    assert drain.progress
    lasts_seconds = drain.progress.expire_time.ToSeconds() - drain.progress.create_time.ToSeconds()
    assert 90 < lasts_seconds < 110
    await drain.cancel()
    await coordinator.hint("pin", PROMPT, instance="b", ttl_seconds=1e300)
    (order,) = [one for one in fleet.b.orders if one.HasField("hint")]
    assert order.hint.ttl.seconds > 0


async def start_paused(coordinator: Coordinator, fleet: Fleet) -> MoveOperation:
    fleet.pause()
    move = await coordinator.move(PROMPT, source="a", destination="b")
    await until(lambda: bool(fleet.b.orders))
    return move


async def test_waiting_too_long_leaves_the_operation_running(coordinator: Coordinator, fleet: Fleet) -> None:
    move = await start_paused(coordinator, fleet)
    with pytest.raises(TimeoutError, match=f"{move.name} is still running after 0.05 s"):
        await move.wait(0.05)
    assert (move.done, move.state, move.result) == (False, "running", None)
    fleet.resume()
    assert (await move.wait(60)).chunk_count == 3


async def test_a_cancelled_operation_raises_that_it_was(coordinator: Coordinator, fleet: Fleet) -> None:
    move = await start_paused(coordinator, fleet)
    await move.cancel()
    with pytest.raises(OperationCancelled):
        await move.wait(60)
    assert move.state == "cancelled"
    assert await holders(coordinator) == {"a": 40}


async def test_an_operation_that_does_nothing_raises_why(coordinator: Coordinator, fleet: Fleet) -> None:
    def forget(instance: object, order: object) -> None:
        fleet.a.chunks.clear()  # unheard of by the coordinator

    fleet.b.before = forget
    move = await coordinator.move(PROMPT, source="a", destination="b")
    with pytest.raises(ChunkNotFound, match="the peer does not hold it"):
        await move.wait(60)
    assert (move.state, move.result) == ("failed", None)


async def test_chunks_that_stay_behind_are_in_the_result(coordinator: Coordinator, fleet: Fleet) -> None:
    fleet.b.limit = 2
    result = await (await coordinator.move(PROMPT, source="a", destination="b")).wait(60)
    assert result.chunk_count == 2
    assert [failure.chunk_keys for failure in result.failures] == [[KEYS[2]]]


async def test_iteration_yields_progress_until_the_end(coordinator: Coordinator, fleet: Fleet) -> None:
    move = await start_paused(coordinator, fleet)
    done = []
    async for progress in move:
        done.append(progress.done_chunk_count)
        fleet.resume()
    assert done[0] == 0
    assert done[-1] == 3
    assert move.done


async def test_operations_are_listed_and_found_by_name(coordinator: Coordinator, fleet: Fleet) -> None:
    first = await coordinator.copy(PROMPT, source="a", destination="b")
    await first.wait(60)
    second = await start_paused(coordinator, fleet)
    assert [operation.name for operation in await coordinator.operations()] == [second.name, first.name]
    assert [operation.name for operation in await coordinator.operations(running=True)] == [second.name]
    found = await coordinator.operation(first.name)
    assert (found.name, found.state) == (first.name, "done")
    fleet.resume()
    await second.refresh()
    await second.wait(60)
    with pytest.raises(OperationNotFound):
        await coordinator.operation("move-nowhere")


async def test_pins_are_set_listed_and_ended(coordinator: Coordinator, fleet: Fleet) -> None:
    pin = await coordinator.pin(PROMPT, position="a/host", ttl_seconds=120.5)
    assert (pin.chunk_count, pin.token_count, format_position(pin.position)) == (3, 40, "a/host")
    (order,) = [order for order in fleet.a.orders if order.WhichOneof("action") == "pin"]
    assert order.pin.ttl.ToMilliseconds() == 120_500
    assert [one.pin_id for one in await coordinator.pins()] == [pin.pin_id]
    await coordinator.unpin(pin.pin_id)
    assert await coordinator.pins() == []
    await coordinator.unpin(pin.pin_id)  # idempotent


async def test_a_clear_forgets_what_is_named_after_saying_what_it_would(coordinator: Coordinator) -> None:
    would = await (await coordinator.clear(keys=KEYS[1:], dry_run=True)).wait(60)
    assert (would.chunk_count, would.token_count) == (2, 24)
    assert await holders(coordinator) == {"a": 40}
    done = await (await coordinator.clear(keys=KEYS[1:], instance_id="a", tier=HOST)).wait(60)
    assert done == would
    assert await holders(coordinator) == {"a": 16}
    everything = await coordinator.clear(everything=True)
    assert (everything.kind, (await everything.wait(60)).chunk_count) == ("clear", 1)
    assert everything.progress.done_instance_count == everything.progress.instance_count == 2


async def test_refusals_have_their_reason(coordinator: Coordinator) -> None:
    with pytest.raises(InstanceNotFound) as raised:
        await coordinator.move(PROMPT, source="a", destination="nowhere")
    assert (raised.value.reason, raised.value.metadata["instance_id"]) == ("INSTANCE_NOT_FOUND", "nowhere")
    with pytest.raises(BadRequest, match="write INSTANCE or INSTANCE/TIER"):
        await coordinator.move(PROMPT, source="a/", destination="b")
    with pytest.raises(BadTokens):
        await coordinator.pin([2**31], position="a")


async def test_a_stream_of_lookups_answers_each_its_own(coordinator: Coordinator) -> None:
    async with coordinator.lookup_stream() as stream:
        answers = await asyncio.gather(*(stream.lookup(PROMPT[:length]) for length in (16, 32, 40)))
        assert [answer.holders[0].matched_token_count for answer in answers] == [16, 32, 40]
        with pytest.raises(BadTokens):
            await stream.lookup([200_000])
        with pytest.raises(BadTokens, match="use one of the two"):
            await stream.lookup(PROMPT, keys=KEYS)
        with pytest.raises(BadRequest, match="cache_salt: keys contain it"):
            await stream.lookup(keys=KEYS, cache_salt="pepper")
        assert (await stream.lookup(keys=KEYS)).holders[0].matched_token_count == 40


LONG_QUESTIONS: list[tuple[type[LmkvError], str, dict[str, Any]]] = [
    (BadTokens, "tokens", {"tokens": [999] * (MAX_MESSAGE_BYTES // 4)}),
    (BadChunkKey, "chunk_keys", {"keys": KEYS[:1] * (MAX_MESSAGE_BYTES // 18 + 1)}),
    (BadRequest, "cache_salt", {"tokens": PROMPT, "cache_salt": "x" * MAX_MESSAGE_BYTES}),
]


@pytest.mark.parametrize(("kind", "field", "question"), LONG_QUESTIONS, ids=[field for _, field, _ in LONG_QUESTIONS])
async def test_a_question_that_is_longer_than_a_message_is_refused_alone(
    coordinator: Coordinator, kind: type[LmkvError], field: str, question: dict[str, Any]
) -> None:
    async with coordinator.lookup_stream() as stream:
        asked = asyncio.ensure_future(stream.lookup(PROMPT))
        for lookup in (stream.lookup, coordinator.lookup):
            with pytest.raises(kind, match=f"{field} has 1,048,.* limit of a request is 1,048,512") as raised:
                await lookup(**question)
            assert raised.value.metadata["field"] == field
        assert (await asked).holders[0].matched_token_count == 40


async def test_the_longest_question_that_may_be_sent_is_answered(coordinator: Coordinator) -> None:
    keys = [ChunkKey(bytes(16))] * (MAX_REQUEST_BYTES // 18 - 3)  # a key takes 18 bytes of a message
    async with coordinator.lookup_stream() as stream:
        rest = MAX_REQUEST_BYTES - LookupRequest(prompt=by_keys(keys)).ByteSize() - 2
        fingerprint = bytes(rest)
        assert LookupRequest(prompt=by_keys(keys, fingerprint=fingerprint)).ByteSize() == MAX_REQUEST_BYTES
        assert not (await stream.lookup(keys=keys, fingerprint=fingerprint)).holders


async def test_a_lookup_that_is_cancelled_leaves_the_stream_to_others(coordinator: Coordinator) -> None:
    async with coordinator.lookup_stream() as stream:
        given_up = asyncio.ensure_future(stream.lookup(PROMPT))
        kept = asyncio.ensure_future(stream.lookup(PROMPT[:16]))
        await asyncio.sleep(0)  # both are on their way
        given_up.cancel()
        assert (await kept).holders[0].matched_token_count == 16
        assert given_up.cancelled()


async def test_a_lookup_stream_that_is_left_fails_lookups_in_flight(coordinator: Coordinator) -> None:
    async with coordinator.lookup_stream() as stream:
        await stream.lookup(PROMPT)
        pending = asyncio.ensure_future(stream.lookup(PROMPT))
        await asyncio.sleep(0)  # it is on its way
    with pytest.raises(Unreachable):
        await pending
    await stream.aclose()  # closing twice is fine


async def test_a_lookup_stream_says_which_coordinator_does_not_respond() -> None:
    async with Coordinator("127.0.0.1:1", timeout_seconds=5) as coordinator, coordinator.lookup_stream() as stream:
        with pytest.raises(Unreachable, match=r"no coordinator responds at 127\.0\.0\.1:1"):
            await stream.lookup(PROMPT)


async def test_a_watcher_gets_what_is_held_and_then_every_change(coordinator: Coordinator, fleet: Fleet) -> None:
    known: dict[str, set[bytes]] = {}
    updates = coordinator.watch()
    revision = 0
    async for update in updates:
        if update.reset:
            known.clear()
        for change in update.changes:
            held = known.setdefault(change.instance_id, set())
            if change.instance_gone:
                held.clear()
            held |= set(change.admitted_keys)
            held -= set(change.evicted_keys)
        if not update.snapshot and not revision:
            revision = update.revision
            assert known == {"a": set(KEYS)}
            await fleet.a.evict(KEYS[2:])
        elif revision and known["a"] == set(KEYS[:2]):
            break
    await updates.aclose()
    later = coordinator.watch(revision)
    again = await anext(later)
    assert (again.reset, again.snapshot) == (False, False)
    assert [change.evicted_keys for change in again.changes] == [KEYS[2:]]
    await later.aclose()


async def test_a_watcher_restarts_if_its_revision_is_unknown(coordinator: Coordinator) -> None:
    updates = coordinator.watch(7)
    update = await anext(updates)
    assert (update.reset, update.snapshot) == (True, True)
    await updates.aclose()
