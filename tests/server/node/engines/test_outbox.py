"""Answers that wait for their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lmkv import rpc
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.registry_service_pb2 import SpecConflict
from lmkv_server.node.engines import outbox as outbox_module
from lmkv_server.node.engines.outbox import MERGED_BYTES, Outbox
from tests.attach import events


async def messages_of(outbox: Outbox) -> AsyncIterator[pb.AttachResponse]:
    """What the stream sends, to the end."""
    while message := await outbox.take():
        yield message


async def test_queued_answers_are_merged_up_to_the_message_limit() -> None:
    outbox = Outbox()
    for number in range(40):
        found = pb.FoundChunks(lookup_id=str(number), peer_instance_id="x" * 100_000)
        outbox.put(pb.Event(found=found))
        outbox.put(pb.Event(granted=pb.GrantedCredits(settled_counts=[1])))
    outbox.end()
    messages = []
    while message := await outbox.take():
        messages.append(message)
    assert 1 < len(messages) <= 40 // (MERGED_BYTES // 110_000)
    assert all(message.ByteSize() < rpc.MAX_MESSAGE_BYTES for message in messages)
    assert [found.lookup_id for message in messages for found in events(message, "found")] == [
        str(n) for n in range(40)
    ]
    assert sum(1 for message in messages for _ in events(message, "granted")) == 40
    assert await outbox.take() is None


async def test_unread_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 4 * MERGED_BYTES)
    outbox = Outbox()
    found = pb.Event(found=pb.FoundChunks(peer_instance_id="x" * 100_000))
    while not outbox.is_full:
        outbox.put(found)
    for _ in range(100):
        outbox.put(found)
    assert sum(message.ByteSize() for message in outbox._pending) <= 6 * MERGED_BYTES
    while outbox.is_full:
        assert await outbox.take()
    outbox.put(pb.Event(reset=pb.ResetResult(chunk_count=3)))
    outbox.end()
    *_, last = [message async for message in messages_of(outbox)]
    assert [one.chunk_count for one in events(last, "reset")] == [3]


async def test_events_are_sent_in_the_order_in_which_they_were_added() -> None:
    outbox = Outbox()
    for number in range(9):
        outbox.put(pb.Event(reset=pb.ResetResult(chunk_count=number)))
        outbox.put(pb.Event(conflicts=pb.SpecConflicts(conflicts=[SpecConflict(instance_id=str(number))])))
    message = await outbox.take()
    assert message
    assert [event.WhichOneof("event") for event in message.events] == ["reset", "conflicts"] * 9
    assert [one.chunk_count for one in events(message, "reset")] == list(range(9))


async def test_taking_waits_for_something_to_say() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put(pb.Event(reset=pb.ResetResult(chunk_count=3)))
    message = await taking
    assert message
    assert [one.chunk_count for one in events(message, "reset")] == [3]
    assert outbox._pending == type(outbox._pending)()
