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


async def messages_of(outbox: Outbox) -> AsyncIterator[pb.AttachResponse]:
    """What the stream sends, to the end."""
    while message := await outbox.take():
        yield message


async def test_queued_answers_are_merged_up_to_the_message_limit() -> None:
    outbox = Outbox()
    for number in range(40):
        found = pb.FoundChunks(lookup_id=str(number), peer_instance_id="x" * 100_000)
        outbox.put(pb.AttachResponse(found=[found], settled_reserve_count=1))
    outbox.end()
    messages = []
    while message := await outbox.take():
        messages.append(message)
    assert 1 < len(messages) <= 40 // (MERGED_BYTES // 110_000)
    assert all(message.ByteSize() < rpc.MAX_MESSAGE_BYTES for message in messages)
    assert [found.lookup_id for message in messages for found in message.found] == [str(n) for n in range(40)]
    assert sum(message.settled_reserve_count for message in messages) == 40
    assert await outbox.take() is None


async def test_unread_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 4 * MERGED_BYTES)
    outbox = Outbox()
    found = pb.AttachResponse(found=[pb.FoundChunks(peer_instance_id="x" * 100_000)])
    while not outbox.is_full:
        outbox.put(found)
    for _ in range(100):
        outbox.put(found)
    assert sum(message.ByteSize() for message in outbox._pending) <= 6 * MERGED_BYTES
    while outbox.is_full:
        assert await outbox.take()
    outbox.put(pb.AttachResponse(reset_counts=[3]))
    outbox.end()
    *_, last = [message async for message in messages_of(outbox)]
    assert list(last.reset_counts) == [3]


async def test_settled_credits_of_parts_are_added_up_part_by_part() -> None:
    outbox = Outbox()
    for counts in ([1, 2], [], [5], [2**31 - 1, 1, 3]):
        outbox.put(pb.AttachResponse(settled_part_reserve_counts=counts))
    message = await outbox.take()
    assert message
    assert list(message.settled_part_reserve_counts) == [2**31 - 1, 3, 3]


async def test_conflicts_are_always_reported_completely() -> None:
    outbox = Outbox()
    for names in (["a", "b"], ["c"]):
        outbox.put(
            pb.AttachResponse(conflicts=pb.SpecConflicts(conflicts=[SpecConflict(instance_id=name) for name in names]))
        )
    message = await outbox.take()
    assert message
    assert [conflict.instance_id for conflict in message.conflicts.conflicts] == ["c"]


async def test_taking_waits_for_something_to_say() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put(pb.AttachResponse(reset_counts=[3]))
    message = await taking
    assert message
    assert list(message.reset_counts) == [3]
    assert outbox._pending == type(outbox._pending)()
