"""Handoffs that are refused, dropped, damaged or lose a side: between processes of which one dies."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

import grpc
import pytest

from lmkv.errors import (
    GrantNotFound,
    InstanceNotFound,
    NoFreeExtents,
    RequestTooLarge,
    Unreachable,
)
from lmkv.keys import join_keys
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.stream import EngineHandoffs
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from tests.server.node.handoff_parts import finish, follow, is_committed, state_of
from tests.server.node.peer_parts import LARGE, SMALL, Parts, Remote, keys_of
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(8)
FOREVER = 10_000.0


def engine_of(side: Parts, outbox: Outbox) -> EngineHandoffs:
    """The handoffs of an engine that has attached at a node."""
    session = EngineSessions(side.tier).attach("engine", SMALL)
    return EngineHandoffs(session, TierStack(side.tier, [], side.receiver), outbox, side.senders)


async def test_a_refused_handoff_is_known_to_the_decode_at_once(
    prefill: Parts, decode: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv_server.node.handoff.receiver.ANNOUNCE_SECONDS", FOREVER)
    first = prefill.hand("first", "decode", keys_of(16))
    await until(lambda: state_of(decode, "first") is HandoffState.ALLOCATED)
    second = prefill.hand("second", "decode", keys_of(24)[16:])
    await until(lambda: decode.receiver.handoffs.stats().refused_count > 0)
    waiting = asyncio.create_task(follow(decode, "second", keys_of(24)[16:], seconds=FOREVER))
    prefill.senders.end("second")
    assert isinstance((await second).error, NoFreeExtents)
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await waiting).chunks == []
    assert decode.receiver.promised("second", 0, 8) == (0, "")
    prefill.senders.end("first")
    await first


async def test_a_handoff_that_is_too_large_is_known_to_the_decode_at_once(prefill: Parts, decode: Parts) -> None:
    assert isinstance((await prefill.hand("r", "decode", keys_of(17))).error, RequestTooLarge)
    await until(lambda: decode.receiver.promised("r", 0, 17) == (0, ""))


@pytest.mark.parametrize("arrived", [0, 3, 8])
async def test_a_handoff_that_is_dropped_leaves_nothing_however_far_it_was(
    prefill: Parts, decode: Parts, arrived: int
) -> None:
    engine = engine_of(prefill, Outbox())
    engine.begin(
        engine_pb.HandChunks(
            handoff_id="r", decode_instance_id="decode", chunk_keys=join_keys(KEYS), token_count=8 * SMALL.chunk_size
        )
    )
    await until(lambda: state_of(decode) is HandoffState.ALLOCATED)
    for key in KEYS[:arrived]:
        prefill.put(key)
    await until(lambda: len(decode.tier.find(KEYS[:arrived])) == arrived)
    if arrived == len(KEYS):
        await until(lambda: len(prefill.senders) == 0)
    engine.drop(engine_pb.DropHandoff(handoff_id="r", decode_instance_id="decode"))
    await until(lambda: len(decode.receiver.handoffs) == 0)
    decode.check_nothing_left()
    assert decode.receiver.handoffs.stats().abandoned_count == 0
    assert decode.receiver.promised("r", 0, 8) == (0, "")
    assert len(decode.tier.find(KEYS[:arrived])) == arrived, "what came stays as any other chunk"


async def test_a_handoff_ends_if_its_connection_is_replaced_by_another(prefill: Parts, decode: Parts) -> None:
    ended = prefill.hand("r", "decode", KEYS)
    prefill.put(KEYS[0])
    await until(lambda: len(decode.tier.find(KEYS[:1])) == 1)
    known = prefill.connections.get(decode.holder(0))
    assert known is not None
    await known.close()
    prefill.put(KEYS[1])
    async with asyncio.timeout(WAIT_SECONDS):
        assert isinstance((await ended).error, Unreachable)
    await finish(decode)


async def test_a_decode_may_drop_a_handoff_before_it_is_announced(prefill: Parts, decode: Parts) -> None:
    engine = engine_of(decode, Outbox())
    engine.drop(engine_pb.DropHandoff(handoff_id="r"))
    prefill.put(KEYS[0])
    assert isinstance((await prefill.hand("r", "decode", KEYS[:1])).error, GrantNotFound)
    decode.check_nothing_left()


async def test_a_request_that_waits_keeps_what_came_of_a_handoff_that_is_dropped(prefill: Parts, decode: Parts) -> None:
    let_go = decode.receiver.claim("r")
    for key in KEYS[:3]:
        prefill.put(key)
    ended = prefill.hand("r", "decode", KEYS)
    following = asyncio.create_task(follow(decode, "r", KEYS, seconds=FOREVER))
    await until(lambda: len(decode.tier.find(KEYS[:3])) == 3)
    prefill.senders.drop("r", "decode")
    async with asyncio.timeout(WAIT_SECONDS):
        taken = await following
    assert taken.keys() == KEYS[:3]
    taken.let_go()
    await ended
    let_go()
    decode.check_nothing_left()


async def test_a_request_for_several_answers_ends_its_handoff_with_the_last(prefill: Parts, decode: Parts) -> None:
    first, second = decode.receiver.claim("r"), decode.receiver.claim("r")
    for key in KEYS:
        prefill.put(key)
    assert (await prefill.hand("r", "decode", KEYS)).error is None
    first()
    assert decode.receiver.promised("r", 0, 8) == (8, "prefill")
    second()
    decode.check_nothing_left()


async def test_a_name_is_one_handoff_of_one_engine_however_often_it_asks(prefill: Parts, decode: Parts) -> None:
    message = engine_pb.HandChunks(
        handoff_id="r", decode_instance_id="decode", chunk_keys=join_keys(KEYS), token_count=8 * SMALL.chunk_size
    )
    answers, refusals = Outbox(), Outbox()
    engine, other = engine_of(prefill, answers), engine_of(prefill, refusals)
    for each in (engine, engine, other):
        each.begin(message)
    refusal = await refusals.take()
    assert refusal is not None
    assert [event.handed.status.code for event in refusal.events] == [grpc.StatusCode.INVALID_ARGUMENT.value[0]]
    other.end(engine_pb.EndHandoff(handoff_id="r"))
    other.close()
    for key in KEYS:
        prefill.put(key)
    async with asyncio.timeout(WAIT_SECONDS):
        answer = await answers.take()
    assert answer is not None
    (handed,) = (event.handed for event in answer.events)
    assert (handed.chunk_count, handed.status.code) == (8, 0)


# ---- damage, silence, death --------------------------------------------------------------------------------------


async def test_damaged_chunks_are_thrown_away_and_dropped_at_their_source(prefill: Parts, decode: Parts) -> None:
    for key in KEYS:
        prefill.put(key)
    prefill.damage(KEYS[2])
    handed = await prefill.hand("r", decode.instance_id, KEYS)
    assert handed.chunk_count == 7
    assert decode.tier.get(KEYS[2]) is None
    assert state_of(decode) is HandoffState.ABORTED
    assert decode.pipeline.stats().checksum_mismatches == 1
    await until(lambda: prefill.tier.get(KEYS[2]) is None)


async def test_a_silent_prefill_expires_and_one_at_work_does_not() -> None:
    silence = 4.0  # longer than a busy machine stands still
    async with Parts("decode", chunk_count=32, pd_timeout=silence, pd_abandon_timeout=0.3) as decode:
        with Remote("prefill", spec="small", chunk_count=1) as prefill:
            prefill.ask("hand r decode 8")
            await until(lambda: decode.tier.get(KEYS[0]) is not None)
            handoff = decode.receiver.handoffs.find("r")
            assert handoff
            first = handoff.expire_at
            await until(lambda: handoff.expire_at > first + silence or not handoff.is_open)
            # It computes for longer than that, and says so.
            assert state_of(decode) is HandoffState.TRANSFERRING
            prefill.signal(signal.SIGSTOP)
            following = asyncio.create_task(follow(decode, "r", KEYS))
            await until(lambda: state_of(decode) is HandoffState.EXPIRED)
            taken = await following
            assert taken.keys() == KEYS[:1]
            taken.let_go()
            await until(lambda: len(decode.receiver.handoffs) == 0)
            assert decode.receiver.handoffs.stats().abandoned_count == 1
            prefill.signal(signal.SIGCONT)  # its late word is harmless
            await until(lambda: prefill.ask("sending") == 0)
        decode.check_nothing_left()


async def test_a_handoff_does_not_expire_while_the_decode_reads_from_a_prefill_that_stalls() -> None:
    silence = 1.0
    keys = keys_of(4)  # one read, by the connection that is there already
    async with Parts("decode", spec=LARGE, chunk_count=16, transfer_channel="tcp", pd_timeout=silence) as decode:
        with Remote("prefill", chunk_count=4, transfer_channel="tcp") as prefill:
            for attempt in range(10):  # on a busy machine the reads may end before it is frozen
                name = f"r{attempt}"
                prefill.ask(f"hand {name} decode 4")
                async with asyncio.timeout(WAIT_SECONDS):
                    while state_of(decode, name) in (None, HandoffState.ALLOCATED):  # noqa: ASYNC110 # freezes it at once
                        await asyncio.sleep(0)
                prefill.signal(signal.SIGSTOP)
                await asyncio.sleep(2.5 * silence)
                was_read = state_of(decode, name) is not HandoffState.COMMITTED
                assert state_of(decode, name) in (HandoffState.TRANSFERRING, HandoffState.COMMITTED)
                prefill.signal(signal.SIGCONT)
                await until(partial(is_committed, decode, name))
                await finish(decode)
                decode.tier.drop(keys)
                if was_read:
                    return
        raise AssertionError("no read was under way")


async def test_a_prefill_that_is_killed_leaves_nothing() -> None:
    async with Parts("decode", spec=LARGE, chunk_count=32, pd_timeout=1.0, pd_abandon_timeout=0.3) as decode:
        with Remote("prefill", chunk_count=12) as prefill:
            prefill.ask("hand r decode 16")
            await until(lambda: state_of(decode) is not None)
            prefill.signal(signal.SIGKILL)
        await until(lambda: len(decode.receiver.handoffs) == 0)
        await until(lambda: decode.tier.reserved_count == 0)
        decode.check_nothing_left()


async def test_a_decode_that_is_killed_ends_the_prefills_handoff(prefill: Parts) -> None:
    prefill.put(KEYS[0])
    with Remote("decode", spec="small", chunk_count=1) as decode:
        ended = prefill.hand("r", "decode", KEYS)
        await until(lambda: prefill.senders.stats().sent_bytes == 0 and not ended.done())
        decode.signal(signal.SIGKILL)
        prefill.put(KEYS[1])
        assert isinstance((await ended).error, Unreachable | InstanceNotFound)


async def test_a_frozen_decode_ends_the_prefills_handoff(prefill: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_server.node.handoff.sender.ANSWER_SECONDS", 0.3)
    with Remote("decode", spec="small", chunk_count=1) as decode:
        ended = prefill.hand("r", "decode", KEYS)
        await until(lambda: len(prefill.senders) == 1)
        decode.signal(signal.SIGSTOP)
        prefill.put(KEYS[1])
        assert isinstance((await ended).error, Unreachable)
        assert not any(chunk.holds for chunk in prefill.tier)


async def test_a_prefill_whose_engine_is_gone_lets_go(prefill: Parts, decode: Parts) -> None:
    prefill.put(KEYS[0])
    prefill.hand("r", decode.instance_id, KEYS)
    await until(lambda: decode.tier.get(KEYS[0]) is not None)
    prefill.senders.cancel("r")
    await until(lambda: len(decode.receiver.handoffs) == 0)
    decode.check_nothing_left()


async def test_a_node_that_stops_gives_back_what_open_handoffs_have_reserved(prefill: Parts, decode: Parts) -> None:
    handing = prefill.hand("r", "decode", KEYS)
    await until(lambda: state_of(decode, "r") is HandoffState.ALLOCATED)
    assert decode.tier.reserved_bytes > 0
    await decode.receiver.aclose()
    assert len(decode.receiver.handoffs) == decode.receiver.handoffs.used_bytes == decode.tier.reserved_bytes == 0
    await decode.receiver.aclose()
    prefill.senders.end("r")
    await handing
