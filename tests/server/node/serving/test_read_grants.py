"""Read grants: every hold ends exactly once, and no caller can keep the whole tier in place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmkv.errors import Full, SessionNotFound
from lmkv.keys import ChunkKey
from lmkv.transfer.channel import ReadAccess
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.peers.connection import MAX_GRANTS
from lmkv_server.node.serving import read_grants
from lmkv_server.node.serving.read_grants import (
    MAX_INSTANCE_SESSIONS,
    PeerSession,
    PeerSessions,
    ReadGrant,
    ReadGrants,
)

CHUNK_COUNT = 16
BASE = 1 << 32
"""Where the tier is said to begin."""


def put(tier: HostTier, number: int, size_bytes: int = ALIGNMENT) -> Chunk | None:
    reserved = tier.reserve(size_bytes)
    if reserved is None:
        return None
    return tier.commit(
        Chunk(
            offset=reserved.offset,
            key=ChunkKey(number.to_bytes(16, "big")),
            fingerprint=b"f" * 16,
            size_bytes=size_bytes,
            checksum=0,
            token_count=1,
        )
    )


class Granting:
    """The grants of a tier, and sessions of callers by name; each caller has its own identity by default."""

    def __init__(self, tier: HostTier) -> None:
        self.access = ReadAccess()
        self.sessions = PeerSessions(self.access)
        self.grants = ReadGrants(tier, self.access, BASE)
        self._known: dict[str, PeerSession] = {}

    def session(self, name: str, identity: str | None = None) -> PeerSession:
        """The session of a caller."""
        if name not in self._known:
            self._known[name] = self.sessions.open(name if identity is None else identity, name, 1)
        return self._known[name]


def filled() -> tuple[HostTier, list[Chunk]]:
    tier = HostTier(CHUNK_COUNT * ALIGNMENT)
    chunks = [put(tier, number) for number in range(CHUNK_COUNT)]
    return tier, [chunk for chunk in chunks if chunk]


def test_a_granted_chunk_stays_in_place_until_the_grant_is_released() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    grants, session = granting.grants, granting.session("a")
    grant = grants.acquire(session, chunks[:2], now=0, ttl_seconds=5)
    assert grant
    assert grant.chunks == tuple(chunks[:2])
    assert grant.expire_at == 5
    tier.drop(chunk.key for chunk in chunks)
    assert tier.used_bytes == 2 * ALIGNMENT
    assert grants.get(grant.grant_id, session) is grant
    grants.release(grant)
    assert grants.get(grant.grant_id, session) is None
    assert tier.used_bytes == 0
    grants.check()


def test_a_grant_expires_once_its_time_is_up_and_not_before() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    grants = granting.grants
    first = grants.acquire(granting.session("a"), chunks[:1], now=0, ttl_seconds=5)
    grants.acquire(granting.session("b"), chunks[:2], now=1, ttl_seconds=5)
    assert first
    assert grants.next_expiry() == 5
    assert grants.expire(4.9) == 0
    assert grants.expire(5) == 1
    assert grants.get(first.grant_id, first.session) is None
    assert grants.next_expiry() == 6
    assert grants.expire(100) == 1
    assert grants.next_expiry() is None
    assert not len(grants)
    assert not any(chunk.holds for chunk in chunks)


def test_a_session_is_granted_its_share_and_then_refused_while_others_are_not() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    grants, session = granting.grants, granting.session("a")
    grant = grants.acquire(session, chunks, now=0, ttl_seconds=5)
    assert grant
    assert len(grant.chunks) == CHUNK_COUNT // 4
    with pytest.raises(Full):
        grants.acquire(session, chunks[4:], now=0, ttl_seconds=5)
    assert grants.acquire(session, chunks[:1], now=0, ttl_seconds=5), "it is in place already"
    assert grants.acquire(granting.session("b"), chunks[4:], now=0, ttl_seconds=5)
    grants.release(grant)
    assert grants.acquire(session, chunks[4:], now=0, ttl_seconds=5)
    grants.check()


def test_all_sessions_of_one_identity_keep_half_of_the_tier_in_place_whatever_they_call_themselves() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    grants = granting.grants
    taken = [grants.acquire(granting.session(name, "token:/t"), chunks, now=0, ttl_seconds=5) for name in "abcd"]
    assert sum(chunk.holds for chunk in chunks) == 16
    assert sum(chunk.holds > 0 for chunk in chunks) == 4, "the same chunks count once"
    for at, name in ((4, "efgh"), (8, "ijkl")):
        for one in name:
            session = granting.session(one, "token:/t")
            if at == 4:
                assert grants.acquire(session, chunks[4:8], now=0, ttl_seconds=5)
            else:
                with pytest.raises(Full):
                    grants.acquire(session, chunks[8:], now=0, ttl_seconds=5)
    assert grants.acquire(granting.session("another", "token:/u"), chunks[8:], now=0, ttl_seconds=5)
    grants.check()
    for grant in taken:
        assert grant
        grants.release(grant)
    assert grants.acquire(granting.session("i"), chunks[8:], now=0, ttl_seconds=5)
    grants.check()


def test_grants_cannot_be_guessed_and_are_unknown_to_other_sessions() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    own, other = granting.session("a", ""), granting.session("b", "")
    given = [granting.grants.acquire(own, chunks[:1], now=0, ttl_seconds=5) for _ in range(8)]
    ids = [grant.grant_id for grant in given if grant]
    assert len({grant_id[at : at + 8] for grant_id in ids for at in range(0, 32, 8)}) == 32
    for grant_id in ids:
        assert granting.grants.get(grant_id, own)
        assert granting.grants.get(grant_id, other) is None


def test_a_session_is_good_for_the_identity_that_opened_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_grants, "MAX_SESSIONS", 2)
    access = ReadAccess()
    sessions = PeerSessions(access)
    session = sessions.open("a", "n", 1)
    assert len(bytes.fromhex(session.session_id)) >= 16, "it cannot be guessed"
    assert sessions.open("a", "n", 1, session.session_id) is session
    assert sessions.get("a", session.session_id) is session
    for identity, instance_id, session_id in (("b", "n", session.session_id), ("a", "m", session.session_id)):
        assert sessions.open(identity, instance_id, 1, session_id).session_id != session.session_id
    with pytest.raises(SessionNotFound):
        sessions.get("b", session.session_id)
    for _ in range(4):  # another identity takes room of its own
        sessions.open("b", "n", 1)
    assert access.find(session.reader.token) is session.reader
    assert sessions.get("a", session.session_id) is session
    sessions.open("a", "n", 2)
    assert sessions.find("a", session.session_id) is session, "it was used last"
    for epoch in (3, 4):
        sessions.open("a", "n", epoch)
    assert sessions.find("a", session.session_id) is None
    assert access.find(session.reader.token) is None


def test_an_instance_that_opens_sessions_again_and_again_keeps_the_last_ones_only() -> None:
    access = ReadAccess()
    sessions = PeerSessions(access)
    neighbour = sessions.open("", "neighbour", 1)
    opened = [sessions.open("", "restarting", epoch) for epoch in range(10 * MAX_INSTANCE_SESSIONS)]
    kept = [session for session in opened if access.find(session.reader.token)]
    assert kept == opened[-MAX_INSTANCE_SESSIONS:]
    assert [session for session in opened if sessions.find("", session.session_id)] == kept
    sessions.open("", "restarting", 0)
    assert not sessions.find("", kept[0].session_id), "it was not used for longest"
    assert sessions.get("", neighbour.session_id) is neighbour


def test_what_is_granted_may_be_read_until_the_grant_ends() -> None:
    tier, chunks = filled()
    granting = Granting(tier)
    session, other = granting.session("a"), granting.session("b")
    grant = granting.grants.acquire(session, chunks[1:3], now=0, ttl_seconds=5)
    assert grant
    access, name = granting.access, grant.grant_id.encode()
    inside = [(BASE + chunk.offset, chunk.size_bytes) for chunk in chunks[1:3]]
    assert access.check(session.reader, name, inside)
    assert not access.check(other.reader, name, inside)
    assert not access.check(session.reader, name, [*inside, (BASE + chunks[3].offset, 1)])
    granting.grants.expire(5)
    assert not access.check(session.reader, name, inside)
    assert access.refused_count == 3


def test_a_chunk_larger_than_the_share_can_still_be_granted() -> None:
    tier = HostTier(CHUNK_COUNT * ALIGNMENT)
    chunk = put(tier, 1, CHUNK_COUNT // 2 * ALIGNMENT)
    assert chunk
    granting = Granting(tier)
    assert granting.grants.acquire(granting.session("a"), [chunk], now=0, ttl_seconds=5)
    granting.grants.check()


def test_grants_are_limited_in_number_and_none_is_given_for_nothing() -> None:
    tier = HostTier(CHUNK_COUNT * MAX_GRANTS * ALIGNMENT)
    chunk = put(tier, 1)
    assert chunk
    granting = Granting(tier)
    grants, session = granting.grants, granting.session("a")
    assert grants.acquire(session, [], now=0, ttl_seconds=5) is None
    for _ in range(MAX_GRANTS):
        assert grants.acquire(session, [chunk], now=0, ttl_seconds=5)
    with pytest.raises(Full):
        grants.acquire(session, [chunk], now=0, ttl_seconds=5)
    grants.clear()
    assert len(grants) == chunk.holds == 0


class Machine(RuleBasedStateMachine):
    """Grants, releases and expiries of all kinds, on a tier that evicts and drops meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(CHUNK_COUNT * ALIGNMENT)
        self.granting = Granting(self.tier)
        self.grants = self.granting.grants
        self.now = 0.0
        self.given: dict[str, ReadGrant] = {}

    @rule(number=st.integers(0, 40), pages=st.integers(1, 4))
    def commit(self, number: int, pages: int) -> None:
        put(self.tier, number, pages * ALIGNMENT)

    @rule(number=st.integers(0, 40))
    def drop(self, number: int) -> None:
        self.tier.drop([ChunkKey(number.to_bytes(16, "big"))])

    @rule(
        peer=st.sampled_from(["a1", "a2", "b1"]),
        start=st.integers(0, 15),
        count=st.integers(0, 6),
        ttl=st.integers(1, 9),
    )
    def acquire(self, peer: str, start: int, count: int, ttl: int) -> None:
        wanted = list(self.tier)[start : start + count]
        try:
            grant = self.grants.acquire(self.granting.session(peer, peer[0]), wanted, self.now, ttl)
        except Full:
            return
        assert (grant is None) == (not wanted)
        if grant:
            assert grant.chunks == tuple(wanted[: len(grant.chunks)])
            assert grant.expire_at == self.now + ttl
            self.given[grant.grant_id] = grant

    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        if self.given:
            grant_id = sorted(self.given)[pick % len(self.given)]
            self.grants.release(self.given.pop(grant_id))

    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        due = [grant_id for grant_id, grant in self.given.items() if grant.expire_at <= self.now]
        assert self.grants.expire(self.now) == len(due)
        for grant_id in due:
            grant = self.given.pop(grant_id)
            assert self.grants.get(grant_id, grant.session) is None

    @invariant()
    def holds_are_those_of_the_grants(self) -> None:
        self.grants.check()
        assert len(self.grants) == len(self.given)
        assert self.grants.next_expiry() == min((grant.expire_at for grant in self.given.values()), default=None)
        granted = [chunk for grant in self.given.values() for chunk in grant.chunks]
        assert sum(chunk.holds for chunk in {id(chunk): chunk for chunk in granted}.values()) == len(granted)
        assert all(not chunk.holds for chunk in self.tier if chunk not in granted)
        dropped = {id(chunk): chunk for chunk in granted if chunk.dropped}
        self.tier.check(dropped.values())


TestAnySequence = Machine.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
