"""Chunks that are encoded for a transfer: what arrives is what the codec keeps, for engines that accept it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import pytest

from lmkv.config import NodeConfig
from lmkv.errors import BadMessage, ConfigError
from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import LEAST_READS
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.peers.connection import peer_chunk
from tests.server.node.cases import put
from tests.server.node.encoded_parts import EXACT, LOSSY, chunks_for, numbers
from tests.server.node.handoff_parts import follow
from tests.server.node.peer_parts import Parts, Taken, keys_of
from tests.waiting import until

COUNT = 16
KEYS = keys_of(COUNT)
SIZE = LOSSY.chunk_bytes


def parts(
    name: str, codec: str, spec: KvSpec = LOSSY, *, channel: str = "tcp", chunk_count: int = 256, ttl: float = 60.0
) -> Parts:
    return Parts(
        name,
        spec=spec,
        chunk_count=chunk_count,
        transfer_channel=channel,
        peer_codec=codec,
        grant_ttl_seconds=ttl,
    )


def fill(node: Parts) -> None:
    for number, key in enumerate(KEYS):
        put(
            node.tier,
            key,
            SIZE,
            fingerprint=node.spec.fingerprint,
            token_count=node.spec.chunk_size,
            pool=node.pool,
            content=numbers(number, SIZE),
        )


def content(node: Parts, chunk: Chunk) -> bytes:
    return bytes(node.pool.buffer[chunk.offset : chunk.offset + chunk.size_bytes])


async def fetched(owner: Parts, reader: Parts) -> tuple[list[bytes], int]:
    """Fetches all chunks; what arrived, whose checksums are right, and the bytes that travelled."""
    fill(owner)
    taken = Taken(reader)
    loaded = await reader.fetch(owner.spec, KEYS, [owner.holder(COUNT)], 60.0, taken)
    assert (loaded.chunk_count, loaded.error) == (COUNT, None)
    found = [content(reader, chunk) for chunk in taken.chunks]
    assert [checksum(one) for one in found] == [chunk.checksum for chunk in taken.chunks]
    reader.tier.unhold(taken.chunks)
    await until(lambda: len(owner.service.grants) == 0)
    for node in (owner, reader):
        node.tier.check()
        assert (node.tier.reserved_count, node.service.copied_bytes) == (0, 0)
        assert not any(chunk.holds for chunk in node.tier)
    return found, reader.pipeline.stats().transferred_bytes


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4", "zstd"])
@pytest.mark.parametrize("channel", ["tcp", "nixl"])
async def test_chunks_travel_encoded_and_arrive_as_the_codec_keeps_them(channel: str, codec: str) -> None:
    expected = chunks_for(codec)
    async with parts("owner", codec, channel=channel) as owner, parts("reader", codec, channel=channel) as reader:
        found, travelled = await fetched(owner, reader)
        assert all(expected.is_same(one, numbers(number, SIZE)) for number, one in enumerate(found))
        assert travelled < (0.95 if codec == "zstd" else 0.3) * COUNT * SIZE  # these elements have 32 bits


async def test_load_or_compute_counts_the_bytes_that_travel() -> None:
    """Of an engine that accepts rounded chunks these are fewer, and known when some were read; until then it loads."""
    async with parts("owner", "int8") as owner, parts("reader", "int8") as reader:
        holders = [owner.holder(COUNT)]
        peer = reader.connections.get(holders[0])
        assert peer
        for _ in range(LEAST_READS + 1):  # a measured peer: 1 MiB takes a second
            peer.bandwidth.record_read(1 << 20, 1.0, time.monotonic())

        def expected(spec: KvSpec) -> float | None:
            return reader.fetcher.expected_seconds(holders, spec, 1 << 20)

        assert expected(LOSSY) is None
        assert expected(EXACT) == pytest.approx(1.0)
        _, travelled = await fetched(owner, reader)
        share = travelled / (COUNT * SIZE)
        assert share < 0.3
        latency_seconds = peer.bandwidth.latency_seconds(time.monotonic())
        assert expected(EXACT) == pytest.approx(1.0 + latency_seconds)
        assert expected(LOSSY) == pytest.approx(share + latency_seconds)


@dataclass(frozen=True)
class Pair:
    """Two nodes between which chunks are to travel as they are."""

    owner: str = "int8"
    reader: str = "int8"
    spec: KvSpec = LOSSY
    channel: str = "tcp"


EXACT_PAIRS = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(Pair(spec=EXACT), id="engines that do not accept rounded chunks"),
        pytest.param(Pair(channel="shm"), id="shared memory"),
        pytest.param(Pair(owner="none"), id="a holder without a codec"),
        pytest.param(Pair(reader="none"), id="a reader without a codec"),
        pytest.param(Pair(owner="fp8"), id="another codec"),
    ],
)


@EXACT_PAIRS
async def test_otherwise_they_travel_exactly(pair: Pair) -> None:
    owned = parts("owner", pair.owner, pair.spec, channel=pair.channel)
    reading = parts("reader", pair.reader, pair.spec, channel=pair.channel)
    async with owned as owner, reading as reader:
        found, travelled = await fetched(owner, reader)
        assert found == [numbers(number, SIZE) for number in range(COUNT)]
        assert travelled == COUNT * SIZE


async def handed(prefill: Parts, decode: Parts) -> tuple[list[bytes], int]:
    """Hands all chunks over; what arrived, whose checksums are right, and the bytes that travelled."""
    fill(prefill)
    result = await prefill.hand("r", decode.instance_id, KEYS)
    assert (result.error, result.chunk_count) == (None, COUNT)
    taken = await follow(decode, "r", KEYS)
    found = [content(decode, chunk) for chunk in taken.chunks]
    assert [checksum(one) for one in found] == [chunk.checksum for chunk in taken.chunks]
    decode.tier.unhold(taken.chunks)
    decode.receiver.drop("r")
    await until(lambda: len(prefill.senders) == 0 and len(decode.receiver.handoffs) == 0)
    for node in (prefill, decode):
        node.tier.check()
        assert (node.tier.reserved_count, node.service.copied_bytes) == (0, 0)
        assert not any(chunk.holds for chunk in node.tier)
    travelled = decode.pipeline.stats().transferred_bytes
    assert result.size_bytes == travelled
    return found, travelled


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4", "zstd"])
@pytest.mark.parametrize("channel", ["tcp", "nixl"])
async def test_handoffs_are_encoded_as_fetches_are(channel: str, codec: str) -> None:
    expected = chunks_for(codec)
    async with parts("owner", codec, channel=channel) as prefill, parts("reader", codec, channel=channel) as decode:
        found, travelled = await handed(prefill, decode)
        assert all(expected.is_same(one, numbers(number, SIZE)) for number, one in enumerate(found))
        assert travelled < (0.95 if codec == "zstd" else 0.3) * COUNT * SIZE


@EXACT_PAIRS
async def test_otherwise_they_are_handed_off_exactly(pair: Pair) -> None:
    prefills = parts("owner", pair.owner, pair.spec, channel=pair.channel)
    decodes = parts("reader", pair.reader, pair.spec, channel=pair.channel)
    async with prefills as prefill, decodes as decode:
        found, travelled = await handed(prefill, decode)
        assert found == [numbers(number, SIZE) for number in range(COUNT)]
        assert travelled == COUNT * SIZE


async def test_a_prefill_that_encodes_what_was_not_asked_for_is_refused() -> None:
    async with parts("owner", "int8") as prefill, parts("reader", "none") as decode:
        fill(prefill)
        lending = prefill.service.lending
        context = prefill.senders._context
        prefill.senders._context = replace(
            context, grant_reads=lambda peer, chunks, _: lending(peer, chunks, "int8.16")
        )
        result = await prefill.hand("r", decode.instance_id, KEYS)
        assert isinstance(result.error, BadMessage)
        assert len(decode.tier) == 0
        await until(lambda: prefill.service.copied_bytes == 0)


async def test_a_handoff_that_is_cancelled_while_it_encodes_leaves_nothing() -> None:
    async with parts("owner", "int8") as prefill:
        fill(prefill)

        async def lend() -> None:
            async with prefill.service.lending("reader", list(prefill.tier), "int8.16"):
                raise AssertionError("it was cancelled before")

        lending = asyncio.create_task(lend())
        await asyncio.sleep(0)
        assert prefill.service.copied_bytes > 0
        lending.cancel()
        await asyncio.wait([lending])
        assert lending.cancelled()
        assert (prefill.service.copied_bytes, prefill.tier.reserved_count) == (0, 0)


async def test_beyond_an_eighth_of_the_pool_chunks_are_not_encoded() -> None:
    """The holder's memory for copies ends, not the fetch."""
    async with parts("owner", "int8", chunk_count=64) as owner, parts("reader", "int8") as reader:
        _, travelled = await fetched(owner, reader)
        assert 0.3 * COUNT * SIZE < travelled < COUNT * SIZE


class Garbage:
    """A codec of a peer that sends what is no chunk, with the right checksum."""

    def encode(self, chunk: Chunk, memory: memoryview) -> tuple[memoryview, int]:
        del chunk, memory
        return memoryview(bytes(4096)), 4096


async def test_what_cannot_be_decoded_is_never_committed() -> None:
    async with parts("owner", "int8") as owner, parts("reader", "int8") as reader:
        fill(owner)
        owner.service._copies._codec = Garbage()  # type: ignore[assignment]
        taken = Taken(reader)
        loaded = await reader.fetch(LOSSY, KEYS, [owner.holder(COUNT)], 60.0, taken)
        assert (loaded.chunk_count, len(reader.tier), reader.tier.reserved_count) == (0, 0, 0)
        assert reader.pipeline.stats().checksum_mismatches == COUNT
        await until(lambda: len(owner.service.grants) == 0)
        assert owner.service.copied_bytes == 0
        assert len(owner.tier) == COUNT, "its own chunks are intact"


async def test_copies_end_with_their_grant() -> None:
    async with parts("owner", "int8", ttl=0.05) as owner, parts("reader", "int8") as reader:
        fill(owner)
        peer = reader.connections.get(owner.holder(COUNT))
        assert peer
        await peer.connect(LOSSY, 10.0)
        response = await peer.acquire(LOSSY, KEYS, 60.0, 10.0, "int8.16")
        assert all(0 < chunk.extent.size_bytes < chunk.decoded_bytes == SIZE for chunk in response.grant.chunks)
        await until(lambda: len(owner.service.grants) == 0)
        owner.tier.check()
        assert (owner.tier.reserved_count, owner.service.copied_bytes) == (0, 0)


async def test_a_call_that_is_cancelled_while_it_encodes_leaves_nothing() -> None:
    async with parts("owner", "int8") as owner:
        fill(owner)
        session = owner.service.sessions.open("", "reader", 1)
        grant = owner.service.grants.acquire(session, list(owner.tier), time.monotonic(), 60.0)
        assert grant
        encoding = asyncio.create_task(owner.service.grants.encode(grant, "int8.16"))
        await asyncio.sleep(0)
        assert owner.service.copied_bytes > 0
        encoding.cancel()
        await asyncio.wait([encoding])
        assert encoding.cancelled()
        assert (owner.service.copied_bytes, len(owner.service.grants)) == (0, 0)
        owner.tier.check()
        assert owner.tier.reserved_count == 0


@pytest.mark.parametrize(
    ("size_bytes", "decoded_bytes"), [(SIZE, SIZE), (SIZE - 4, SIZE), (0, SIZE), (4096, SIZE + 8), (4096, -SIZE)]
)
def test_an_encoded_chunk_of_impossible_size_is_refused(size_bytes: int, decoded_bytes: int) -> None:
    extent = chunk_pb2.Extent(offset=0, size_bytes=size_bytes)
    granted = chunk_pb2.GrantedChunk(extent=extent, token_count=LOSSY.chunk_size, decoded_bytes=decoded_bytes)
    with pytest.raises(BadMessage, match="invalid extent"):
        peer_chunk(0, granted, LOSSY.chunk_size, LOSSY, [pb.Region(size_bytes=1 << 20)])


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="peer_codec must be one of none, fp8, int8, int4, zstd, not 'int7'"):
        replace(NodeConfig(), peer_codec="int7")
