"""Damage in an owner's memory: found by its reader, looked at and dropped by the owner itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_server.node.cache.events import CachedChunk
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of, no_grants
from tests.waiting import until

KEYS = keys_of(8)


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
async def owner(gone: Gone) -> AsyncIterator[Parts]:
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
    owner: Parts, reader: Parts, gone: Gone
) -> None:
    owner.damage(KEYS[2])
    owner.damage(KEYS[5])
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(8)], 60.0, taken)
    assert (fetched.chunk_count, reader.pipeline.stats().checksum_mismatches) == (2, 2)
    await until(lambda: owner.inspector.damaged_count == 2)
    assert sorted(gone.keys) == [KEYS[2], KEYS[5]]
    assert len(owner.tier) == 6
    await until(lambda: not any(chunk.holds for chunk in owner.tier))
    await no_grants(owner)
    owner.check_nothing_left()
    taken.let_go()


async def test_a_pinned_chunk_is_dropped_too_and_its_bytes_stay_until_the_pin_ends(owner: Parts, reader: Parts) -> None:
    chunk = owner.tier.get(KEYS[2])
    assert chunk
    owner.tier.pin([chunk])
    owner.damage(KEYS[2])
    taken = Taken(reader)
    await reader.fetch(SMALL, KEYS, [owner.holder(8)], 60.0, taken)
    await until(lambda: chunk.dropped)
    await until(lambda: chunk.holds == 1)
    owner.tier.check([chunk])
    owner.tier.unpin([chunk])
    taken.let_go()


async def test_nothing_is_dropped_on_a_peers_word_alone(owner: Parts, reader: Parts, gone: Gone) -> None:
    connection = reader.connections.get(owner.holder(8))
    assert connection
    await connection.connect(SMALL, 5.0)
    response = await connection.acquire(SMALL, KEYS, 5.0, 5.0)
    await connection.release(response.grant.grant_id, 5.0, [0, 1, 1, 7, 8, -1, 1 << 30])
    await connection.release(response.grant.grant_id, 5.0, [2])  # it has ended
    await until(lambda: not any(chunk.holds for chunk in owner.tier), "the inspector has read all of them")
    await no_grants(owner)
    assert (owner.inspector.damaged_count, gone.keys, len(owner.tier)) == (0, [], 8)


async def test_an_owner_that_ends_looks_no_further_and_holds_nothing() -> None:
    async with Parts("owner") as owner:
        chunks = [owner.put(key) for key in KEYS]
        owner.damage(KEYS[7])
        owner.inspector.inspect(chunks, "reader")
        await asyncio.sleep(0)
        await owner.inspector.aclose()
        assert not any(chunk.holds for chunk in chunks)
        assert owner.tier.get(KEYS[7]) is chunks[7]


async def test_transfers_that_are_not_verified_bring_what_there_is(owner: Parts) -> None:
    async with Parts("reader", verify_transfers=False) as reader:
        owner.damage(KEYS[2])
        taken = Taken(reader)
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(8)], 60.0, taken)
        assert (fetched.chunk_count, fetched.error, reader.pipeline.stats().checksum_mismatches) == (8, None, 0)
        assert [reader.holds_right(chunk) for chunk in taken.chunks].count(False) == 1
        reader.tier.unhold(taken.chunks)
