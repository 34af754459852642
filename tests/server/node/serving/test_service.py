"""PeerService over a real socket: who may read what, for how long, and what every bad request is answered with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from google.protobuf import duration_pb2

from lmkv import rpc
from lmkv.errors import (
    BadChunkKey,
    BadKvSpec,
    BadMessage,
    ChannelUnsupported,
    Full,
    GrantNotFound,
    KvSpecMismatch,
    LmkvError,
    SessionNotFound,
    WrongInstance,
)
from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.misses import MissReason
from lmkv.transfer.channel import PeerReader
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.serving.service import MAX_ACQUIRE_KEYS, MAX_ID_BYTES
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of, no_grants
from tests.waiting import WAIT_SECONDS, eventually, until, wake_ups

KEYS = keys_of(8)
CLOCK_SECONDS = 1.0
"""How far two readings of the clocks may be apart."""


@pytest.fixture
async def owner() -> AsyncIterator[Parts]:
    async with Parts("owner") as parts:
        for key in KEYS[:4]:
            parts.put(key)
        yield parts
        parts.tier.check()


@pytest.fixture
async def session(owner: Parts, stub: pb_grpc.PeerServiceAsyncStub) -> str:
    return await session_of(owner, stub)


@pytest.fixture
async def stub(owner: Parts) -> AsyncIterator[pb_grpc.PeerServiceAsyncStub]:
    async with rpc.open_channel(owner.address) as channel:
        yield pb_grpc.PeerServiceStub(channel)


def introduction(owner: Parts, **changes: object) -> pb.InitRequest:
    values: dict[str, object] = {
        "instance_id": "reader",
        "epoch": 5,
        "peer_instance_id": owner.instance_id,
        "peer_epoch": owner.epoch,
        "spec": SMALL.to_proto(),
        "channels": ["smoke", "nixl"],
    }
    return pb.InitRequest(**{**values, **changes})  # type: ignore[arg-type]


async def session_of(owner: Parts, stub: pb_grpc.PeerServiceAsyncStub) -> str:
    return (await stub.Init(introduction(owner, channels=[]), timeout=WAIT_SECONDS)).session_id


def acquisition(owner: Parts, session: str, **changes: object) -> pb.AcquireRequest:
    values: dict[str, object] = {
        "session_id": session,
        "peer_epoch": owner.epoch,
        "fingerprint": SMALL.fingerprint,
        "chunk_keys": KEYS,
    }
    return pb.AcquireRequest(**{**values, **changes})  # type: ignore[arg-type]


def seconds(value: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


async def error_of(call: Awaitable[object]) -> LmkvError:
    with pytest.raises(grpc.RpcError) as raised:
        await call
    return rpc.from_rpc_error(raised.value)


async def test_init_answers_with_the_first_channel_that_is_shared_and_the_pool_as_region_and_may_be_repeated(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    for _ in range(2):
        response = await stub.Init(introduction(owner), timeout=WAIT_SECONDS)
    assert response.channel == "nixl"
    channel = await owner.channels.offer(["nixl"])
    assert response.channel_metadata == channel.metadata_for(PeerReader(peer_name="reader:5"))
    assert [(region.address, region.size_bytes) for region in response.regions] == [
        (owner.pool.address, owner.pool.size_bytes)
    ]


@pytest.mark.parametrize("changes", [{"peer_instance_id": "another"}, {"peer_epoch": 1}])
async def test_init_meant_for_another_instance_or_epoch_is_wrong_here(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, changes: dict[str, object]
) -> None:
    error = await error_of(stub.Init(introduction(owner, **changes), timeout=WAIT_SECONDS))
    assert isinstance(error, WrongInstance)
    assert error.metadata == {"instance_id": "owner", "epoch": str(owner.epoch)}


async def test_a_spec_that_lies_about_its_fingerprint_is_refused(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    spec = SMALL.to_proto()
    spec.layer_count += 1
    assert isinstance(await error_of(stub.Init(introduction(owner, spec=spec), timeout=WAIT_SECONDS)), BadKvSpec)


async def test_another_spec_of_the_same_model_is_refused_by_field_before_the_metadata_is_looked_at(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    other = replace(SMALL, kv_dtype="bfloat16")
    error = await error_of(
        stub.Init(introduction(owner, spec=other.to_proto(), channels=["smoke"]), timeout=WAIT_SECONDS)
    )
    assert isinstance(error, KvSpecMismatch)
    assert error.metadata == {
        "model_name": "m",
        "field": "kv_dtype",
        "own_value": "float32",
        "other_value": "bfloat16",
    }


async def test_one_of_two_specs_of_a_model_is_enough_to_share(owner: Parts, stub: pb_grpc.PeerServiceAsyncStub) -> None:
    other = replace(SMALL, kv_dtype="bfloat16")
    owner.engines.attach("other-engine", other)
    for spec in (SMALL, other):
        assert (await stub.Init(introduction(owner, spec=spec.to_proto()), timeout=WAIT_SECONDS)).regions


async def test_a_spec_of_a_model_that_is_not_here_is_no_mismatch(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    other = replace(SMALL, model_name="another", layer_count=3)
    assert (await stub.Init(introduction(owner, spec=other.to_proto()), timeout=WAIT_SECONDS)).regions


async def test_without_a_shared_channel_both_sides_channels_are_named(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    error = await error_of(stub.Init(introduction(owner, channels=["smoke", "drums"]), timeout=WAIT_SECONDS))
    assert isinstance(error, ChannelUnsupported)
    assert error.metadata == {"channels": "nixl", "wanted": "smoke, drums"}
    assert "set the same transfer_channel on both nodes" in str(error)


async def test_acquire_lists_what_is_held_and_keeps_it_in_place_until_release(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    owner.tier.drop([KEYS[1]])
    short = owner.put(KEYS[6], token_count=100)
    before = time.time()
    response = await stub.Acquire(acquisition(owner, session, ttl=seconds(20)), timeout=WAIT_SECONDS)
    assert list(response.present) == [0, 2, 3, 6]
    assert before + 20 - CLOCK_SECONDS < response.grant.expire_time.ToNanoseconds() / 1e9
    assert response.grant.expire_time.ToNanoseconds() / 1e9 < time.time() + 20 + CLOCK_SECONDS
    for index, granted in zip(response.present, response.grant.chunks, strict=True):
        chunk = owner.tier.get(KEYS[index])
        assert chunk
        assert chunk.holds == 1
        extent = granted.extent
        assert (extent.region, extent.offset, extent.size_bytes) == (0, chunk.offset, chunk.size_bytes)
        assert (granted.checksum, granted.token_count) == (chunk.checksum, chunk.token_count)
    assert response.grant.chunks[3].token_count == short.token_count == 100
    for _ in range(2):  # idempotent
        await stub.Release(
            pb.ReleaseRequest(grant_id=response.grant.grant_id, session_id=session), timeout=WAIT_SECONDS
        )
        assert not any(chunk.holds for chunk in owner.tier)


async def test_what_peers_read_is_evicted_after_what_no_peer_does(reader: Parts) -> None:
    async with Parts("full", chunk_count=len(KEYS)) as owner:
        for key in KEYS:
            owner.put(key)
        peer = reader.connections.get(owner.holder(len(KEYS)))
        assert peer
        await peer.connect(SMALL, WAIT_SECONDS)
        granted = await peer.acquire(SMALL, KEYS[:1], WAIT_SECONDS, WAIT_SECONDS)
        await peer.release(granted.grant.grant_id, WAIT_SECONDS)
        owner.put(keys_of(len(KEYS) + 1)[-1])
        assert [owner.tier.get(key) is not None for key in KEYS[:2]] == [True, False]


async def test_acquire_of_nothing_grants_nothing(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    others = (
        acquisition(owner, session, chunk_keys=KEYS[4:]),
        acquisition(owner, session, chunk_keys=[]),
        acquisition(owner, session, fingerprint=b"x" * 16),
    )
    for request in others:
        response = await stub.Acquire(request, timeout=WAIT_SECONDS)
        assert response == pb.AcquireResponse()
    assert len(owner.service.grants) == 0


async def test_bad_requests_get_their_status_and_the_server_keeps_serving(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    assert isinstance(
        await error_of(stub.Acquire(acquisition(owner, session, peer_epoch=1), timeout=WAIT_SECONDS)), WrongInstance
    )
    for keys in ([bytes(15)], [bytes(8)] * 2, [bytes(KEY_BYTES)] * (MAX_ACQUIRE_KEYS + 1)):
        assert isinstance(
            await error_of(stub.Acquire(acquisition(owner, session, chunk_keys=keys), timeout=WAIT_SECONDS)),
            BadChunkKey,
        )
    await stub.Release(pb.ReleaseRequest(grant_id="never was", session_id=session), timeout=WAIT_SECONDS)
    for name in ("", "never was"):
        assert isinstance(await error_of(stub.Acquire(acquisition(owner, name), timeout=WAIT_SECONDS)), SessionNotFound)
    assert isinstance(await error_of(stub.Allocate(pb.AllocateRequest(), timeout=WAIT_SECONDS)), WrongInstance)
    assert isinstance(await error_of(stub.Commit(pb.CommitRequest(), timeout=WAIT_SECONDS)), GrantNotFound)
    assert list((await stub.Acquire(acquisition(owner, session), timeout=WAIT_SECONDS)).present) == [0, 1, 2, 3]


async def test_a_peer_beyond_its_share_gets_a_retry_delay(
    stub: pb_grpc.PeerServiceAsyncStub, owner: Parts, session: str
) -> None:
    for key in KEYS[4:]:
        owner.put(key)
    more = [owner.put(key) for key in keys_of(9)[8:]]
    first = await stub.Acquire(acquisition(owner, session), timeout=WAIT_SECONDS)
    assert len(first.present) == 8  # a quarter of the pool
    other = acquisition(owner, session, chunk_keys=[chunk.key for chunk in more])
    assert isinstance(await error_of(stub.Acquire(other, timeout=WAIT_SECONDS)), Full)
    await stub.Release(pb.ReleaseRequest(grant_id=first.grant.grant_id, session_id=session), timeout=WAIT_SECONDS)
    assert len((await stub.Acquire(other, timeout=WAIT_SECONDS)).present) == 1


async def test_a_grant_is_released_by_the_session_that_has_it_and_unknown_to_every_other(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    response = await stub.Acquire(acquisition(owner, session), timeout=WAIT_SECONDS)
    assert len(response.grant.grant_id) >= 32
    others = ["", "never was", await session_of(owner, stub)]
    for other in others:
        request = pb.ReleaseRequest(grant_id=response.grant.grant_id, session_id=other, damaged=[0])
        assert await stub.Release(request, timeout=WAIT_SECONDS) == pb.ReleaseResponse()
    assert len(owner.service.grants) == 1
    assert [chunk.holds for chunk in owner.tier] == [1] * 4, "another session had a chunk looked at"
    await stub.Release(pb.ReleaseRequest(grant_id=response.grant.grant_id, session_id=session), timeout=WAIT_SECONDS)
    assert len(owner.service.grants) == 0


@pytest.mark.parametrize("name", ["", "n" * (MAX_ID_BYTES + 1), "forged\nline"])
async def test_a_caller_whose_name_cannot_be_an_instance_id_opens_no_session(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, name: str
) -> None:
    assert isinstance(
        await error_of(stub.Init(introduction(owner, instance_id=name), timeout=WAIT_SECONDS)), BadMessage
    )


async def test_a_session_continues_only_for_the_caller_that_opened_it(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    again = await stub.Init(introduction(owner, session_id=session), timeout=WAIT_SECONDS)
    assert again.session_id == session
    for changes in ({"epoch": 6}, {"instance_id": "another"}, {"session_id": "never was"}, {"session_id": ""}):
        changed = introduction(owner, **{"session_id": session, **changes})
        assert (await stub.Init(changed, timeout=WAIT_SECONDS)).session_id not in ("", "never was", session)


async def test_names_that_a_caller_gives_itself_add_nothing_to_its_share(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub
) -> None:
    keys = keys_of(32)
    for key in keys[4:]:
        owner.put(key)
    granted = 0
    for number in range(32):
        introduced = introduction(owner, instance_id=f"reader-{number}", channels=[])
        name = (await stub.Init(introduced, timeout=WAIT_SECONDS)).session_id
        wanted = acquisition(owner, name, chunk_keys=keys[granted:])
        with suppress(grpc.RpcError):
            granted += len((await stub.Acquire(wanted, timeout=WAIT_SECONDS)).present)
    assert granted == 16, "all of them together may keep half of the pool in place"


async def test_a_grant_that_is_never_released_expires() -> None:
    async with Parts("owner", grant_ttl_seconds=2.0) as owner, rpc.open_channel(owner.address) as channel:
        chunk = owner.put(KEYS[0])
        stub: pb_grpc.PeerServiceAsyncStub = pb_grpc.PeerServiceStub(channel)
        session = await session_of(owner, stub)
        await stub.Acquire(acquisition(owner, session, ttl=seconds(60)), timeout=WAIT_SECONDS)
        assert chunk.holds == 1
        await until(lambda: chunk.holds == 0)
        assert not len(owner.service.grants)


async def test_the_channel_makes_progress_while_there_are_grants_and_a_little_longer(
    owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, session: str
) -> None:
    async def polls() -> bool:
        """Whether the transfer thread wakes up by itself."""
        before = wake_ups("lmkv-nixl")
        await asyncio.sleep(0.3)
        return wake_ups("lmkv-nixl") - before > 5

    await eventually(polls, expected=False)
    response = await stub.Acquire(acquisition(owner, session), timeout=WAIT_SECONDS)
    await eventually(polls, expected=True)
    await stub.Release(pb.ReleaseRequest(grant_id=response.grant.grant_id, session_id=session), timeout=WAIT_SECONDS)
    assert owner.channels._serving, "a reader that asked late may still read"
    await eventually(polls, expected=False)


class Gone:
    """A listener that notes what left the tier."""

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []

    def stored(self, tier: str, chunk: CachedChunk) -> None: ...

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        self.keys.append(chunk.key)


@pytest.fixture
def gone() -> Gone:
    return Gone()


@pytest.fixture
async def watched_owner(gone: Gone) -> AsyncIterator[Parts]:
    async with Parts("owner", listener=gone) as parts:
        for key in KEYS:
            parts.put(key)
        yield parts
        await no_grants(parts)


@pytest.fixture
async def reader() -> AsyncIterator[Parts]:
    async with Parts("reader") as parts:
        yield parts
        parts.check_nothing_left()


async def test_chunks_damaged_at_their_owner_are_dropped_and_logged_there(
    watched_owner: Parts, reader: Parts, gone: Gone
) -> None:
    watched_owner.damage(KEYS[2])
    watched_owner.damage(KEYS[5])
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [watched_owner.holder(8)], 60.0, taken)
    assert (fetched.chunk_count, reader.pipeline.stats().checksum_mismatches) == (2, 2)
    await until(lambda: watched_owner.inspector.damaged_count == 2)
    assert sorted(gone.keys) == [KEYS[2], KEYS[5]]
    assert len(watched_owner.tier) == 6
    await until(lambda: not any(chunk.holds for chunk in watched_owner.tier))
    await no_grants(watched_owner)
    watched_owner.check_nothing_left()
    taken.let_go()


async def test_a_pinned_chunk_is_dropped_too_and_its_bytes_stay_until_the_pin_ends(
    watched_owner: Parts, reader: Parts
) -> None:
    chunk = watched_owner.tier.get(KEYS[2])
    assert chunk
    watched_owner.tier.pin([chunk])
    watched_owner.damage(KEYS[2])
    taken = Taken(reader)
    await reader.fetch(SMALL, KEYS, [watched_owner.holder(8)], 60.0, taken)
    await until(lambda: chunk.dropped)
    await until(lambda: chunk.holds == 1)
    watched_owner.tier.check([chunk])
    watched_owner.tier.unpin([chunk])
    taken.let_go()


async def test_nothing_is_dropped_on_a_peers_word_alone(watched_owner: Parts, reader: Parts, gone: Gone) -> None:
    connection = reader.connections.get(watched_owner.holder(8))
    assert connection
    await connection.connect(SMALL, 5.0)
    response = await connection.acquire(SMALL, KEYS, 5.0, 5.0)
    await connection.release(response.grant.grant_id, 5.0, [0, 1, 1, 7, 8, -1, 1 << 30])
    await connection.release(response.grant.grant_id, 5.0, [2])  # it has ended
    await until(lambda: not any(chunk.holds for chunk in watched_owner.tier), "the inspector has read all of them")
    await no_grants(watched_owner)
    assert (watched_owner.inspector.damaged_count, gone.keys, len(watched_owner.tier)) == (0, [], 8)


async def test_an_owner_that_ends_looks_no_further_and_holds_nothing() -> None:
    async with Parts("owner") as watched_owner:
        chunks = [watched_owner.put(key) for key in KEYS]
        watched_owner.damage(KEYS[7])
        watched_owner.inspector.inspect(chunks, "reader")
        await asyncio.sleep(0)
        await watched_owner.inspector.aclose()
        assert not any(chunk.holds for chunk in chunks)
        assert watched_owner.tier.get(KEYS[7]) is chunks[7]


async def test_transfers_that_are_not_verified_bring_what_there_is(watched_owner: Parts) -> None:
    async with Parts("reader", verify_transfers=False) as reader:
        watched_owner.damage(KEYS[2])
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [watched_owner.holder(8)], 60.0, taken)
        assert (fetched.chunk_count, fetched.error, reader.pipeline.stats().checksum_mismatches) == (8, None, 0)
        assert [reader.holds_right(chunk) for chunk in taken.chunks].count(False) == 1
        reader.tier.unhold(taken.chunks)
