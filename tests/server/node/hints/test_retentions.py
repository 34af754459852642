"""Retentions against a tiny model: who is retained until when, within which bounds."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.hints.retentions import Retentions
from tests.server.node.cases import admit, chunk_key
from tests.support.specs import small_spec

SPEC = small_spec()
CHUNKS = 8
LIMIT = 4
NUMBERS = st.integers(0, 11)


def make(capacity: int = CHUNKS, limit: int = LIMIT) -> tuple[HostTier, Retentions]:
    events = CacheEvents()
    tier = HostTier(capacity * SPEC.chunk_bytes, events)
    retentions = Retentions(tier, limit * SPEC.chunk_bytes)
    events.subscribe(retentions)
    return tier, retentions


class AgainstModel(RuleBasedStateMachine):
    """The model knows the owner, the priority and the end of each retained chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.tier, self.retentions = make()
        self.now = 0.0
        self.retained: dict[int, tuple[bytes, int, float]] = {}

    def get(self, number: int) -> Chunk | None:
        return self.tier.get(chunk_key(number))

    @rule(number=NUMBERS)
    def store(self, number: int) -> None:
        if self.get(number) is None:
            admit(self.tier, SPEC, number)
            self.retained = {one: kept for one, kept in self.retained.items() if self.get(one)}

    @rule(
        numbers=st.lists(NUMBERS, max_size=4, unique=True),
        owner=st.sampled_from([b"a", b"b"]),
        priority=st.integers(1, 3),
        ttl=st.integers(1, 5),
    )
    def retain(self, numbers: list[int], owner: bytes, priority: int, ttl: int) -> None:
        chunks = [chunk for number in numbers if (chunk := self.get(number))]
        until = self.now + ttl
        room = 0
        for chunk in chunks:
            number = int.from_bytes(chunk.key, "big")
            if known := self.retained.get(number):
                self.retained[number] = known[0], max(known[1], priority), max(known[2], until)
            elif len(self.retained) == LIMIT or sum(one[0] == owner for one in self.retained.values()) == LIMIT // 2:
                break
            else:
                self.retained[number] = owner, priority, until
            room += 1
        assert self.retentions.room(chunks, owner) == room
        self.retentions.retain(chunks[:room], owner, priority, until)

    @rule(number=NUMBERS)
    def end(self, number: int) -> None:
        self.retentions.end(chunk_key(number))
        self.retained.pop(number, None)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.tier.drop([chunk_key(number)])
        self.retained.pop(number, None)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        due = [number for number, (_, _, until) in self.retained.items() if until <= self.now]
        next_expiry = self.retentions.next_expiry()
        assert not due or (next_expiry is not None and next_expiry <= self.now)
        assert self.retentions.expire(self.now) == len(due)
        for number in due:
            del self.retained[number]

    @invariant()
    def agrees(self) -> None:
        self.retentions.check()
        self.tier.check()
        assert len(self.retentions) == len(self.retained)
        assert self.retentions.size_bytes == len(self.retained) * SPEC.chunk_bytes
        assert all(self.tier._queue.is_retained(chunk_key(at)) == (at in self.retained) for at in range(12))


TestRetentions = AgainstModel.TestCase


def test_retained_chunks_survive_a_scan_and_leave_when_nothing_else_is_left() -> None:
    tier, retentions = make()
    kept = [admit(tier, SPEC, number) for number in range(2)]
    assert retentions.room(kept, b"a") == 2
    retentions.retain(kept, b"a", 1, 10.0)
    for number in range(100, 150):
        admit(tier, SPEC, number)
    assert [tier.get(chunk.key) for chunk in kept] == kept
    others = [chunk for chunk in tier if chunk not in kept]
    tier.hold(others)
    admit(tier, SPEC, 200)
    assert len(retentions) == 1


def test_a_caller_that_retains_again_and_again_leaves_no_trail() -> None:
    tier, retentions = make()
    chunk = admit(tier, SPEC, 0)
    for turn in range(1000):
        retentions.retain([chunk], b"a", 1, float(turn))
    retentions.check()
    assert len(retentions._due) <= 20


def test_callers_that_retain_several_chunks_again_and_again_leave_no_trail() -> None:
    tier, retentions = make()
    chunks = [admit(tier, SPEC, number) for number in range(LIMIT)]
    for turn in range(100):
        retentions.retain(chunks[:2], b"a", 1, float(turn))
        retentions.retain(chunks[2:], b"b", 1, float(turn))
        assert len(retentions._due) <= 2 * LIMIT + 16
    retentions.check()


def test_a_quota_with_a_byte_too_few_has_no_room() -> None:
    chunk_bytes = SPEC.chunk_bytes
    events = CacheEvents()
    tier = HostTier(CHUNKS * chunk_bytes, events)
    chunks = [admit(tier, SPEC, number) for number in range(2)]
    assert Retentions(tier, 4 * chunk_bytes).room(chunks, b"a") == 2
    assert Retentions(tier, 4 * chunk_bytes - 1).room(chunks, b"a") == 1


def test_ends_that_are_void_are_removed_once_they_are_more_than_half() -> None:
    tier, retentions = make()
    chunks = [admit(tier, SPEC, number) for number in range(2)]
    retentions.retain(chunks, b"a", 1, 0.0)
    lengths = []
    for turn in range(1, 100):
        retentions.retain(chunks[:1], b"a", 1, float(turn))
        lengths.append(len(retentions._due))
    assert max(lengths) == 20, "not more than twice the chunks and 16"
    assert lengths.count(2) <= 99 // 18 + 1, "not with every retention: it takes time"


def test_an_owner_retains_no_more_than_its_quota_also_before_it_has_stored_anything() -> None:
    tier = HostTier(CHUNKS * SPEC.chunk_bytes, quota_bytes=SPEC.chunk_bytes)
    retentions = Retentions(tier, CHUNKS * SPEC.chunk_bytes)
    chunks = [admit(tier, SPEC, number) for number in range(3)]
    assert retentions.room(chunks, b"a" * 16) == 1
