"""Read grants: every hold ends exactly once, and nobody can keep the whole tier in place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmkv.errors import Full
from lmkv.keys import ChunkKey
from lmkv_server.node.extents import ALIGNMENT
from lmkv_server.node.host_tier import Chunk, HostTier
from lmkv_server.node.read_grants import MAX_GRANTS, ReadGrants

CHUNK_COUNT = 16


def put(tier: HostTier, number: int, size_bytes: int = ALIGNMENT) -> Chunk | None:
    reserved = tier.reserve(size_bytes)
    if reserved is None:
        return None
    return tier.commit(
        reserved.offset,
        key=ChunkKey(number.to_bytes(16, "big")),
        fingerprint=b"f" * 16,
        size_bytes=size_bytes,
        checksum=0,
        token_count=1,
    )


def filled() -> tuple[HostTier, list[Chunk]]:
    tier = HostTier(CHUNK_COUNT * ALIGNMENT)
    chunks = [put(tier, number) for number in range(CHUNK_COUNT)]
    return tier, [chunk for chunk in chunks if chunk]


def test_a_granted_chunk_stays_in_place_until_the_grant_is_released() -> None:
    tier, chunks = filled()
    grants = ReadGrants(tier)
    grant = grants.acquire("a", chunks[:2], now=0, ttl_seconds=5)
    assert grant
    assert grant.chunks == tuple(chunks[:2])
    assert grant.expire_at == 5
    tier.drop(chunk.key for chunk in chunks)
    assert tier.used_bytes == 2 * ALIGNMENT
    assert grants.release(grant.grant_id)
    assert not grants.release(grant.grant_id)
    assert tier.used_bytes == 0
    grants.check()


def test_a_grant_expires_once_its_time_is_up_and_not_before() -> None:
    tier, chunks = filled()
    grants = ReadGrants(tier)
    first = grants.acquire("a", chunks[:1], now=0, ttl_seconds=5)
    grants.acquire("b", chunks[:2], now=1, ttl_seconds=5)
    assert first
    assert grants.next_expiry() == 5
    assert grants.expire(4.9) == 0
    assert grants.expire(5) == 1
    assert not grants.release(first.grant_id)
    assert grants.next_expiry() == 6
    assert grants.expire(100) == 1
    assert grants.next_expiry() is None
    assert grants.expired_count == 2
    assert not any(chunk.holds for chunk in chunks)


def test_a_peer_is_granted_its_share_and_then_refused_while_others_are_not() -> None:
    tier, chunks = filled()
    grants = ReadGrants(tier)
    grant = grants.acquire("a", chunks, now=0, ttl_seconds=5)
    assert grant
    assert len(grant.chunks) == CHUNK_COUNT // 4
    with pytest.raises(Full):
        grants.acquire("a", chunks[:1], now=0, ttl_seconds=5)
    assert grants.acquire("b", chunks, now=0, ttl_seconds=5)
    grants.release(grant.grant_id)
    assert grants.acquire("a", chunks[:1], now=0, ttl_seconds=5)
    grants.check()


def test_a_chunk_larger_than_the_share_can_still_be_granted() -> None:
    tier = HostTier(CHUNK_COUNT * ALIGNMENT)
    chunk = put(tier, 1, CHUNK_COUNT // 2 * ALIGNMENT)
    assert chunk
    grants = ReadGrants(tier)
    assert grants.acquire("a", [chunk], now=0, ttl_seconds=5)
    grants.check()


def test_grants_are_limited_in_number_and_none_is_given_for_nothing() -> None:
    tier = HostTier(CHUNK_COUNT * MAX_GRANTS * ALIGNMENT)
    chunk = put(tier, 1)
    assert chunk
    grants = ReadGrants(tier)
    assert grants.acquire("a", [], now=0, ttl_seconds=5) is None
    for _ in range(MAX_GRANTS):
        assert grants.acquire("a", [chunk], now=0, ttl_seconds=5)
    with pytest.raises(Full):
        grants.acquire("a", [chunk], now=0, ttl_seconds=5)
    grants.clear()
    assert len(grants) == chunk.holds == 0


class Machine(RuleBasedStateMachine):
    """Grants, releases and expiries of all kinds, on a tier that evicts and drops meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(CHUNK_COUNT * ALIGNMENT)
        self.grants = ReadGrants(self.tier)
        self.now = 0.0
        self.given: dict[str, tuple[float, tuple[Chunk, ...]]] = {}
        self.ended: list[str] = []

    @rule(number=st.integers(0, 40), pages=st.integers(1, 4))
    def commit(self, number: int, pages: int) -> None:
        put(self.tier, number, pages * ALIGNMENT)

    @rule(number=st.integers(0, 40))
    def drop(self, number: int) -> None:
        self.tier.drop([ChunkKey(number.to_bytes(16, "big"))])

    @rule(peer=st.sampled_from("abc"), start=st.integers(0, 15), count=st.integers(0, 6), ttl=st.integers(1, 9))
    def acquire(self, peer: str, start: int, count: int, ttl: int) -> None:
        wanted = list(self.tier)[start : start + count]
        try:
            grant = self.grants.acquire(peer, wanted, self.now, ttl)
        except Full:
            return
        assert (grant is None) == (not wanted)
        if grant:
            assert grant.chunks == tuple(wanted[: len(grant.chunks)])
            self.given[grant.grant_id] = (self.now + ttl, grant.chunks)

    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        if self.given:
            grant_id = sorted(self.given)[pick % len(self.given)]
            assert self.grants.release(grant_id)
            del self.given[grant_id]
            self.ended.append(grant_id)

    @rule(pick=st.integers(0, 9))
    def release_again(self, pick: int) -> None:
        if self.ended:
            assert not self.grants.release(self.ended[pick % len(self.ended)])

    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        due = [grant_id for grant_id, (expire_at, _) in self.given.items() if expire_at <= self.now]
        assert self.grants.expire(self.now) == len(due)
        for grant_id in due:
            del self.given[grant_id]
            self.ended.append(grant_id)

    @invariant()
    def holds_are_those_of_the_grants(self) -> None:
        self.grants.check()
        assert len(self.grants) == len(self.given)
        assert self.grants.next_expiry() == min((at for at, _ in self.given.values()), default=None)
        granted = [chunk for _, chunks in self.given.values() for chunk in chunks]
        assert sum(chunk.holds for chunk in {id(chunk): chunk for chunk in granted}.values()) == len(granted)
        assert all(not chunk.holds for chunk in self.tier if chunk not in granted)
        dropped = {id(chunk): chunk for chunk in granted if chunk.dropped}
        self.tier.check(dropped.values())


TestAnySequence = Machine.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
