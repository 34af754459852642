"""Messages of handoffs that a node refuses, and who may send them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import (
    BadMessage,
    GrantNotFound,
)
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv_server.node.handoff.state import MAX_NAME, HandoffState
from tests.server.node.handoff_parts import state_of
from tests.server.node.peer_parts import SMALL, Parts, keys_of
from tests.waiting import WAIT_SECONDS

KEYS = keys_of(8)
FOREVER = 10_000.0


@pytest.fixture
async def stub(decode: Parts) -> AsyncIterator[pb_grpc.PeerServiceAsyncStub]:
    async with rpc.open_channel(decode.address) as channel:
        yield pb_grpc.PeerServiceStub(channel)


async def session_of(stub: pb_grpc.PeerServiceAsyncStub, instance_id: str = "prefill") -> str:
    request = pb.InitRequest(instance_id=instance_id, epoch=1, spec=SMALL.to_proto())
    return (await stub.Init(request, timeout=WAIT_SECONDS)).session_id


def announcement(decode: Parts, prefill: Parts, **changes: object) -> pb.AllocateRequest:
    """A sound `Allocate`, but for the changes."""
    fields: dict[str, object] = {
        "instance_id": "prefill",
        "epoch": prefill.epoch,
        "peer_epoch": decode.epoch,
        "handoff_id": "r",
        "fingerprint": SMALL.fingerprint,
        "chunk_keys": KEYS,
        "token_count": 8 * SMALL.chunk_size,
    }
    return pb.AllocateRequest(**(fields | changes))  # type: ignore[arg-type]


def offered(token_count: int, **place: int) -> chunk_pb2.GrantedChunk:
    return chunk_pb2.GrantedChunk(extent=chunk_pb2.Extent(**place), token_count=token_count)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peer_epoch": 1}, "WRONG_INSTANCE"),
        ({"handoff_id": ""}, "BAD_MESSAGE"),
        ({"token_count": 1}, "BAD_MESSAGE"),
        ({"token_count": -5}, "BAD_MESSAGE"),
        ({"chunk_keys": [b"123"]}, "BAD_CHUNK_KEY"),
        ({"chunk_keys": [KEYS[0][:8], KEYS[0][8:], *KEYS[1:]]}, "BAD_CHUNK_KEY"),
        ({"chunk_keys": []}, "BAD_MESSAGE"),
        ({"fingerprint": b"?" * 16}, "KV_SPEC_MISMATCH"),
        ({"instance_id": "stranger"}, "INSTANCE_NOT_FOUND"),
        ({"epoch": 1}, "INSTANCE_NOT_FOUND"),
        ({"handoff_id": "r" * (MAX_NAME + 1)}, "BAD_MESSAGE"),
        ({"handoff_id": "r\n"}, "BAD_MESSAGE"),
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
        pb.CommitRequest(indices=[8], chunks=[offered(256, size_bytes=SMALL.chunk_bytes)]),
        pb.CommitRequest(indices=[-1], chunks=[offered(256, size_bytes=SMALL.chunk_bytes)]),
        pb.CommitRequest(indices=[0], chunks=[offered(255, size_bytes=SMALL.chunk_bytes)]),
        pb.CommitRequest(indices=[0], chunks=[offered(256, size_bytes=64)]),
        pb.CommitRequest(indices=[0], chunks=[offered(256, offset=1 << 40, size_bytes=SMALL.chunk_bytes)]),
        pb.CommitRequest(indices=[0], chunks=[offered(256, region=1, size_bytes=SMALL.chunk_bytes)]),
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
