"""Who brings what: a simulation in which holders have rates of their own, lose chunks and fail, and no time passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.inflight import InflightFetches
from lmkv_server.node.fetch.scheduler import (
    BATCH_SECONDS,
    FIRST_BATCH_BYTES,
    MAX_BATCH_BYTES,
    MAX_WORKING,
    MIN_BATCH_BYTES,
    PROBE_BYTES,
    FetchPlan,
    HolderState,
)
from lmkv_server.node.tiers.progress import Progress
from tests.lmkv.transfer.test_bandwidth import known
from tests.server.node.peer_parts import LARGE, SMALL, keys_of

CHUNK_BYTES = LARGE.chunk_bytes
"""8 MiB: what a holder of unknown bandwidth is probed with."""
GB = 1e9


@dataclass
class World:
    """A plan, and a clock that moves from one event to the next."""

    count: int
    sources: Sequence[HolderState]
    in_order: bool = True
    own_rate: float = float("inf")
    spec: KvSpec = LARGE
    now: float = 0.0
    brought: list[tuple[int, HolderState]] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tier = HostTier(self.count * CHUNK_BYTES)
        self.flights = InflightFetches()
        self.progress = Progress(self.tier, self.spec, keys_of(self.count), 0, self._hand, in_order=self.in_order)
        self.together = Bandwidth()
        self.plan = FetchPlan(self.progress, self.flights, self.sources, self.together, lambda: self.now)

    def _hand(self, chunks: list[tuple[int, Chunk]]) -> None:
        self.handed.extend(index for index, _ in chunks)

    def check(self) -> None:
        """Nothing is brought by two, and what is taken is on its way."""
        taken = [index for source in self.plan.sources for index in source.taken]
        assert len(taken) == len(set(taken)) == len(self.flights)
        assert len(self.plan.working) <= MAX_WORKING
        for source in self.plan.sources:
            assert {*source.pending} <= source.taken <= self.progress.missing
            assert [*source.pending] == sorted(source.pending)
            assert not source.taken or source in self.plan.working

    def land(self, source: HolderState, index: int) -> None:
        """A chunk has come and is what it should be."""
        reserved = self.tier.reserve(CHUNK_BYTES)
        assert reserved
        chunk = self.tier.commit(
            reserved.offset,
            key=self.progress.keys[index],
            fingerprint=LARGE.fingerprint,
            size_bytes=CHUNK_BYTES,
            checksum=0,
            token_count=256,
        )
        assert chunk, "it was brought twice"
        self.brought.append((index, source))
        self.progress.add([(index, chunk)], "peer")
        self.plan.land(source, index, chunk, "peer")

    def run(self, rates: dict[int, float], lost: dict[int, set[int]], fails_after: dict[int, int]) -> float:
        """Has everybody work until nobody has anything to do; when that was. Everything is by a source's place."""
        place = {id(source): number for number, source in enumerate(self.sources)}
        events: list[tuple[float, int, list[int]]] = []
        given: dict[int, int] = {}
        idle = self._join(place)
        while True:
            for number in idle:
                source = self.sources[number]
                for index in [index for index in source.pending if index in lost.get(number, ())]:
                    source.refused.add(index)
                    self.plan.give_back(source, [index])
                batch = self.plan.batch(source)
                if batch:
                    rate = min(rates[number], self.own_rate / len(self.plan.working))
                    heapq.heappush(events, (self.now + len(batch) * CHUNK_BYTES / rate, number, batch))
                elif not self.plan.take(source):
                    self.plan.leave(source)
                else:
                    heapq.heappush(events, (self.now, number, []))
                self.check()
            idle = self._join(place)
            if idle:
                continue
            if not events:
                assert not self.plan.working
                return self.now
            at, number, batch = heapq.heappop(events)
            began, self.now = self.now, at
            source = self.sources[number]
            given[number] = given.get(number, 0) + 1
            if given[number] > fails_after.get(number, 1 << 30):
                source.exhausted = True
                self.plan.leave(source)
                idle = self._join(place)
            else:
                for index in batch:
                    self.land(source, index)
                if batch:
                    rate = min(rates[number], self.own_rate / len(self.plan.working))
                    self.plan.measured(source, len(batch) * CHUNK_BYTES, len(batch) * CHUNK_BYTES / rate)
                idle = [number]
            assert began <= self.now
            self.check()

    def _join(self, place: dict[int, int]) -> list[int]:
        return [place[id(source)] for source in self.plan.join()]


def world(count: int, *sources: HolderState, own_rate: float = float("inf")) -> World:
    return World(count, sources, own_rate=own_rate)


@settings(deadline=None)
@given(st.data())
def test_everything_that_somebody_has_is_brought_once_whoever_fails_or_has_lost_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    numbers = range(data.draw(st.integers(1, 6)))
    in_order = data.draw(st.booleans())
    rates = {number: data.draw(st.sampled_from([0.05, 1, 5]), label="rate") * GB for number in numbers}
    sources = [
        HolderState(
            matched_count=data.draw(st.integers(0, count)),
            near=data.draw(st.booleans()),
            bandwidth=known(rates[number]) if data.draw(st.booleans()) else Bandwidth(),
        )
        for number in numbers
    ]
    lost = {number: data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=5)) for number in numbers}
    fails_after = {number: data.draw(st.integers(0, 5)) for number in numbers if data.draw(st.booleans())}
    it = World(count, sources, in_order=in_order)
    it.run(rates, lost, fails_after)
    it.check()
    assert len(it.flights) == 0
    had_by = {
        index: [
            number
            for number in numbers
            if index < sources[number].matched_count and index not in lost[number] and number not in fails_after
        ]
        for index in range(count)
    }
    landed = {index for index, _ in it.brought}
    assert len(landed) == len(it.brought)
    for index in range(count):
        if had_by[index]:
            assert index in landed
        elif in_order and index not in landed:
            break  # a hole; what is behind it is of no use
    if in_order:
        assert it.handed == list(range(len(it.handed)))


def test_one_holder_is_asked_for_all_of_it_in_one_window() -> None:
    source = HolderState(matched_count=20)
    it = world(20, source)
    assert it.plan.join() == [source]
    assert list(source.pending) == list(range(20))


def test_the_nearest_begins_then_the_fastest_then_who_has_most() -> None:
    far, near, fast, long = (
        HolderState(matched_count=8, bandwidth=known(1 * GB)),
        HolderState(matched_count=8, near=True),
        HolderState(matched_count=8, bandwidth=known(5 * GB)),
        HolderState(matched_count=10),
    )
    assert world(10, far, long, fast, near).plan.sources == [near, fast, far, long]


def test_a_prompt_that_comes_soon_is_not_split() -> None:
    sources = [HolderState(matched_count=3), HolderState(matched_count=3)]
    it = world(3, *sources)
    assert it.plan.join() == [sources[0]]


def test_two_unknown_holders_of_much_are_both_tried_a_little_at_first() -> None:
    sources = [HolderState(matched_count=20), HolderState(matched_count=20)]
    it = world(20, *sources)
    assert it.plan.join() == sources
    assert [list(source.pending) for source in sources] == [[0], [1]]
    assert PROBE_BYTES == CHUNK_BYTES


def test_two_equal_holders_take_half_of_the_time() -> None:
    sources = [HolderState(matched_count=100, bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *sources)
    alone = 100 * CHUNK_BYTES / GB
    assert it.run({0: GB, 1: GB}, {}, {}) < 0.55 * alone
    assert {id(source) for _, source in it.brought} == {id(source) for source in sources}


def test_the_front_does_not_wait_for_what_others_bring_behind_it() -> None:
    sources = [HolderState(matched_count=40, bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(40, *sources)
    it.run({0: GB, 1: GB}, {}, {})
    first = [index for index, source in it.brought if source is sources[0]]
    assert first == list(range(len(first)))


def test_a_slow_holder_is_left_alone_when_a_fast_one_has_everything() -> None:
    fast, slow = (
        HolderState(matched_count=40, bandwidth=known(5 * GB)),
        HolderState(matched_count=40, bandwidth=known(0.05 * GB)),
    )
    it = world(40, slow, fast)
    assert it.plan.join() == [fast]


def test_a_holder_whose_answer_takes_longer_than_the_rest_is_left_alone() -> None:
    fast, late = (
        HolderState(matched_count=40, bandwidth=known(1 * GB)),
        HolderState(matched_count=40, bandwidth=known(1 * GB, answer_seconds=0.5)),
    )
    it = world(40, fast, late)
    assert it.plan.join() == [fast]


def test_where_the_own_side_takes_no_more_nobody_joins() -> None:
    sources = [HolderState(matched_count=40, bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(40, *sources)
    for _ in range(2):
        it.together.record_read(CHUNK_BYTES, CHUNK_BYTES / GB, 0.0)
    assert len(it.plan.join()) == 1


def test_a_holder_that_gets_slow_has_its_share_stolen() -> None:
    sources = [HolderState(matched_count=100, bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *sources)
    alone = 100 * CHUNK_BYTES / GB
    slow = CHUNK_BYTES / (0.1 * alone)
    assert it.run({0: GB, 1: slow}, {}, {}) < 1.3 * alone


def test_what_a_failed_holder_had_taken_the_others_bring() -> None:
    sources = [HolderState(matched_count=30), HolderState(matched_count=30)]
    it = world(30, *sources)
    it.run({0: GB, 1: GB}, {}, {0: 2})
    assert it.handed == list(range(30))


def test_batches_are_small_until_it_is_known_how_fast_bytes_come() -> None:
    for bandwidth, size_bytes in (
        (Bandwidth(), FIRST_BATCH_BYTES),
        (known(0.01 * GB), MIN_BATCH_BYTES),
        (known(1 * GB), GB * BATCH_SECONDS),
        (known(90 * GB), MAX_BATCH_BYTES),
    ):
        source = HolderState(matched_count=1000, bandwidth=bandwidth)
        it = World(1000, [source], spec=SMALL)
        assert it.plan.join() == [source]
        assert len(it.plan.batch(source)) == int(size_bytes // SMALL.chunk_bytes)


def test_beside_others_only_what_sharing_does_not_explain_is_held_against_a_holder() -> None:
    sources = [HolderState(matched_count=100, bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *sources, own_rate=GB)
    assert len(it.plan.join()) == 2
    it.plan.measured(sources[0], CHUNK_BYTES, CHUNK_BYTES / (0.51 * GB))
    assert sources[0].bandwidth.rate(0) == GB
    it.plan.measured(sources[0], CHUNK_BYTES, CHUNK_BYTES / (0.4 * GB))
    rate = sources[0].bandwidth.rate(0)
    assert rate is not None
    assert rate < GB


def test_what_a_late_holder_does_not_read_yet_is_moved_and_what_it_reads_is_asked_of_another_as_well() -> None:
    late, other = (
        HolderState(matched_count=16, bandwidth=known(1e12)),
        HolderState(matched_count=12, bandwidth=known(1e9)),
    )
    world = World(16, [late, other])
    assert world.plan.join() == [late]
    reading = world.plan.batch(late)
    assert 0 < len(reading) < 12
    assert world.plan.late(late) == 12, "only what the other may have"
    assert late.hedged == {*reading}
    assert late.taken == {12, 13, 14, 15}
    assert world.plan.join() == [other]
    assert other.taken == {*range(12)}
    assert not late.pending or min(late.pending) >= 12
    world.check()
    assert not world.plan.late(other), "nobody else is on time"
    other.late = False
    for index in reading[:1]:  # the late answer comes first after all
        world.land(late, index)
    assert reading[0] not in {*other.taken, *other.pending}
    world.check()
    for index in sorted(other.taken):
        world.land(other, index)
    assert world.handed == [*range(12)]


def test_a_late_holder_is_given_only_what_no_other_on_time_has_until_it_answers() -> None:
    late = HolderState(matched_count=8, late=True, bandwidth=known(1e12))
    other = HolderState(matched_count=4, bandwidth=known(1e12))
    world = World(8, [late, other])
    assert [*world.plan.sources] == [other, late]
    assert world.plan.join() == [other, late]
    assert (other.taken, late.taken) == ({0, 1, 2, 3}, {4, 5, 6, 7})
    world.plan.leave(late)
    world.plan.give_back(other, range(4))
    late.late = False
    assert world.plan.take(late)


def test_a_holder_that_stays_late_reads_no_chunk_twice() -> None:
    first, second = (HolderState(matched_count=16, bandwidth=known(rate)) for rate in (1e10, 1e8))
    world = World(16, [first, second])
    assert world.plan.join() == [first]
    reading = world.plan.batch(first)
    world.plan.late(first)
    assert world.plan.join() == [second]
    assert {*world.plan.batch(second)} <= {*reading}
    first.late = False
    world.plan.late(second)
    assert world.plan.take(first), "what it was not reading"
    assert not {*reading} & first.taken
