"""What a peer may offer: extents inside its regions, of the size of a chunk, for keys that were sent."""

from __future__ import annotations

import pytest

from lmkv.errors import BadMessage, Full
from lmkv.keys import ChunkKey
from lmkv.runtime.places import most_of, requester
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.peers import connection
from lmkv_server.node.peers.connection import PeerChunk, granted_chunks
from lmkv_server.node.serving.read_grants import SHARE
from tests.server.node.hybrid_engine import HYBRID
from tests.server.node.peer_parts import SMALL, Parts, keys_of
from tests.waiting import WAIT_SECONDS

REGION = pb.Region(address=1 << 40, size_bytes=8 * SMALL.chunk_bytes)


def offer(**changes: int) -> pb.AcquireResponse:
    extent = chunk_pb2.Extent(offset=SMALL.chunk_bytes, size_bytes=SMALL.chunk_bytes)
    granted = chunk_pb2.GrantedChunk(extent=extent, token_count=256)
    for field, value in changes.items():
        setattr(granted.extent if field in chunk_pb2.Extent.DESCRIPTOR.fields_by_name else granted, field, value)
    grant = chunk_pb2.Grant(grant_id="r1", chunks=[granted])
    return pb.AcquireResponse(grant=grant, present=[2])


def test_a_sound_offer_is_an_index_and_an_address_for_each_extent() -> None:
    response = offer()
    chunk = PeerChunk(
        index=7,
        address=REGION.address + SMALL.chunk_bytes,
        checksum=response.grant.chunks[0].checksum,
        token_count=256,
        size_bytes=SMALL.chunk_bytes,
    )
    assert granted_chunks(response, [5, 6, 7], SMALL, [REGION]) == [chunk]
    assert granted_chunks(pb.AcquireResponse(), [5, 6, 7], SMALL, [REGION]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"region": 1},
        {"region": -1},
        {"offset": -8},
        {"offset": REGION.size_bytes - SMALL.chunk_bytes + 8},
        {"size_bytes": SMALL.chunk_bytes - 8},
        {"size_bytes": 0, "token_count": 0},
        {"size_bytes": SMALL.size_bytes(257), "token_count": 257},
        {"token_count": -1},
    ],
)
def test_an_extent_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BadMessage):
        granted_chunks(offer(**changes), range(3), SMALL, [REGION])


def test_an_item_has_the_size_of_its_part() -> None:
    sizes = [HYBRID.part_bytes(part) for part in range(3)]
    for size_bytes in sizes:
        response = offer(size_bytes=size_bytes, token_count=HYBRID.chunk_size, offset=0)
        assert granted_chunks(response, range(3), HYBRID, [REGION])[0].size_bytes == size_bytes
        assert granted_chunks(response, range(3), HYBRID, [REGION], lambda _, size=size_bytes: size)  # type: ignore[misc]
        with pytest.raises(BadMessage):
            granted_chunks(response, range(3), HYBRID, [REGION], lambda index: sizes[index] + 8)
    for size_bytes, token_count in ((sizes[0] + 8, HYBRID.chunk_size), (sizes[0], HYBRID.chunk_size - 1)):
        with pytest.raises(BadMessage):
            granted_chunks(offer(size_bytes=size_bytes, token_count=token_count), range(3), HYBRID, [REGION])


@pytest.mark.parametrize("present", [[], [3], [-1], [1, 2]])
def test_a_grant_that_does_not_match_its_indices_is_refused(present: list[int]) -> None:
    response = offer()
    response.present[:] = present
    with pytest.raises(BadMessage):
        granted_chunks(response, range(3), SMALL, [REGION])


def test_no_chunk_is_offered_twice() -> None:
    response = offer()
    response.grant.chunks.append(response.grant.chunks[0])
    response.present[:] = [2, 2]
    with pytest.raises(BadMessage):
        granted_chunks(response, range(3), SMALL, [REGION])


async def test_an_engine_that_was_refused_is_the_next_to_get_a_grant_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Parts("owner", chunk_count=2 * SHARE) as owner, Parts("reader") as reading:
        keys = keys_of(3)
        for key in keys:
            owner.put(key)
        peer = reading.connections.get(owner.holder(3))
        assert peer
        await peer.connect(SMALL, WAIT_SECONDS)

        async def acquire(engine: str, key: ChunkKey) -> str:
            requester.set(engine)
            return (await peer.acquire(SMALL, [key], WAIT_SECONDS, WAIT_SECONDS)).grant.grant_id

        monkeypatch.setattr(connection, "TURN_SECONDS", WAIT_SECONDS)
        granted = [await acquire("engine:hog", key) for key in keys[:2]]
        with pytest.raises(Full):
            await acquire("engine:honest", keys[2])
        await peer.release(granted.pop(), WAIT_SECONDS)
        with pytest.raises(Full, match="next to get a grant") as refused:
            await acquire("engine:hog", keys[1])
        assert refused.value.retry_seconds == connection.FULL_SECONDS
        monkeypatch.setattr(connection, "TURN_SECONDS", 0.0)
        granted.append(await acquire("engine:hog", keys[1]))
        for grant_id in granted:
            await peer.release(grant_id, WAIT_SECONDS)
        assert not peer._grants.count("engine:hog")
        monkeypatch.setattr(connection, "FULL_SECONDS", 3.5)
        for number in range(most_of(connection.MAX_GRANTS)):
            peer._grants.take(number, "engine:hog")
        with pytest.raises(Full, match="its share") as refused:
            peer._take_place(object(), "engine:hog")
        assert refused.value.retry_seconds == 3.5
