"""The chunk table does what a dictionary of sets does, with few keys and with many, and gives its memory back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from hashlib import sha256

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_kernels import ChunkTable

TIERS = range(1, ChunkTable.TIER_COUNT + 1)
CHUNK = 256


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()[:16]


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def live_slot(table: ChunkTable) -> int:
    slot = table.open_slot()
    table.show(slot)
    return slot


def walk(table: ChunkTable, limit: int) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Slot, tier, fingerprint and key of all that a walk finds."""
    cursor = 0
    while True:
        cursor, parts = table.scan(cursor, limit)
        for slot, tier, fingerprint, found in parts:
            yield from ((slot, tier, fingerprint, one) for one in split(found))
        if not cursor:
            return


def sweep(table: ChunkTable, limit: int = 1000) -> None:
    while table.sweep(limit):
        table.check()


def test_only_what_changes_is_returned() -> None:
    table = ChunkTable()
    slot = live_slot(table)
    assert table.admit(slot, 2, b"f", CHUNK, keys(1, 2)) == keys(1, 2)
    assert table.admit(slot, 2, b"f", CHUNK, keys(2, 3, 3)) == keys(3)
    assert table.admit(slot, 3, b"f", CHUNK, keys(3)) == keys(3)
    assert table.evict(slot, 2, keys(4, 3, 1, 1)) == keys(3, 1)
    assert table.evict(slot, 2, keys(1)) == b""
    assert table.admit(slot, 1, b"f", CHUNK, b"") == b""
    assert [count for _, _, count, _ in table.holdings(slot)] == [1, 1]
    table.check()


def test_neighbours_share_a_set_of_holders() -> None:
    table = ChunkTable()
    slots = [live_slot(table) for _ in range(100)]
    for count, slot in enumerate(slots, 1):
        table.admit(slot, 2, b"f", CHUNK, keys(*range(50)))
        assert table.set_count == 1
        assert len(table.lookup(keys(*range(50)))) == count
    table.evict(slots[50], 2, keys(7))
    assert table.set_count == 2
    table.check()


def test_the_first_living_holder_says_what_a_chunk_is() -> None:
    table = ChunkTable()
    first, second = live_slot(table), live_slot(table)
    table.admit(first, 2, b"one", CHUNK, keys(1, 2), [(1, 12)])
    table.admit(second, 2, b"two", 16, keys(1, 2))
    assert table.match_at(second, 2, keys(1, 2)) == (2, CHUNK + 12)
    assert table.fingerprint_of(key(1)) == b"one"
    assert table.holdings(second)[0][:3] == (2, b"one", 2)
    table.retire(first)
    third = live_slot(table)
    table.retire(second)
    assert table.fingerprint_of(key(1)) is None
    table.admit(third, 2, b"two", 16, keys(1))
    assert table.fingerprint_of(key(1)) == b"two"
    assert table.match_at(third, 0, keys(1)) == (1, 16)
    table.check()


def test_a_staged_slot_is_visible_only_on_request() -> None:
    table = ChunkTable()
    slot = table.open_slot()
    table.admit(slot, 2, b"f", CHUNK, keys(1, 2))
    assert table.lookup(keys(1)) == []
    assert list(walk(table, 10)) == []
    assert table.fingerprint_of(key(1)) is None
    assert table.held(slot, 2, keys(1, 3)) == b"\1\0"
    table.show(slot)
    assert table.lookup(keys(1, 2)) == [(slot, 2, 2 * CHUNK, [(2, 2, 2 * CHUNK)])]
    assert len(list(walk(table, 10))) == 2


def test_a_slot_is_used_again_only_after_a_sweep_that_began_later() -> None:
    table = ChunkTable()
    first, second = live_slot(table), live_slot(table)
    for slot in (first, second):
        table.admit(slot, 2, b"f", CHUNK, keys(*range(50)))
    table.retire(first)
    assert table.sweep(10)
    table.retire(second)
    assert table.open_slot() not in (first, second)
    sweep(table, 10)
    assert len(table) == 0
    assert table.set_count == 0
    assert {table.open_slot(), table.open_slot()} == {first, second}


def test_fingerprints_that_are_gone_make_room_for_others() -> None:
    table = ChunkTable()
    slot = live_slot(table)
    for number in range(ChunkTable.MAX_SPECS):
        table.admit(slot, 2, b"spec %d" % number, CHUNK, key(number))
    with pytest.raises(OverflowError, match="too many specs"):
        table.admit(slot, 2, b"one more", CHUNK, key(-1 % 2**63))
    assert len(table) == ChunkTable.MAX_SPECS
    table.evict(slot, 2, key(77))
    table.admit(slot, 2, b"one more", CHUNK, key(77))
    assert table.fingerprint_of(key(77)) == b"one more"
    assert table.fingerprint_of(key(78)) == b"spec 78"
    table.check()


@pytest.mark.parametrize("spread", [lambda n: n.to_bytes(16, "big"), lambda n: n.to_bytes(16, "little"), key])
def test_any_keys_are_spread_well_enough(spread: Callable[[int], bytes]) -> None:
    table = ChunkTable()
    slot = live_slot(table)
    packed = b"".join(spread(number) for number in range(100_000))
    assert table.admit(slot, 2, b"f", CHUNK, packed) == packed
    assert table.match_at(slot, 2, packed) == (100_000, 100_000 * CHUNK)
    table.check()
    assert table.evict(slot, 2, packed) == packed
    assert len(table) == 0
    table.check()


def test_a_walk_sees_all_that_stays_while_everything_else_changes() -> None:
    table = ChunkTable()
    stays, moves = live_slot(table), live_slot(table)
    table.admit(stays, 2, b"f", CHUNK, keys(*range(5000)))
    table.admit(moves, 3, b"g", CHUNK, keys(*range(2500, 7500)))
    randomness = random.Random(1)
    seen = set()
    cursor = 0
    while True:
        cursor, parts = table.scan(cursor, 500)
        assert sum(len(found) for *_, found in parts) < 16 * 600
        seen |= {one for slot, tier, fingerprint, found in parts if slot == stays for one in split(found)}
        if not cursor:
            break
        some = keys(*(randomness.randrange(10_000) for _ in range(500)))
        table.admit(moves, 3, b"g", CHUNK, some)
        table.evict(moves, 3, keys(*(randomness.randrange(10_000) for _ in range(500))))
    assert seen == {key(number) for number in range(5000)}
    assert table.scan(1 << 40, 10) == (0, [])


def test_nonsense_is_refused_and_changes_nothing() -> None:
    table = ChunkTable()
    slot, retired = live_slot(table), table.open_slot()
    table.retire(retired)
    for wrong in (
        lambda: table.admit(slot, 0, b"f", CHUNK, key(1)),
        lambda: table.admit(slot, 5, b"f", CHUNK, key(1)),
        lambda: table.admit(7, 2, b"f", CHUNK, key(1)),
        lambda: table.admit(retired, 2, b"f", CHUNK, key(1)),
        lambda: table.admit(slot, 2, b"f", CHUNK, key(1)[:15]),
        lambda: table.admit(slot, 2, b"f", ChunkTable.MAX_TOKENS + 1, key(1)),
        lambda: table.admit(slot, 2, b"f", CHUNK, key(1), [(1, 12)]),
        lambda: table.admit(slot, 2, b"f", CHUNK, keys(1, 2), [(1, 12), (0, 12)]),
        lambda: table.admit(slot, 2, b"f", CHUNK, keys(1, 2), [(1, 12), (1, 13)]),
        lambda: table.admit(slot, 2, b"f", CHUNK, key(1), [(0, ChunkTable.MAX_TOKENS + 1)]),
        lambda: table.evict(slot, 5, key(1)),
        lambda: table.evict(slot, 2, b"x"),
        lambda: table.lookup(b"x"),
        lambda: table.match_at(9, 2, key(1)),
        lambda: table.match_at(slot, -1, key(1)),
        lambda: table.held(slot, 5, key(1)),
        lambda: table.holdings(9),
        lambda: table.show(retired),
        lambda: table.retire(retired),
    ):
        with pytest.raises(ValueError):
            wrong()
    table.check()
    assert len(table) == 0


def test_many_keys_come_and_go_as_in_a_dictionary() -> None:
    randomness = random.Random(2)
    table = ChunkTable()
    slots = [live_slot(table) for _ in range(5)]
    model: dict[int, set[int]] = {slot: set() for slot in slots}
    for round_ in range(60):
        slot = randomness.choice(slots)
        start = randomness.randrange(30_000)
        some = range(start, start + randomness.randrange(6_000))
        if randomness.random() < 0.6:
            assert len(table.admit(slot, 2, b"f", CHUNK, keys(*some))) == 16 * len(set(some) - model[slot])
            model[slot] |= set(some)
        else:
            assert len(table.evict(slot, 2, keys(*some))) == 16 * len(set(some) & model[slot])
            model[slot] -= set(some)
        if round_ % 10 == 9:
            table.check()
            assert len(table) == len(set().union(*model.values()))
            for slot, held in model.items():
                numbers = range(0, 36_000, 7)
                assert list(table.held(slot, 2, keys(*numbers))) == [number in held for number in numbers]


KEYS = [key(number) for number in range(10)]


class AgainstModel(RuleBasedStateMachine):
    """Any sequence of calls with many slots, against a set of keys for each of their tiers."""

    numbers = st.lists(st.integers(0, len(KEYS) - 1), max_size=8)

    def __init__(self) -> None:
        super().__init__()
        self.table = ChunkTable()
        self.held: dict[int, dict[int, set[int]]] = {}
        self.live: set[int] = set()
        for _ in range(70):  # so that sets of holders have many members
            slot = live_slot(self.table)
            self.held[slot] = {}
            self.live.add(slot)
            self.admit_to(slot, 1 + slot % 4, [slot % 3, 1 + slot % 3])

    def admit_to(self, slot: int, tier: int, numbers: list[int]) -> None:
        # A chunk's tokens and spec depend on its key alone, as in life.
        for spec in (0, 1):
            of_spec = [number for number in numbers if number % 2 == spec]
            partials = [(index, 1 + number) for index, number in enumerate(of_spec) if number % 3 == 2]
            gained = self.table.admit(slot, tier, bytes([spec]), CHUNK, keys(*of_spec), partials)
            held = self.held[slot].setdefault(tier, set())
            assert split(gained) == [key(number) for number in dict.fromkeys(of_spec) if number not in held]
            held |= set(of_spec)

    @rule(pick=st.randoms(), tier=st.sampled_from(TIERS), numbers=numbers)
    def admit(self, pick: random.Random, tier: int, numbers: list[int]) -> None:
        if self.held:
            self.admit_to(pick.choice(sorted(self.held)), tier, numbers)

    @rule(pick=st.randoms(), tier=st.sampled_from(TIERS), numbers=numbers)
    def evict(self, pick: random.Random, tier: int, numbers: list[int]) -> None:
        if not self.held:
            return
        slot = pick.choice(sorted(self.held))
        lost = self.table.evict(slot, tier, keys(*numbers))
        held = self.held[slot].get(tier, set())
        assert split(lost) == [key(number) for number in dict.fromkeys(numbers) if number in held]
        held -= set(numbers)

    @rule()
    def open_slot(self) -> None:
        slot = self.table.open_slot()
        assert slot not in self.held
        self.held[slot] = {}

    @rule(pick=st.randoms())
    def show(self, pick: random.Random) -> None:
        if staged := sorted(self.held.keys() - self.live):
            slot = pick.choice(staged)
            self.table.show(slot)
            self.live.add(slot)

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(), count=st.integers(1, 20))
    def retire(self, pick: random.Random, count: int) -> None:
        for slot in pick.sample(sorted(self.held), min(count, len(self.held))):
            self.table.retire(slot)
            del self.held[slot]
            self.live.discard(slot)

    @rule(limit=st.integers(1, 4))
    def sweep(self, limit: int) -> None:
        self.table.sweep(limit)

    @rule()
    def sweep_all(self) -> None:
        sweep(self.table)
        held = [number for tiers in self.held.values() for numbers in tiers.values() for number in numbers]
        assert len(self.table) == len(set(held))

    @rule(numbers=numbers)
    def ask(self, numbers: list[int]) -> None:
        found = self.table.lookup(keys(*numbers))
        assert {slot: runs for slot, _, _, runs in found} == {
            slot: runs for slot in self.live if (runs := self.runs(slot, numbers))
        }
        for _, chunk_count, token_count, runs in found:
            assert chunk_count == sum(chunks for _, chunks, _ in runs)
            assert token_count == sum(tokens for _, _, tokens in runs)
        lengths = [chunk_count for _, chunk_count, _, _ in found]
        assert lengths == sorted(lengths, reverse=True)
        for slot in sorted(self.held)[::9]:
            for tier in (0, *TIERS):
                held = [number in self.within(slot, tier) for number in numbers]
                assert list(self.table.held(slot, tier, keys(*numbers))) == held
                length = [*held, False].index(False)
                total = sum(self.tokens(number) for number in numbers[:length])
                assert self.table.match_at(slot, tier, keys(*numbers)) == (length, total)

    @rule(limit=st.integers(1, 50))
    def walk(self, limit: int) -> None:
        found = list(walk(self.table, limit))
        expected = {
            (slot, tier, bytes([number % 2]), key(number))
            for slot in self.live
            for tier, numbers in self.held[slot].items()
            for number in numbers
        }
        assert set(found) == expected
        assert len(found) == len(expected)

    @invariant()
    def parts_agree(self) -> None:
        self.table.check()

    def within(self, slot: int, tier: int) -> set[int]:
        return set().union(*(held for at, held in self.held[slot].items() if tier in (0, at)))

    def tokens(self, number: int) -> int:
        return 1 + number if number % 3 == 2 else CHUNK

    def runs(self, slot: int, numbers: list[int]) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        for number in numbers:
            tier = next((tier for tier in TIERS if number in self.within(slot, tier)), None)
            if tier is None:
                break
            last, chunks, tokens = runs.pop() if runs and runs[-1][0] == tier else (tier, 0, 0)
            runs.append((last, chunks + 1, tokens + self.tokens(number)))
        return runs


AgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstModel = AgainstModel.TestCase
