"""Handoffs from a prefill's node to a decode's, over real sockets and channels."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lmkv.errors import (
    GrantNotFound,
    InstanceNotFound,
    KvSpecMismatch,
    LmkvError,
    NoFreeExtents,
    RequestTooLarge,
    Unreachable,
)
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.peers import directory as directory_module
from lmkv_server.node.peers.directory import InstanceDirectory
from tests.server.node.handoff_parts import finish, follow, state_of
from tests.server.node.peer_parts import LARGE, RUNTIME_DIR, SMALL, Parts, Remote, keys_of
from tests.waiting import until

KEYS = keys_of(8)
FOREVER = 10_000.0


@pytest.fixture(params=["shm", "nixl", "tcp"])
def transfer_channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


async def test_a_handoff_opens_the_session_again_that_the_decode_has_dropped(prefill: Parts, decode: Parts) -> None:
    for key in KEYS:
        prefill.put(key)
    for handoff_id in ("r0", "r1"):
        handed = await prefill.hand(handoff_id, decode.instance_id, KEYS)
        assert handed.error is None
        for own in list(decode.service.sessions._by_identity.values()):
            for session in list(own.values()):
                decode.service.sessions._drop(session)


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


async def test_a_handoff_that_is_never_announced_times_out(decode: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
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
    await until(lambda: decode.receiver.handoffs.stats().refused_count > 1)
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
    await until(lambda: decode.receiver.handoffs.stats().refused_count > 0)
    prefill.senders.end("second")
    assert isinstance((await second).error, NoFreeExtents)
    prefill.senders.end("first")
    await first


async def test_engines_that_cannot_share_are_rejected_before_a_connection_is_opened(prefill: Parts) -> None:
    async with Parts("other", spec=replace(SMALL, kv_dtype="float16")) as other:
        handed = await prefill.hand("r", other.instance_id, KEYS)
        assert isinstance(handed.error, KvSpecMismatch)
        assert "kv_dtype" in str(handed.error)


async def test_a_restarted_decode_node_is_connected_again(prefill: Parts) -> None:
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


async def test_the_registration_that_was_found_longest_ago_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "MAX_KNOWN", 2)
    asked: list[str] = []

    async def locate(instance_id: str) -> Holder | None:
        asked.append(instance_id)
        return Holder(instance_id=instance_id, epoch=1, peer_address="10.0.0.9:1")

    directory = InstanceDirectory(tmp_path, locate)
    for name in ("a", "b", "c", "c", "b", "a"):
        await directory.find(name)
    assert asked == ["a", "b", "c", "a"]


async def test_registrations_are_asked_for_once_and_used_while_no_coordinator_answers(tmp_path: Path) -> None:
    answers: list[Holder | LmkvError | None] = [Holder(instance_id="far", epoch=1, peer_address="10.0.0.9:1")]
    asked: list[str] = []

    async def locate(instance_id: str) -> Holder | None:
        asked.append(instance_id)
        answer = answers[0]
        if isinstance(answer, LmkvError):
            raise answer
        return answer

    directory = InstanceDirectory(tmp_path, locate)
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
