"""The host tier against a naive model, and what it promises about eviction, holds and generations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.errors import GrantNotFound
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation, batched
from lmkv_server.node.cache.learned import LAST, Learned
from tests.server.node.cache.page_runs import first_page
from tests.server.node.cases import clear

PAGES = 12
KEY_COUNT = 8
FINGERPRINTS = (b"a" * 16, b"b" * 16)


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "big"))


class Events:
    """A listener that records its events, and so knows the visible chunks."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ChunkKey]] = []
        self.visible: set[ChunkKey] = set()

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        assert chunk.key not in self.visible
        self.visible.add(chunk.key)
        self.log.append(("stored", chunk.key))

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        self.visible.remove(chunk.key)
        self.log.append(("removed", chunk.key))


def commit(tier: HostTier, reserved: Reservation, number: int, size_bytes: int = ALIGNMENT) -> Chunk | None:
    return tier.commit(
        Chunk(
            offset=reserved.offset,
            key=chunk_key(number),
            fingerprint=FINGERPRINTS[number % 2],
            size_bytes=size_bytes,
            checksum=number,
            token_count=1,
        )
    )


def admit(tier: HostTier, number: int, size_bytes: int = ALIGNMENT) -> Chunk:
    reserved = tier.reserve(size_bytes)
    assert reserved is not None
    chunk = commit(tier, reserved, number, size_bytes)
    assert chunk is not None
    return chunk


def numbers(chunks: list[Chunk]) -> list[int]:
    return [int.from_bytes(chunk.key, "big") for chunk in chunks]


@dataclass
class Record:
    """A chunk as the model knows it."""

    chunk: Chunk
    pages: set[int]
    holds: int = 0
    pins: int = 0


class HostTierAgainstModel(RuleBasedStateMachine):
    """The model keeps a list of chunks, oldest first, and a set of pages for each extent."""

    def __init__(self) -> None:
        super().__init__()
        self.events = Events()
        self.tier = HostTier(PAGES * ALIGNMENT, self.events)
        self.records: list[Record] = []
        """Visible chunks, least recently used first."""
        self.dropped: list[Record] = []
        """Chunks that only holds keep."""
        self.reserved: list[Reservation] = []
        self.last_generation = 0
        self.largest = 0
        """Most pages of a reservation so far."""

    def free_pages(self) -> set[int]:
        taken = {page for record in self.records + self.dropped for page in record.pages}
        for reserved in self.reserved:
            taken |= pages_of(reserved.offset, reserved.size_bytes)
        return set(range(PAGES)) - taken

    def first_page(self, count: int) -> int | None:
        free = self.free_pages()
        return first_page([page in free for page in range(PAGES)], count, self.largest)

    def lose(self, record: Record) -> None:
        self.records.remove(record)
        if record.holds:
            self.dropped.append(record)

    def known(self, number: int) -> Record | None:
        return next((record for record in self.records if record.chunk.key == chunk_key(number)), None)

    @rule(size_bytes=st.sampled_from([1, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT, 4 * ALIGNMENT, 8 * ALIGNMENT]))
    def reserve(self, size_bytes: int) -> None:
        count = align(size_bytes) // ALIGNMENT
        assert self.tier.has_room(size_bytes) is (self.first_page(count) is not None)
        while (page := self.first_page(count)) is None:
            oldest = next((record for record in self.records if not record.holds), None)
            if oldest is None:
                break
            self.lose(oldest)
        reserved = self.tier.reserve(size_bytes)
        if page is None:
            assert reserved is None
            return
        self.largest = max(self.largest, count)
        assert reserved is not None
        assert (reserved.offset, reserved.size_bytes) == (page * ALIGNMENT, count * ALIGNMENT)
        assert reserved.generation > self.last_generation
        self.last_generation = reserved.generation
        self.reserved.append(reserved)

    @rule(page=st.integers(0, PAGES), count=st.integers(1, 3))
    def reserve_at(self, page: int, count: int) -> None:
        reserved = self.tier.reserve_at(page * ALIGNMENT, count * ALIGNMENT - 1)
        if not set(range(page, page + count)) <= self.free_pages():
            assert reserved is None
            return
        assert reserved is not None
        assert (reserved.offset, reserved.size_bytes) == (page * ALIGNMENT, count * ALIGNMENT)
        assert reserved.generation > self.last_generation
        self.last_generation = reserved.generation
        self.reserved.append(reserved)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), number=st.integers(0, KEY_COUNT - 1))
    def commit(self, data: st.DataObject, number: int) -> None:
        reserved = data.draw(st.sampled_from(self.reserved))
        size_bytes = data.draw(st.integers(1, reserved.size_bytes + 1))
        if size_bytes > reserved.size_bytes:
            with pytest.raises(GrantNotFound):
                commit(self.tier, reserved, number, size_bytes)
            return
        self.reserved.remove(reserved)
        chunk = commit(self.tier, reserved, number, size_bytes)
        if self.known(number):
            assert chunk is None
            return
        assert chunk is not None
        assert (chunk.offset, chunk.generation) == (reserved.offset, reserved.generation)
        self.records.append(Record(chunk, pages_of(chunk.offset, align(size_bytes))))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        reserved = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(reserved)
        self.tier.give_back(reserved.offset)
        with pytest.raises(GrantNotFound):
            self.tier.give_back(reserved.offset)

    @rule(prompt=st.lists(st.integers(0, KEY_COUNT - 1), unique=True))
    def find(self, prompt: list[int]) -> None:
        prefix = []
        for number in prompt:
            record = self.known(number)
            if record is None:
                break
            prefix.append(record)
        found = self.tier.find([chunk_key(number) for number in prompt])
        assert found == [record.chunk for record in prefix]
        self.records = [record for record in self.records if record not in prefix] + prefix[::-1]

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.records))
        self.tier.hold([record.chunk])
        record.holds += 1

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.records))
        self.tier.pin([record.chunk])
        record.holds += 1
        record.pins += 1

    @precondition(lambda self: any(record.holds > record.pins for record in self.records + self.dropped))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        held = [record for record in self.records + self.dropped if record.holds > record.pins]
        record = data.draw(st.sampled_from(held))
        self.tier.unhold([record.chunk])
        self.release(record)

    @precondition(lambda self: any(record.pins for record in self.records + self.dropped))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from([record for record in self.records + self.dropped if record.pins]))
        self.tier.unpin([record.chunk])
        record.pins -= 1
        self.release(record)

    def release(self, record: Record) -> None:
        record.holds -= 1
        if record in self.dropped and not record.holds:
            self.dropped.remove(record)

    @rule(keys=st.lists(st.integers(0, KEY_COUNT - 1), unique=True, max_size=3))
    def drop(self, keys: list[int]) -> None:
        lost = [record for number in keys if (record := self.known(number))]
        assert self.tier.drop([chunk_key(number) for number in keys]) == len(lost)
        for record in lost:
            self.lose(record)

    @rule(fingerprint=st.sampled_from(FINGERPRINTS))
    def clear(self, fingerprint: bytes) -> None:
        lost = [record for record in self.records if record.chunk.fingerprint == fingerprint and not record.pins]
        assert clear(self.tier, fingerprint) == len(lost)
        for record in lost:
            self.lose(record)

    @invariant()
    def agrees(self) -> None:
        self.tier.check(record.chunk for record in self.dropped)
        assert set(self.tier) == {record.chunk for record in self.records}
        assert len(self.tier) == len(self.records)
        assert self.tier.reserved_count == len(self.reserved)
        assert self.tier.used_bytes == (PAGES - len(self.free_pages())) * ALIGNMENT
        assert self.events.visible == {record.chunk.key for record in self.records}


def pages_of(offset: int, size_bytes: int) -> set[int]:
    return set(range(offset // ALIGNMENT, (offset + align(size_bytes)) // ALIGNMENT))


TestHostTierAgainstModel = HostTierAgainstModel.TestCase
TestHostTierAgainstModel.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_the_head_of_a_prompt_is_evicted_last() -> None:
    tier = HostTier(4 * ALIGNMENT)
    for number in range(4):
        admit(tier, number)
    tier.find([chunk_key(number) for number in range(4)])
    for remaining in ([0, 1, 2], [0, 1], [0]):
        tier.reserve(ALIGNMENT)
        assert sorted(numbers(list(tier))) == remaining
        tier.check()
    assert tier.evicted_count == 3


def test_finding_a_prompt_keeps_it_from_eviction_before_others() -> None:
    tier = HostTier(2 * ALIGNMENT)
    admit(tier, 0)
    admit(tier, 1)
    tier.find([chunk_key(0)])
    tier.reserve(ALIGNMENT)
    assert numbers(list(tier)) == [0]


def test_nothing_is_overwritten_as_long_as_the_tier_is_sealed() -> None:
    tier = HostTier(3 * ALIGNMENT)
    admit(tier, 0)
    kept = tier.reserve_at(ALIGNMENT, ALIGNMENT)
    assert kept is not None
    tier.sealed = True
    assert tier.reserve(ALIGNMENT) is None
    assert commit(tier, kept, 1, ALIGNMENT), "what is there already can be found"
    assert tier.drop([chunk_key(0)]) == 1
    assert tier.reserve(ALIGNMENT) is None
    tier.sealed = False
    assert tier.reserve(ALIGNMENT) is not None
    tier.check()


def test_looking_at_a_chunk_is_no_use_of_it() -> None:
    tier = HostTier(2 * ALIGNMENT)
    first = admit(tier, 0)
    admit(tier, 1)
    assert tier.get(first.key) is first
    tier.reserve(ALIGNMENT)
    assert tier.get(first.key) is None


def test_finding_stops_at_the_first_gap() -> None:
    tier = HostTier(4 * ALIGNMENT)
    admit(tier, 0)
    admit(tier, 2)
    assert numbers(tier.find([chunk_key(number) for number in range(3)])) == [0]


def test_held_chunks_are_never_evicted() -> None:
    tier = HostTier(2 * ALIGNMENT)
    held = admit(tier, 0)
    admit(tier, 1)
    tier.hold([held])
    assert tier.reserve(ALIGNMENT) is not None
    assert tier.reserve(ALIGNMENT) is None
    assert numbers(list(tier)) == [0]
    tier.unhold([held])
    assert tier.reserve(ALIGNMENT) is not None
    assert len(tier) == 0
    tier.check()


def test_a_dropped_chunk_keeps_its_bytes_until_its_last_hold_ends() -> None:
    tier = HostTier(2 * ALIGNMENT)
    chunk = admit(tier, 0, 2 * ALIGNMENT)
    tier.hold([chunk, chunk])
    assert tier.drop([chunk.key]) == 1
    assert tier.find([chunk.key]) == []
    for _ in range(2):
        assert tier.reserve(ALIGNMENT) is None
        tier.check([chunk])
        tier.unhold([chunk])
    assert tier.reserve(2 * ALIGNMENT) is not None


def test_a_chunk_may_come_back_while_its_dropped_bytes_are_still_held() -> None:
    tier = HostTier(2 * ALIGNMENT)
    old = admit(tier, 0)
    tier.hold([old])
    tier.drop([old.key])
    new = admit(tier, 0)
    assert new.offset != old.offset
    assert new.generation > old.generation
    tier.unhold([old])
    assert tier.find([old.key]) == [new]
    tier.check()


def test_a_generation_names_the_content_of_an_extent_once() -> None:
    tier = HostTier(ALIGNMENT)
    seen = [admit(tier, number).generation for number in range(5)]
    assert seen == sorted(set(seen))


def test_a_commit_of_a_chunk_that_is_held_gives_its_extent_back() -> None:
    events = Events()
    tier = HostTier(2 * ALIGNMENT, events)
    admit(tier, 0)
    second = tier.reserve(ALIGNMENT)
    assert second is not None
    assert commit(tier, second, 0) is None
    assert tier.used_bytes == ALIGNMENT
    assert events.log == [("stored", chunk_key(0))]
    tier.check()


def test_a_partial_chunk_returns_the_room_it_does_not_need() -> None:
    tier = HostTier(4 * ALIGNMENT)
    reserved = tier.reserve(4 * ALIGNMENT)
    assert reserved is not None
    chunk = commit(tier, reserved, 0, ALIGNMENT + 1)
    assert chunk is not None
    assert tier.used_bytes == 2 * ALIGNMENT
    tier.check()


def test_a_superseded_partial_chunk_leaves_first_and_the_next_one_takes_its_room() -> None:
    tier = HostTier(8 * ALIGNMENT)
    admit(tier, 0, 4 * ALIGNMENT)
    for number in (1, 2):
        admit(tier, number, 2 * ALIGNMENT)
    tier.supersede(chunk_key(1))
    assert not tier.has_room(ALIGNMENT)
    reserved = tier.reserve(2 * ALIGNMENT - 1)
    assert reserved is not None
    assert reserved.size_bytes == 2 * ALIGNMENT
    assert [chunk.key for chunk in tier] == [chunk_key(0), chunk_key(2)]
    tier.check()


def test_partial_chunks_do_not_break_the_room_for_full_ones_up() -> None:
    tier = HostTier(40 * ALIGNMENT)
    full = [admit(tier, number, 4 * ALIGNMENT) for number in range(5)]
    partial = [tier.reserve(ALIGNMENT) for _ in range(4)]
    assert [reserved.offset // ALIGNMENT for reserved in partial if reserved] == [39, 38, 37, 36]
    full += [admit(tier, number, 4 * ALIGNMENT) for number in range(5, 9)]
    assert [chunk.offset // ALIGNMENT for chunk in full] == list(range(0, 36, 4))
    tier.check()


def test_only_what_is_reserved_can_be_committed() -> None:
    tier = HostTier(4 * ALIGNMENT)
    reserved = tier.reserve(ALIGNMENT)
    assert reserved is not None
    with pytest.raises(GrantNotFound):
        commit(tier, reserved, 0, ALIGNMENT + 1)
    commit(tier, reserved, 0)
    with pytest.raises(GrantNotFound):
        commit(tier, reserved, 1)
    tier.check()


def test_more_than_the_pool_is_refused_without_evicting_anything() -> None:
    tier = HostTier(2 * ALIGNMENT)
    admit(tier, 0)
    assert tier.reserve(2 * ALIGNMENT + 1) is None
    assert len(tier) == 1


def test_clearing_forgets_one_spec_only() -> None:
    tier = HostTier(4 * ALIGNMENT)
    for number in range(4):
        admit(tier, number)
    assert clear(tier, FINGERPRINTS[0]) == 2
    assert numbers(list(tier)) == [1, 3]
    tier.check()


def test_the_bytes_of_a_tier_add_up() -> None:
    tier = HostTier(8 * ALIGNMENT + 1)
    assert (tier.size_bytes, tier.used_bytes, tier.chunk_bytes) == (8 * ALIGNMENT, 0, 0)
    admit(tier, 0, 2 * ALIGNMENT)
    reserved = tier.reserve(ALIGNMENT + 1)
    assert reserved is not None
    assert (tier.used_bytes, tier.chunk_bytes, tier.reserved_bytes) == (4 * ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT)
    assert (len(tier), tier.reserved_count, tier.evicted_count) == (1, 1, 0)
    tier.end_at(4 * ALIGNMENT)
    assert tier.size_bytes == 4 * ALIGNMENT
    assert tier.reserve(5 * ALIGNMENT) is None, "larger than the pool"
    assert len(tier) == 1, "nothing was evicted for it"


def test_the_policy_learns_from_a_lookup_which_chunks_are_new() -> None:
    policy = Learned()
    tier = HostTier(PAGES * ALIGNMENT, policy=policy)
    for number in range(3):
        admit(tier, number)
    assert len(tier.find([chunk_key(number) for number in range(8)])) == 3
    for number in range(3, 8):
        admit(tier, number)
    assert [policy._records[chunk_key(number)].size for number in range(8)] == [3] * 7 + [LAST]


@dataclass(frozen=True)
class Thing:
    size_bytes: int


@given(st.lists(st.builds(Thing, st.integers(0, 10))), st.integers(1, 20), st.integers(1, 5))
def test_nothing_is_lost_and_no_batch_exceeds_its_limit(things: list[Thing], size_bytes: int, max_count: int) -> None:
    cut = list(batched(things, size_bytes, max_count))
    assert [thing for piece in cut for thing in piece] == things
    assert all(0 < len(piece) <= max_count for piece in cut)
    for piece in cut:
        assert sum(thing.size_bytes for thing in piece[:-1]) < size_bytes
    for piece in cut[:-1]:
        assert len(piece) == max_count or sum(thing.size_bytes for thing in piece) >= size_bytes


def test_a_batch_ends_with_the_item_that_reaches_the_size() -> None:
    things = [Thing(size_bytes) for size_bytes in (5, 0, 3, 2, 1)]
    assert list(batched(things, 5)) == [things[:1], things[1:4], things[4:]]
    assert list(batched(things, 1 << 40)) == [things], "without a limit, a batch has any number of items"
