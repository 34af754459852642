"""Pins against a tiny model, and what they promise about eviction, clearing and their bounds."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmkv.errors import BadMessage, BadSelection, ChunkNotFound, Full, PinNotFound
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.pins import MAX_ENDED, MAX_ID_BYTES, MAX_PINS, MAX_TTL_SECONDS, Pins
from tests.server.node.cases import admit, chunk_key, chunk_keys, clear
from tests.support.specs import small_spec

SPEC = small_spec()
CHUNKS = 6
NUMBERS = st.integers(0, CHUNKS + 1)
PIN_IDS = st.sampled_from("abc")


class AgainstModel(RuleBasedStateMachine):
    """The model knows numbers and times: which chunks are there, and which pin keeps which until when."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(CHUNKS * SPEC.chunk_bytes)
        self.pins = Pins(self.tier)
        self.now = 0.0
        self.pinned: dict[str, tuple[set[int], float]] = {}
        self.ended: set[str] = set()

    def here(self) -> set[int]:
        return {int.from_bytes(chunk.key, "big") for chunk in self.tier}

    def kept(self) -> set[int]:
        return set[int]().union(*(numbers for numbers, _ in self.pinned.values()))

    @rule(number=NUMBERS)
    def store(self, number: int) -> None:
        if number in self.here():
            return
        if len(self.kept()) == CHUNKS:
            assert self.tier.reserve(SPEC.chunk_bytes) is None
        else:
            admit(self.tier, SPEC, number)

    @rule(pin_id=PIN_IDS, numbers=st.lists(NUMBERS, max_size=4), ttl=st.integers(0, 5))
    def pin(self, pin_id: str, numbers: list[int], ttl: int) -> None:
        here = self.here()
        head = next((numbers[:at] for at, number in enumerate(numbers) if number not in here), numbers)
        revision = self.pins.revision
        if ttl == 0 or not head:
            with pytest.raises(ChunkNotFound if ttl else BadSelection):
                self.pins.pin(pin_id, chunk_keys(*numbers), self.now, ttl)
            assert self.pins.revision == revision
            return
        pin = self.pins.pin(pin_id, chunk_keys(*numbers), self.now, ttl)
        assert self.pins.revision > revision
        before, until = self.pinned.get(pin_id, (set[int](), 0.0))
        self.pinned[pin_id] = before | set(head), max(until, self.now + ttl)
        assert {chunk.key for chunk in pin.kept} == set(chunk_keys(*self.pinned[pin_id][0]))

    @rule(pin_id=PIN_IDS)
    def unpin(self, pin_id: str) -> None:
        if pin_id not in self.pinned and pin_id not in self.ended:
            with pytest.raises(PinNotFound):
                self.pins.unpin(pin_id)
            return
        assert (self.pins.unpin(pin_id) is not None) == (pin_id in self.pinned)
        self.pinned.pop(pin_id, None)
        self.ended.add(pin_id)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        due = {pin_id for pin_id, (_, until) in self.pinned.items() if until <= self.now}
        assert {pin.pin_id for pin in self.pins.expire(self.now)} == due
        for pin_id in due:
            del self.pinned[pin_id]
        self.ended |= due

    @rule()
    def clear(self) -> None:
        count = len(self.here() - self.kept())
        assert clear(self.tier, SPEC.fingerprint) == count
        assert self.here() == self.kept()

    @invariant()
    def agree(self) -> None:
        self.pins.check()
        self.tier.check()
        assert self.kept() <= self.here()
        assert {pin.pin_id for pin in self.pins} == set(self.pinned)
        assert len(self.pins) == len(self.pinned)
        assert self.pins.next_expiry() == min((until for _, until in self.pinned.values()), default=None)
        for number in self.here():
            chunk = self.tier.get(chunk_key(number))
            assert chunk
            assert chunk.pins == chunk.holds == sum(number in numbers for numbers, _ in self.pinned.values())


TestAgainstModel = AgainstModel.TestCase


def filled(count: int = 4) -> tuple[HostTier, Pins]:
    tier = HostTier(count * SPEC.chunk_bytes)
    for number in range(count):
        admit(tier, SPEC, number)
    return tier, Pins(tier)


def test_pinned_chunks_survive_any_pressure() -> None:
    tier, pins = filled()
    pins.pin("p", chunk_keys(0, 1), 0.0, 10)
    for number in range(10, 30):
        admit(tier, SPEC, number)
    assert tier.get(chunk_key(0))
    assert tier.get(chunk_key(1))
    assert tier.evicted_count == 20


def test_a_chunk_with_two_pins_stays_until_both_have_ended() -> None:
    tier, pins = filled()
    pins.pin("p", chunk_keys(0), 0.0, 10)
    pins.pin("q", chunk_keys(0), 0.0, 20)
    assert len(pins.expire(10.0)) == 1
    assert clear(tier, SPEC.fingerprint) == 3
    assert pins.unpin("q")
    assert clear(tier, SPEC.fingerprint) == 1
    assert not len(pins)


def test_a_pin_lasts_a_day_at_most() -> None:
    _, pins = filled()
    assert pins.pin("p", chunk_keys(0), 5.0, 1e9).expire_at == 5.0 + MAX_TTL_SECONDS


def test_there_is_a_most_of_pins_and_those_in_force_may_still_be_made_longer() -> None:
    _, pins = filled()
    for number in range(MAX_PINS):
        pins.pin(f"p{number}", chunk_keys(0), 0.0, 10)
    with pytest.raises(Full):
        pins.pin("one more", chunk_keys(0), 0.0, 10)
    assert pins.pin("p7", chunk_keys(0), 0.0, 20).expire_at == 20.0
    pins.check()
    pins.clear()
    assert len(pins) == 0


def test_the_ids_of_a_bounded_number_of_ended_pins_are_remembered() -> None:
    _, pins = filled()
    for number in range(MAX_ENDED + 1):
        pins.pin(f"p{number}", chunk_keys(0), 0.0, 10)
        assert pins.unpin(f"p{number}")
        pins.check()
    assert pins.unpin("p1") is None
    with pytest.raises(PinNotFound, match="lmkv pins"):
        pins.unpin("p0")


def test_of_ended_pins_the_one_that_ended_first_is_forgotten_first() -> None:
    """A pin that is made and ended again has ended last."""
    _, pins = filled()
    for number in [*range(MAX_ENDED), 0, MAX_ENDED]:
        pins.pin(f"p{number}", chunk_keys(0), 0.0, 10)
        assert pins.unpin(f"p{number}")
        pins.check()
    assert pins.unpin("p0") is None
    with pytest.raises(PinNotFound):
        pins.unpin("p1")


@pytest.mark.parametrize("pin_id", ["", "x" * (MAX_ID_BYTES + 1), "é" * MAX_ID_BYTES])
def test_an_id_that_cannot_travel_is_refused(pin_id: str) -> None:
    _, pins = filled()
    with pytest.raises(BadMessage, match="pin_id"):
        pins.pin(pin_id, chunk_keys(0), 0.0, 10)


def test_a_damaged_chunk_goes_although_it_is_pinned_and_may_come_again() -> None:
    tier, pins = filled()
    pin = pins.pin("p", chunk_keys(0, 1), 0.0, 10)
    old = tier.get(chunk_key(0))
    assert old
    assert tier.drop([old.key]) == 1
    assert [chunk.key for chunk in pin.kept] == chunk_keys(1)
    tier.drop(chunk_keys(3))
    new = admit(tier, SPEC, 0)
    pins.pin("p", chunk_keys(0, 1), 0.0, 10)
    pins.check()
    tier.check([old])
    assert new in pin.kept
    assert pins.unpin("p")
    pins.check()
    tier.check()


def test_a_chunk_counts_once_among_the_pins_of_an_owner() -> None:
    tier = HostTier(CHUNKS * SPEC.chunk_bytes)
    pins = Pins(tier)
    first, second = (admit(tier, SPEC, number) for number in (1, 2))
    pins.pin("a", chunk_keys(1, 2), 0.0, 9.0, owner=b"x")
    pins.pin("b", chunk_keys(1), 0.0, 9.0, owner=b"x")
    pins.pin("c", chunk_keys(1), 0.0, 9.0, owner=b"y")
    pins.pin("d", chunk_keys(1), 0.0, 9.0)
    pins.check()
    assert pins.owned_count == 3
    assert (pins.owned_bytes(b"x"), pins.owned_bytes(b"y")) == (2 * SPEC.chunk_bytes, SPEC.chunk_bytes)
    assert pins.owned_bytes() == 3 * SPEC.chunk_bytes
    assert pins.is_owned(b"x", second)
    assert not pins.is_owned(b"y", second)
    pins.unpin("a")
    pins.check()
    assert pins.is_owned(b"x", first)
    assert pins.owned_bytes(b"x") == SPEC.chunk_bytes
    pins.clear()
    pins.check()
    assert pins.owned_bytes() == 0


def test_the_revision_increases_with_each_pin_that_begins_or_ends() -> None:
    _, pins = filled()
    revisions = [pins.revision]
    pins.pin("p", chunk_keys(0), 0.0, 10)
    revisions.append(pins.revision)
    pins.pin("q", chunk_keys(1), 0.0, 10)
    revisions.append(pins.revision)
    pins.unpin("p")
    revisions.append(pins.revision)
    pins.expire(10.0)
    revisions.append(pins.revision)
    assert revisions == sorted(set(revisions))
