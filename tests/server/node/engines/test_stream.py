"""The acts of one message: each kind has a handler, and they are carried out in the order of the list."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from lmkv.errors import BadMessage
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.engines.explainer import PromptExplainer
from lmkv_server.node.engines.lookups import LookupCounters
from lmkv_server.node.engines.stream import ACTS_AT_ONCE, EngineContext, EngineHost, EngineStream
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from tests.support.specs import small_spec


def make_stream() -> EngineStream:
    tier = HostTier(1 << 20)
    sessions, stack = EngineSessions(tier), TierStack(tier, [])
    context = EngineContext(
        host=cast(EngineHost, None),
        sessions=sessions,
        stack=stack,
        hints=cast(HintExecutor, None),
        senders=None,
        counters=LookupCounters(),
        explainer=PromptExplainer(sessions, stack, 0),
        audits=cast(Audits, None),
    )
    return EngineStream(context, sessions.attach("engine", small_spec()))


def test_every_act_but_hello_has_a_handler() -> None:
    assert ["hello", *make_stream()._handlers] == [field.name for field in pb.Act.DESCRIPTOR.fields]


async def test_acts_are_carried_out_in_the_order_of_the_list_and_others_have_their_turn() -> None:
    stream = make_stream()
    done: list[str] = []
    for name in stream._handlers:
        stream._handlers[name] = lambda _, name=name: done.append(name)  # type: ignore[misc]
    names = [*reversed(stream._handlers), *stream._handlers] * ACTS_AT_ONCE
    sent = []
    for name in names:
        act = pb.Act()
        getattr(act, name).SetInParent()
        sent.append(act)
    turn = asyncio.create_task(asyncio.sleep(0, len(done)))
    carrying_out = asyncio.create_task(stream.act(sent))
    await turn
    assert len(done) < len(names), "a message of any length does not stop the node"
    await carrying_out
    assert done == names


async def test_credits_that_an_engine_returns_are_free_again_once() -> None:
    stream = make_stream()
    tier = stream._stack.tier
    await stream.act([pb.Act(reserve=pb.ReserveCredits(counts=[3]))])
    message = await stream.outbox.take()
    assert message
    offsets = [one.extent.offset for one in message.events[0].granted.credits]
    assert tier.reserved_count == len(offsets) == 3
    unknown = [offsets[0], 1 << 40]
    await stream.act([pb.Act(return_credits=pb.ReturnCredits(offsets=[*offsets, *unknown]))])
    assert tier.reserved_count == 0
    tier.check()


@pytest.mark.parametrize("counts", [[1, 1], [0, 0, 5]])
async def test_credits_for_parts_that_chunks_do_not_have_are_refused(counts: list[int]) -> None:
    stream = make_stream()
    with pytest.raises(BadMessage, match="have 1 parts"):
        await stream.act([pb.Act(reserve=pb.ReserveCredits(counts=counts))])
    lookup = pb.LookupChunks(lookup_id="r", chunk_keys=bytes(16), part_reserve_counts=counts)
    with pytest.raises(BadMessage, match="have 1 parts"):
        await stream.act([pb.Act(lookup=lookup)])
    assert stream._stack.tier.reserved_count == 0
