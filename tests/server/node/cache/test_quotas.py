"""Quotas by owner: the own chunks leave first, and those of others only where the pool itself is full."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.quotas import SCANNED_AT_ONCE
from tests.server.node.cases import chunk_key

A, B = b"a" * 16, b"b" * 16
POOL_CHUNKS = 12
QUOTA_CHUNKS = 4


def make_tier(pool: int = POOL_CHUNKS, quota: int = QUOTA_CHUNKS) -> HostTier:
    return HostTier(pool * ALIGNMENT, quota_bytes=quota * ALIGNMENT)


def store(tier: HostTier, number: int, owner: bytes = b"", parent: int | None = None) -> Chunk:
    """Stores a chunk as an engine does."""
    reserved = tier.reserve(ALIGNMENT)
    assert reserved
    chunk = tier.commit(
        Chunk(
            key=chunk_key(number),
            fingerprint=bytes(16),
            offset=reserved.offset,
            size_bytes=ALIGNMENT,
            checksum=0,
            token_count=1,
            parent=None if parent is None else chunk_key(parent),
            owner=owner,
        )
    )
    assert chunk
    tier.keep_quota(chunk)
    tier.check()
    return chunk


def held(tier: HostTier) -> set[ChunkKey]:
    return {chunk.key for chunk in tier}


def keys(*numbers: int) -> set[ChunkKey]:
    return {chunk_key(number) for number in numbers}


def test_an_owner_that_floods_evicts_only_its_own_chunks() -> None:
    tier = make_tier()
    for number in range(QUOTA_CHUNKS):
        store(tier, number, A)
    for number in range(100, 200):
        store(tier, number, B)
    assert held(tier) == keys(*range(QUOTA_CHUNKS), *range(196, 200))
    assert tier.quotas is not None
    assert (tier.quotas.used_bytes(B), tier.quotas.evicted_count) == (QUOTA_CHUNKS * ALIGNMENT, 96)


def test_of_its_own_chunks_those_leave_first_that_were_not_used() -> None:
    tier = make_tier()
    chunks = [store(tier, number, A) for number in range(QUOTA_CHUNKS)]
    tier.use([chunks[0]])
    store(tier, 9, A)
    assert held(tier) == keys(0, 2, 3, 9)


def test_of_a_prompt_the_last_chunks_leave_first() -> None:
    tier = make_tier()
    for number in range(3):
        store(tier, number, A, parent=number - 1 if number else None)
    for number in (10, 11):
        store(tier, number, A)
    assert held(tier) == keys(0, 1, 10, 11)


def test_a_prompt_that_is_longer_than_the_quota_keeps_its_beginning() -> None:
    tier = make_tier()
    for number in range(20):
        store(tier, number, A, parent=number - 1 if number else None)
    assert held(tier) == keys(*range(QUOTA_CHUNKS))


def test_held_and_retained_chunks_stay_and_count() -> None:
    tier = make_tier()
    chunks = [store(tier, number, A) for number in range(QUOTA_CHUNKS)]
    tier.hold(chunks[:2])
    tier.retain([chunks[2].key], priority=1)
    for number in range(10, 14):
        store(tier, number, A)
    assert held(tier) == keys(0, 1, 2, 13)
    tier.unhold(chunks[:2])


def test_if_nothing_else_can_leave_the_stored_chunk_does() -> None:
    tier = make_tier(quota=1)
    tier.hold([store(tier, 0, A)])
    store(tier, 1, A)
    assert held(tier) == keys(0)


def test_chunks_that_were_fetched_behind_a_chunk_have_its_owner_and_others_have_none() -> None:
    tier = make_tier()
    store(tier, 0, A)
    assert store(tier, 1, parent=0).owner == A
    assert store(tier, 2).owner == b""
    assert tier.quotas is not None
    assert tier.quotas.used_bytes(A) == 2 * ALIGNMENT


def test_chunks_that_a_hint_keeps_count_for_its_owner_if_they_have_none() -> None:
    tier = make_tier()
    read, own = store(tier, 0), store(tier, 1, A)
    tier.adopt([read, own], B)
    tier.check()
    assert tier.quotas is not None
    assert (tier.quotas.used_bytes(A), tier.quotas.used_bytes(B)) == (ALIGNMENT, ALIGNMENT)


def test_a_store_looks_at_a_bounded_number_of_chunks() -> None:
    count = 2 * SCANNED_AT_ONCE
    tier = make_tier(pool=2 * count, quota=count)
    tier.hold([store(tier, number, A) for number in range(count)])
    asked: list[ChunkKey] = []
    chunk = store(tier, count + 1, A)
    assert chunk.dropped
    assert tier.quotas is not None

    class Busy:
        """Chunks of which none may be evicted."""

        def __contains__(self, key: ChunkKey) -> bool:
            return True

        def is_free(self, key: ChunkKey) -> bool:
            asked.append(key)
            return False

    assert list(tier.quotas.surplus(chunk, Busy())) == []
    assert len(asked) <= 2 * SCANNED_AT_ONCE + 1


def test_without_quotas_nothing_is_counted() -> None:
    tier = HostTier(4 * ALIGNMENT)
    for number in range(8):
        store(tier, number, A)
    assert tier.quotas is None
    assert len(tier) == 4


@dataclass(frozen=True)
class Act:
    """Something that happens to a tier."""

    kind: str
    number: int
    owner: bytes
    parent: int | None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            Act,
            st.sampled_from(["store", "store", "store", "use", "drop", "hold", "unhold", "retain"]),
            st.integers(0, 20),
            st.sampled_from([A, B, b""]),
            st.none() | st.integers(0, 20),
        ),
        max_size=80,
    )
)
def test_no_owner_has_more_than_its_quota_but_for_what_is_held(acts: list[Act]) -> None:
    tier = make_tier()
    on_hold: list[Chunk] = []
    for act in acts:
        chunk = tier.get(chunk_key(act.number))
        if act.kind == "store" and chunk is None and tier.has_room(ALIGNMENT):
            store(tier, act.number, act.owner, act.parent if act.parent != act.number else None)
        elif chunk and act.kind == "use":
            tier.use([chunk])
        elif chunk and act.kind == "drop" and not chunk.holds:
            tier.drop([chunk.key])
        elif chunk and act.kind == "hold":
            tier.hold([chunk])
            on_hold.append(chunk)
        elif act.kind == "unhold" and on_hold:
            tier.unhold([on_hold.pop()])
        elif chunk and act.kind == "retain":
            tier.retain([chunk.key], 1)
        tier.check([one for one in on_hold if one.dropped])
        assert tier.quotas is not None
        for owner in (A, B):
            assert tier.quotas.used_bytes(owner) <= QUOTA_CHUNKS * ALIGNMENT


@pytest.mark.parametrize("used", [[0], [0, 1], [1, 0]])
def test_uses_of_chunks_without_an_owner_make_no_difference(used: list[int]) -> None:
    tier = make_tier()
    chunks = [store(tier, 0), store(tier, 1, A)]
    tier.use([chunks[number] for number in used])
    tier.check()
