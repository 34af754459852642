"""Handoffs from a prefill's node to a decode's: over real sockets and channels, between processes of which one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import (
    BadMessage,
    GrantNotFound,
    InstanceNotFound,
    KvSpecMismatch,
    LmkvError,
    NoFreeExtents,
    RequestTooLarge,
    Unreachable,
)
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.engines.handoffs import EngineHandoffs
from lmkv_server.node.handoff.directory import Directory
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.tiers.progress import Progress
from tests.server.node.peer_parts import LARGE, RUNTIME_DIR, SMALL, Parts, Remote, Taken, keys_of
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(8)
FOREVER = 10_000.0


@pytest.fixture(params=["shm", "nixl", "tcp"])
def transfer_channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def prefill() -> AsyncIterator[Parts]:
    async with Parts("prefill", chunk_count=64, transfer_channel="shm") as parts:
        yield parts
        await until(lambda: len(parts.senders) == 0)
        parts.check_nothing_left()


@pytest.fixture
async def decode() -> AsyncIterator[Parts]:
    async with Parts("decode", chunk_count=32, transfer_channel="shm") as parts:
        yield parts
        await finish(parts)


async def finish(decode: Parts) -> None:
    """Every request is over."""
    for handoff in list(decode.receiver.handoffs):
        decode.receiver.handoffs.unclaim(handoff.request_id)
    await until(lambda: decode.tier.reserved_count == 0)
    decode.check_nothing_left()


def state_of(decode: Parts, name: str = "r") -> HandoffState | None:
    """How far a handoff is."""
    handoff = decode.receiver.handoffs.find(name)
    return handoff.state if handoff else None


def is_committed(decode: Parts, name: str) -> bool:
    """Whether all of a handoff is here."""
    return state_of(decode, name) is HandoffState.COMMITTED


async def follow(decode: Parts, name: str, keys: list[ChunkKey], seconds: float = 10.0) -> Taken:
    """A request of the decode comes for a handoff, and takes what it brings."""
    taken = Taken(decode)
    progress = Progress(decode.tier, decode.spec, keys, 0, taken)
    try:
        await decode.receiver.follow(name, progress, seconds)
    finally:
        progress.close()
    return taken


# ---- chunk by chunk ---------------------------------------------------------------------------------------------


async def test_a_prompt_arrives_bit_for_bit_over_every_channel(transfer_channel: str) -> None:
    async with (
        Parts("prefill", spec=LARGE, chunk_count=16, transfer_channel=transfer_channel) as prefill,
        Parts("decode", spec=LARGE, chunk_count=24, transfer_channel=transfer_channel) as decode,
    ):
        for key in KEYS:
            prefill.put(key)
        handed = await prefill.hand("r", decode.instance_id, KEYS)
        assert (handed.error, handed.chunk_count, handed.size_bytes) == (None, 8, 8 * LARGE.chunk_bytes)
        assert state_of(decode) is HandoffState.COMMITTED
        assert decode.receiver.stats().received_bytes == prefill.senders.stats().sent_bytes == 8 * LARGE.chunk_bytes
        taken = await follow(decode, "r", KEYS)
        assert taken.keys() == KEYS
        taken.let_go()
        await finish(decode)


async def test_early_chunks_arrive_while_later_ones_are_still_computed(prefill: Parts, decode: Parts) -> None:
    ended = prefill.hand("r", decode.instance_id, KEYS)
    await until(lambda: state_of(decode) is HandoffState.ALLOCATED)
    for index, key in enumerate(KEYS):
        assert not ended.done()
        prefill.put(key)
        await until(lambda key=key: decode.tier.get(key) is not None)  # type: ignore[misc]
        assert state_of(decode) is (HandoffState.TRANSFERRING if index < 7 else HandoffState.COMMITTED)
    assert (await ended).chunk_count == 8


async def test_every_prefill_hands_to_every_decode_at_once() -> None:
    async with AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(Parts(f"prefill-{number}")) for number in range(2)]
        decodes = [await stack.enter_async_context(Parts(f"decode-{number}", chunk_count=64)) for number in range(2)]
        prompts = {f"r{number}": keys_of(8 * number + 8)[-8:] for number in range(4)}
        pairs = dict(zip(prompts, product(prefills, decodes), strict=True))
        handed = [prefill.hand(name, decode.instance_id, prompts[name]) for name, (prefill, decode) in pairs.items()]
        for name, (prefill, _) in pairs.items():
            for key in prompts[name]:
                prefill.put(key)
        assert [(one.error, one.chunk_count) for one in await asyncio.gather(*handed)] == [(None, 8)] * 4
        for name, (_, decode) in pairs.items():
            taken = await follow(decode, name, prompts[name])
            assert taken.keys() == prompts[name]
            taken.let_go()
        for decode in decodes:
            await finish(decode)
        for prefill in prefills:
            await until(lambda senders=prefill.senders: len(senders) == 0)  # type: ignore[misc]
            prefill.check_nothing_left()


async def test_a_partial_last_chunk_arrives(prefill: Parts, decode: Parts) -> None:
    prefill.put(KEYS[0])
    prefill.put(KEYS[1], token_count=9)
    handed = await prefill.hand("r", decode.instance_id, KEYS[:2], token_count=SMALL.chunk_size + 9)
    assert handed.error is None
    chunk = decode.tier.get(KEYS[1])
    assert chunk
    assert chunk.token_count == 9
    assert decode.holds_right(chunk)


async def test_what_the_decode_holds_is_not_sent_again(prefill: Parts, decode: Parts) -> None:
    for key in KEYS:
        prefill.put(key)
    for key in KEYS[:5]:
        decode.put(key)
    handed = await prefill.hand("r", decode.instance_id, KEYS)
    assert (handed.chunk_count, handed.size_bytes) == (8, 3 * SMALL.chunk_bytes)


async def test_two_engines_of_one_node_need_no_transfer(prefill: Parts) -> None:
    handed = await prefill.hand("r", prefill.instance_id, KEYS)
    assert (handed.error, handed.chunk_count, handed.size_bytes) == (None, 8, 0)


# ---- the decode's request ----------------------------------------------------------------------------------------


async def test_a_request_that_comes_first_waits_for_the_bytes(prefill: Parts, decode: Parts) -> None:
    let_go = decode.receiver.claim("r")
    assert decode.receiver.promised("r", 0, 8) == (8, "")
    following = asyncio.create_task(follow(decode, "r", KEYS))
    await asyncio.sleep(0)
    ended = prefill.hand("r", decode.instance_id, KEYS)
    await until(lambda: state_of(decode) is HandoffState.ALLOCATED)
    assert decode.receiver.promised("r", 0, 8) == (8, "prefill")
    for key in KEYS:
        prefill.put(key)
    taken = await following
    assert taken.keys() == KEYS
    assert (await ended).error is None
    taken.let_go()
    let_go()
    decode.check_nothing_left()


async def test_a_request_takes_what_there_is_when_the_prefill_ends_early(prefill: Parts, decode: Parts) -> None:
    for key in KEYS[:3]:
        prefill.put(key)
    ended = prefill.hand("r", decode.instance_id, KEYS)
    following = asyncio.create_task(follow(decode, "r", KEYS))
    await until(lambda: decode.tier.get(KEYS[2]) is not None)
    assert not following.done()
    prefill.senders.end("r")
    taken = await following
    assert taken.keys() == KEYS[:3]
    taken.let_go()
    handed = await ended
    assert (handed.error, handed.chunk_count) == (None, 3)
    assert state_of(decode) is HandoffState.ABORTED
    assert decode.receiver.promised("r", 0, 8) == (3, "prefill")


async def test_a_request_does_not_wait_longer_than_it_may(prefill: Parts, decode: Parts) -> None:
    prefill.put(KEYS[0])
    ended = prefill.hand("r", decode.instance_id, KEYS)
    await until(lambda: decode.tier.get(KEYS[0]) is not None)
    taken = await follow(decode, "r", KEYS, seconds=0.2)
    assert taken.keys() == KEYS[:1]
    taken.let_go()
    prefill.senders.end("r")
    await ended


async def test_a_handoff_that_nobody_announces_is_not_waited_for_long(
    decode: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv_server.node.handoff.receiver.ANNOUNCE_SECONDS", 0.05)
    assert (await follow(decode, "never", KEYS, seconds=FOREVER)).chunks == []


async def test_the_prefill_stops_when_the_decodes_request_is_gone(prefill: Parts, decode: Parts) -> None:
    let_go = decode.receiver.claim("r")
    ended = prefill.hand("r", decode.instance_id, KEYS)
    prefill.put(KEYS[0])
    await until(lambda: decode.tier.get(KEYS[0]) is not None)
    let_go()
    prefill.put(KEYS[1])
    handed = await ended
    assert isinstance(handed.error, GrantNotFound)
    decode.check_nothing_left()


# ---- refusals ----------------------------------------------------------------------------------------------------


async def test_a_prompt_larger_than_the_buffer_is_refused_at_once(prefill: Parts, decode: Parts) -> None:
    handed = await prefill.hand("r", decode.instance_id, keys_of(17))
    assert isinstance(handed.error, RequestTooLarge)
    assert "pd_buffer_size" in str(handed.error)


async def test_a_full_buffer_is_waited_for_and_then_used(prefill: Parts, decode: Parts) -> None:
    first = prefill.hand("first", decode.instance_id, keys_of(16))
    await until(lambda: state_of(decode, "first") is HandoffState.ALLOCATED)
    second = prefill.hand("second", decode.instance_id, keys_of(24)[16:])
    await until(lambda: decode.receiver.handoffs.refused_count > 1)
    assert not second.done()
    prefill.senders.end("first")
    await first
    decode.receiver.handoffs.unclaim("first")
    await until(lambda: state_of(decode, "second") is HandoffState.ALLOCATED)
    prefill.senders.end("second")
    await second


async def test_a_full_buffer_is_given_up_when_the_request_ends(prefill: Parts, decode: Parts) -> None:
    first = prefill.hand("first", decode.instance_id, keys_of(16))
    await until(lambda: state_of(decode, "first") is HandoffState.ALLOCATED)
    second = prefill.hand("second", decode.instance_id, keys_of(24)[16:])
    await until(lambda: decode.receiver.handoffs.refused_count > 0)
    prefill.senders.end("second")
    assert isinstance((await second).error, NoFreeExtents)
    prefill.senders.end("first")
    await first


async def test_engines_that_share_nothing_are_told_so_before_anything_is_opened(prefill: Parts) -> None:
    async with Parts("other", spec=replace(SMALL, kv_dtype="float16")) as other:
        handed = await prefill.hand("r", other.instance_id, KEYS)
        assert isinstance(handed.error, KvSpecMismatch)
        assert "kv_dtype" in str(handed.error)


async def test_a_decode_that_was_started_anew_is_met_anew(prefill: Parts) -> None:
    prefill.put(KEYS[0])
    async with Parts("decode", chunk_count=32, transfer_channel="shm") as decode:
        assert (await prefill.hand("first", decode.instance_id, KEYS[:1])).error is None
        address = decode.address
        await finish(decode)
    port = int(address.rpartition(":")[2])
    async with Parts("decode", chunk_count=32, transfer_channel="shm", p2p_port=port) as decode:
        assert decode.address == address
        assert (await prefill.hand("second", "decode", KEYS[:1])).error is None
        await finish(decode)


async def test_an_instance_that_the_fleet_does_not_know_is_refused(prefill: Parts) -> None:
    for stranger in ("stranger", "127.0.0.1:1", "../decode", ""):
        handed = await prefill.hand(f"to {stranger}", stranger, KEYS)
        assert isinstance(handed.error, InstanceNotFound)
        assert "coordinator_address" in str(handed.error)


async def test_an_instance_that_another_user_could_have_named_is_not_known(prefill: Parts, decode: Parts) -> None:
    os.chmod(f"{RUNTIME_DIR}/decode", 0o770)  # noqa: PTH101
    try:
        assert isinstance((await prefill.hand("r", "decode", KEYS)).error, InstanceNotFound)
    finally:
        os.chmod(f"{RUNTIME_DIR}/decode", 0o700)  # noqa: PTH101
    prefill.put(KEYS[0])
    assert (await prefill.hand("again", "decode", KEYS[:1])).error is None


async def test_an_instance_whose_node_was_killed_is_not_known(prefill: Parts) -> None:
    with Remote("decode", spec="small", chunk_count=1) as decode:
        assert (await prefill.directory.find("decode")).epoch == decode.holder.epoch
        decode.signal(signal.SIGKILL)
    assert isinstance((await prefill.hand("r", "decode", KEYS)).error, InstanceNotFound)


async def test_registrations_are_asked_for_once_and_used_while_no_coordinator_answers(tmp_path: Path) -> None:
    answers: list[Holder | LmkvError | None] = [Holder(instance_id="far", epoch=1, peer_address="10.0.0.9:1")]
    asked: list[str] = []

    async def locate(instance_id: str) -> Holder | None:
        asked.append(instance_id)
        answer = answers[0]
        if isinstance(answer, LmkvError):
            raise answer
        return answer

    directory = Directory(tmp_path, locate)
    for _ in range(3):
        assert (await directory.find("far")).peer_address == "10.0.0.9:1"
    assert asked == ["far"]
    answers[0] = Unreachable("no coordinator answers")
    directory._known["far"] = directory._known["far"][0], 0.0  # it is old by now
    assert (await directory.find("far")).epoch == 1
    with pytest.raises(Unreachable):
        await directory.find("farther")
    answers[0] = None
    for find in (directory.find("far"), directory.find_epoch("far", 1)):
        with pytest.raises(InstanceNotFound):
            await find


# ---- what no request will load -----------------------------------------------------------------------------------


async def test_a_refused_handoff_is_known_to_the_decode_at_once(
    prefill: Parts, decode: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv_server.node.handoff.receiver.ANNOUNCE_SECONDS", FOREVER)
    first = prefill.hand("first", "decode", keys_of(16))
    await until(lambda: state_of(decode, "first") is HandoffState.ALLOCATED)
    second = prefill.hand("second", "decode", keys_of(24)[16:])
    await until(lambda: decode.receiver.handoffs.refused_count > 0)
    waiting = asyncio.create_task(follow(decode, "second", keys_of(24)[16:], seconds=FOREVER))
    prefill.senders.end("second")
    assert isinstance((await second).error, NoFreeExtents)
    async with asyncio.timeout(10):
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
    engine = EngineHandoffs(SMALL, prefill.senders, lambda _: None)
    engine.begin(
        engine_pb.HandChunks(
            request_id="r", decode_instance_id="decode", chunk_keys=join_keys(KEYS), token_count=8 * SMALL.chunk_size
        )
    )
    await until(lambda: state_of(decode) is HandoffState.ALLOCATED)
    for key in KEYS[:arrived]:
        prefill.put(key)
    await until(lambda: len(decode.tier.find(KEYS[:arrived])) == arrived)
    if arrived == len(KEYS):
        await until(lambda: len(prefill.senders) == 0)
    engine.drop(engine_pb.DropHandoff(request_id="r", decode_instance_id="decode"))
    await until(lambda: len(decode.receiver.handoffs) == 0)
    decode.check_nothing_left()
    assert decode.receiver.handoffs.abandoned_count == 0
    assert decode.receiver.promised("r", 0, 8) == (0, "")
    assert len(decode.tier.find(KEYS[:arrived])) == arrived, "what came stays as any other chunk"


async def test_a_decode_may_drop_a_handoff_before_it_is_announced(prefill: Parts, decode: Parts) -> None:
    engine = EngineHandoffs(SMALL, None, lambda _: None, decode.receiver.drop)
    engine.drop(engine_pb.DropHandoff(request_id="r"))
    prefill.put(KEYS[0])
    assert isinstance((await prefill.hand("r", "decode", KEYS[:1])).error, GrantNotFound)
    decode.check_nothing_left()


async def test_a_request_that_waits_keeps_what_came_of_a_handoff_that_is_dropped(prefill: Parts, decode: Parts) -> None:
    let_go = decode.receiver.claim("r")
    for key in KEYS[:3]:
        prefill.put(key)
    ended = prefill.hand("r", "decode", KEYS)
    following = asyncio.create_task(follow(decode, "r", KEYS))
    await until(lambda: len(decode.tier.find(KEYS[:3])) == 3)
    prefill.senders.drop("r", "decode")
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
        request_id="r", decode_instance_id="decode", chunk_keys=join_keys(KEYS), token_count=8 * SMALL.chunk_size
    )
    answers: list[engine_pb.AttachResponse] = []
    refusals: list[engine_pb.AttachResponse] = []
    engine = EngineHandoffs(SMALL, prefill.senders, answers.append)
    other = EngineHandoffs(SMALL, prefill.senders, refusals.append)
    for each in (engine, engine, other):
        each.begin(message)
    assert [answer.handed[0].status.code for answer in refusals] == [grpc.StatusCode.INVALID_ARGUMENT.value[0]]
    other.end("r")
    other.close()
    for key in KEYS:
        prefill.put(key)
    await until(lambda: bool(answers))
    (handed,) = (one for answer in answers for one in answer.handed)
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
    silence = 1.5
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
            assert decode.receiver.handoffs.abandoned_count == 1
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
    async with Parts("decode", spec=LARGE, chunk_count=32, pd_timeout=0.3, pd_abandon_timeout=0.3) as decode:
        with Remote("prefill", chunk_count=12) as prefill:
            prefill.ask("hand r decode 16")
            await until(lambda: state_of(decode) in (HandoffState.ALLOCATED, HandoffState.TRANSFERRING))
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


# ---- what makes no sense -----------------------------------------------------------------------------------------


@pytest.fixture
async def stub(decode: Parts) -> AsyncIterator[pb_grpc.PeerServiceAsyncStub]:
    async with rpc.open_channel(decode.address) as channel:
        yield pb_grpc.PeerServiceStub(channel)


async def session_of(stub: pb_grpc.PeerServiceAsyncStub, instance_id: str = "prefill") -> str:
    """The id of a new session."""
    request = pb.InitRequest(instance_id=instance_id, epoch=1, spec=SMALL.to_proto())
    return (await stub.Init(request, timeout=5)).session_id


def announcement(decode: Parts, prefill: Parts, **changes: object) -> pb.AllocateRequest:
    """A sound `Allocate`, but for the changes."""
    fields: dict[str, object] = {
        "instance_id": "prefill",
        "epoch": prefill.epoch,
        "peer_epoch": decode.epoch,
        "request_id": "r",
        "fingerprint": SMALL.fingerprint,
        "chunk_keys": join_keys(KEYS),
        "token_count": 8 * SMALL.chunk_size,
    }
    return pb.AllocateRequest(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peer_epoch": 1}, "WRONG_INSTANCE"),
        ({"request_id": ""}, "BAD_MESSAGE"),
        ({"token_count": 1}, "BAD_MESSAGE"),
        ({"token_count": -5}, "BAD_MESSAGE"),
        ({"chunk_keys": b"123"}, "BAD_CHUNK_KEY"),
        ({"chunk_keys": b""}, "BAD_MESSAGE"),
        ({"fingerprint": b"?" * 16}, "KV_SPEC_MISMATCH"),
        ({"instance_id": "stranger"}, "INSTANCE_NOT_FOUND"),
        ({"epoch": 1}, "INSTANCE_NOT_FOUND"),
        ({"request_id": "r" * 257}, "BAD_MESSAGE"),
        ({"request_id": "r\n"}, "BAD_MESSAGE"),
        ({"instance_id": "decode"}, "BAD_MESSAGE"),
    ],
)
async def test_an_announcement_that_makes_no_sense_is_refused(
    decode: Parts, prefill: Parts, stub: pb_grpc.PeerServiceAsyncStub, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        await stub.Allocate(announcement(decode, prefill, session_id=await session_of(stub), **changes))
    assert rpc.from_rpc_error(refusal.value).reason == reason


@pytest.mark.parametrize(
    "offer",
    [
        pb.CommitRequest(indices=[8], extents=[chunk_pb2.Extent(size_bytes=SMALL.chunk_bytes, token_count=256)]),
        pb.CommitRequest(indices=[-1], extents=[chunk_pb2.Extent(size_bytes=SMALL.chunk_bytes, token_count=256)]),
        pb.CommitRequest(indices=[0], extents=[chunk_pb2.Extent(size_bytes=SMALL.chunk_bytes, token_count=255)]),
        pb.CommitRequest(indices=[0], extents=[chunk_pb2.Extent(size_bytes=64, token_count=256)]),
        pb.CommitRequest(
            indices=[0], extents=[chunk_pb2.Extent(offset=1 << 40, size_bytes=SMALL.chunk_bytes, token_count=256)]
        ),
        pb.CommitRequest(
            indices=[0], extents=[chunk_pb2.Extent(region=1, size_bytes=SMALL.chunk_bytes, token_count=256)]
        ),
        pb.CommitRequest(indices=[0]),
    ],
)
async def test_an_offer_that_makes_no_sense_is_refused_and_the_handoff_lives(
    decode: Parts, prefill: Parts, stub: pb_grpc.PeerServiceAsyncStub, offer: pb.CommitRequest
) -> None:
    offer.session_id = await session_of(stub)
    answer = await stub.Allocate(announcement(decode, prefill, session_id=offer.session_id))
    offer.grant_id = answer.grant_id
    with pytest.raises(grpc.RpcError) as refusal:
        await stub.Commit(offer)
    assert rpc.from_rpc_error(refusal.value).reason == BadMessage.reason
    assert state_of(decode) is HandoffState.ALLOCATED


async def test_an_unknown_grant_cannot_be_committed(stub: pb_grpc.PeerServiceAsyncStub) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        await stub.Commit(pb.CommitRequest(grant_id="h99", session_id=await session_of(stub)))
    assert rpc.from_rpc_error(refusal.value).reason == GrantNotFound.reason
    await stub.Release(pb.ReleaseRequest(grant_id="h99", session_id=await session_of(stub)))


async def test_a_handoff_is_unknown_to_every_session_but_the_one_that_announced_it(
    decode: Parts, prefill: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    own, other = await session_of(stub), await session_of(stub)
    grant_id = (await stub.Allocate(announcement(decode, prefill, session_id=own))).grant_id
    assert len(grant_id) >= 32
    answers = []
    for session_id, named in ((other, grant_id), ("", grant_id), (other, "f" * 32)):
        with pytest.raises(grpc.RpcError) as refusal:
            await stub.Commit(pb.CommitRequest(grant_id=named, session_id=session_id))
        error = rpc.from_rpc_error(refusal.value)
        answers.append((error.reason, str(error), error.metadata))
        await stub.Release(pb.ReleaseRequest(grant_id=named, session_id=session_id))
    assert [reason for reason, _, _ in answers] == [GrantNotFound.reason] * 3
    assert answers[0] == answers[1] == answers[2], "an answer says whether a grant of another session exists"
    with pytest.raises(grpc.RpcError) as refusal:
        await stub.Allocate(announcement(decode, prefill, session_id=other))
    assert rpc.from_rpc_error(refusal.value).reason == BadMessage.reason
    assert state_of(decode) is HandoffState.ALLOCATED
    await stub.Release(pb.ReleaseRequest(grant_id=grant_id, session_id=own))
    assert state_of(decode) is HandoffState.ABORTED
