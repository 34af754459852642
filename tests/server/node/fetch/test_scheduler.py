"""Who brings what: a simulation in which holders have rates of their own, lose chunks and fail, and no time passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.pipeline import PendingWrites
from lmkv_server.node.fetch.scheduler import (
    BATCH_SECONDS,
    FIRST_BATCH_BYTES,
    MAX_ACTIVE,
    MAX_BATCH_BYTES,
    MIN_BATCH_BYTES,
    PROBE_BYTES,
    FetchPlan,
    HolderState,
    InflightFetches,
)
from lmkv_server.node.peers.connection import PeerChunk
from lmkv_server.node.tiers.base import Needs, Progress
from tests.lmkv.transfer.test_bandwidth import known
from tests.server.node.cases import put
from tests.server.node.peer_parts import LARGE, SMALL, keys_of

CHUNK_BYTES = LARGE.chunk_bytes
"""8 MiB: what a holder of unknown bandwidth is probed with."""
GB = 1e9


@dataclass
class World:
    """A plan, and a clock that moves from one event to the next."""

    count: int
    holders: Sequence[HolderState]
    in_order: bool = True
    own_rate: float = float("inf")
    spec: KvSpec = LARGE
    now: float = 0.0
    brought: list[tuple[int, HolderState]] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tier = HostTier(self.count * CHUNK_BYTES)
        self.inflight = InflightFetches()
        self.progress = Progress(self.tier, self._needs(), self._hand, delivers_in_order=self.in_order)
        self.combined = Bandwidth()
        self.plan = FetchPlan(self.progress, self.inflight, self.holders, self.combined, lambda: self.now)

    def _needs(self) -> Needs:
        indices, in_order = range(self.count), self.in_order and self.spec.matches_prefixes
        return Needs(spec=self.spec, keys=keys_of(self.count), indices=indices, in_order=in_order)

    def _hand(self, chunks: list[tuple[int, Chunk]]) -> None:
        self.handed.extend(index for index, _ in chunks)

    def check(self) -> None:
        """Each chunk is assigned to one active holder, which may have it, and is on its way."""
        taken = [index for holder in self.plan.holders for index in holder.assigned]
        assert len(taken) == len(set(taken)) == len(self.inflight)
        assert len(self.plan.active) <= MAX_ACTIVE
        for holder in self.plan.holders:
            assert {*holder.pending} <= holder.assigned <= self.progress.missing
            assert [*holder.pending] == sorted(holder.pending)
            assert not holder.assigned or holder in self.plan.active
            assert all(map(holder.may_hold, holder.assigned))

    def land(self, holder: HolderState, index: int) -> None:
        """A chunk has come and is what it should be."""
        key = self.progress.keys[index]
        chunk = put(self.tier, key, CHUNK_BYTES, fingerprint=LARGE.fingerprint, token_count=256)
        self.brought.append((index, holder))
        self.progress.add([(index, chunk)], "peer")
        self.plan.commit(holder, index, chunk, "peer")

    def run(self, rates: dict[int, float], lost: dict[int, set[int]], fails_after: dict[int, int]) -> float:
        """Runs all holders until none has work; returns the time. Arguments are by the index of a holder."""
        place = {id(holder): number for number, holder in enumerate(self.holders)}
        events: list[tuple[float, int, list[int]]] = []
        given: dict[int, int] = {}
        idle = self._join(place)
        while True:
            for number in idle:
                holder = self.holders[number]
                for index in [index for index in holder.pending if index in lost.get(number, ())]:
                    holder.unavailable.add(index)
                    self.plan.unassign(holder, [index])
                batch = self.plan.next_batch(holder)
                if batch:
                    rate = min(rates[number], self.own_rate / len(self.plan.active))
                    heapq.heappush(events, (self.now + len(batch) * CHUNK_BYTES / rate, number, batch))
                elif not self.plan.assign(holder):
                    self.plan.deactivate(holder)
                else:
                    heapq.heappush(events, (self.now, number, []))
                self.check()
            idle = self._join(place)
            if idle:
                continue
            if not events:
                assert not self.plan.active
                return self.now
            at, number, batch = heapq.heappop(events)
            began, self.now = self.now, at
            holder = self.holders[number]
            given[number] = given.get(number, 0) + 1
            if given[number] > fails_after.get(number, 1 << 30):
                holder.failed = True
                self.plan.deactivate(holder)
                idle = self._join(place)
            else:
                for index in batch:
                    self.land(holder, index)
                if batch:
                    rate = min(rates[number], self.own_rate / len(self.plan.active))
                    self.plan.record_read(holder, len(batch) * CHUNK_BYTES, len(batch) * CHUNK_BYTES / rate)
                idle = [number]
            assert began <= self.now
            self.check()

    def _join(self, place: dict[int, int]) -> list[int]:
        return [place[id(holder)] for holder in self.plan.activate()]


def world(count: int, *holders: HolderState, own_rate: float = float("inf")) -> World:
    return World(count, holders, own_rate=own_rate)


@settings(deadline=None)
@given(st.data())
def test_every_available_chunk_is_fetched_once_whichever_holder_fails(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    numbers = range(data.draw(st.integers(1, 6)))
    in_order = data.draw(st.booleans())
    rates = {number: data.draw(st.sampled_from([0.05, 1, 5]), label="rate") * GB for number in numbers}
    holders = [
        HolderState(
            indices=range(data.draw(st.integers(0, count))),
            is_near=data.draw(st.booleans()),
            bandwidth=known(rates[number]) if data.draw(st.booleans()) else Bandwidth(),
        )
        for number in numbers
    ]
    lost = {number: data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=5)) for number in numbers}
    fails_after = {number: data.draw(st.integers(0, 5)) for number in numbers if data.draw(st.booleans())}
    it = World(count, holders, in_order=in_order)
    it.run(rates, lost, fails_after)
    it.check()
    assert len(it.inflight) == 0
    had_by = {
        index: [
            number
            for number in numbers
            if index in holders[number].indices and index not in lost[number] and number not in fails_after
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
    holder = HolderState(indices=range(20))
    it = world(20, holder)
    assert it.plan.activate() == [holder]
    assert list(holder.pending) == list(range(20))


def test_the_nearest_begins_then_the_fastest_then_who_has_most() -> None:
    far, near, fast, long = (
        HolderState(indices=range(8), bandwidth=known(1 * GB)),
        HolderState(indices=range(8), is_near=True),
        HolderState(indices=range(8), bandwidth=known(5 * GB)),
        HolderState(indices=range(10)),
    )
    assert world(10, far, long, fast, near).plan.holders == [near, fast, far, long]


def test_a_prompt_that_comes_soon_is_not_split() -> None:
    holders = [HolderState(indices=range(3)), HolderState(indices=range(3))]
    it = world(3, *holders)
    assert it.plan.activate() == [holders[0]]


def test_two_unknown_holders_of_much_are_both_tried_a_little_at_first() -> None:
    holders = [HolderState(indices=range(20)), HolderState(indices=range(20))]
    it = world(20, *holders)
    assert it.plan.activate() == holders
    assert [list(holder.pending) for holder in holders] == [[0], [1]]
    assert PROBE_BYTES == CHUNK_BYTES


def test_two_equal_holders_take_half_of_the_time() -> None:
    holders = [HolderState(indices=range(100), bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *holders)
    alone = 100 * CHUNK_BYTES / GB
    assert it.run({0: GB, 1: GB}, {}, {}) < 0.55 * alone
    assert {id(holder) for _, holder in it.brought} == {id(holder) for holder in holders}


def test_the_front_does_not_wait_for_what_others_bring_behind_it() -> None:
    holders = [HolderState(indices=range(40), bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(40, *holders)
    it.run({0: GB, 1: GB}, {}, {})
    first = [index for index, holder in it.brought if holder is holders[0]]
    assert first == list(range(len(first)))


def test_a_slow_holder_is_left_alone_when_a_fast_one_has_everything() -> None:
    fast, slow = (
        HolderState(indices=range(40), bandwidth=known(5 * GB)),
        HolderState(indices=range(40), bandwidth=known(0.05 * GB)),
    )
    it = world(40, slow, fast)
    assert it.plan.activate() == [fast]


def test_a_holder_whose_answer_takes_longer_than_the_rest_is_left_alone() -> None:
    fast, late = (
        HolderState(indices=range(40), bandwidth=known(1 * GB)),
        HolderState(indices=range(40), bandwidth=known(1 * GB, answer_seconds=0.5)),
    )
    it = world(40, fast, late)
    assert it.plan.activate() == [fast]


def test_no_instance_joins_while_the_own_side_is_saturated() -> None:
    holders = [HolderState(indices=range(40), bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(40, *holders)
    for _ in range(2):
        it.combined.record_read(CHUNK_BYTES, CHUNK_BYTES / GB, 0.0)
    assert len(it.plan.activate()) == 1


def test_a_holder_that_gets_slow_has_its_share_stolen() -> None:
    holders = [HolderState(indices=range(100), bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *holders)
    alone = 100 * CHUNK_BYTES / GB
    slow = CHUNK_BYTES / (0.1 * alone)
    assert it.run({0: GB, 1: slow}, {}, {}) < 1.3 * alone


def test_what_a_failed_holder_had_taken_the_others_bring() -> None:
    holders = [HolderState(indices=range(30)), HolderState(indices=range(30))]
    it = world(30, *holders)
    it.run({0: GB, 1: GB}, {}, {0: 2})
    assert it.handed == list(range(30))


def test_batches_are_small_until_it_is_known_how_fast_bytes_come() -> None:
    for bandwidth, size_bytes in (
        (Bandwidth(), FIRST_BATCH_BYTES),
        (known(0.01 * GB), MIN_BATCH_BYTES),
        (known(1 * GB), GB * BATCH_SECONDS),
        (known(90 * GB), MAX_BATCH_BYTES),
    ):
        holder = HolderState(indices=range(1000), bandwidth=bandwidth)
        it = World(1000, [holder], spec=SMALL)
        assert it.plan.activate() == [holder]
        assert len(it.plan.next_batch(holder)) == int(size_bytes // SMALL.chunk_bytes)


def test_beside_others_only_what_sharing_does_not_explain_is_held_against_a_holder() -> None:
    holders = [HolderState(indices=range(100), bandwidth=known(1 * GB)) for _ in range(2)]
    it = world(100, *holders, own_rate=GB)
    assert len(it.plan.activate()) == 2
    it.plan.record_read(holders[0], CHUNK_BYTES, CHUNK_BYTES / (0.51 * GB))
    assert holders[0].bandwidth.rate(0) == GB
    it.plan.record_read(holders[0], CHUNK_BYTES, CHUNK_BYTES / (0.4 * GB))
    rate = holders[0].bandwidth.rate(0)
    assert rate is not None
    assert rate < GB


def test_what_a_late_holder_does_not_read_yet_is_moved_and_what_it_reads_is_asked_of_another_as_well() -> None:
    late, other = (
        HolderState(indices=range(16), bandwidth=known(1e12)),
        HolderState(indices=range(12), bandwidth=known(1e9)),
    )
    world = World(16, [late, other])
    assert world.plan.activate() == [late]
    reading = world.plan.next_batch(late)
    assert 0 < len(reading) < 12
    assert world.plan.mark_late(late) == 12, "only what the other may have"
    assert late.hedged == {*reading}
    assert late.assigned == {12, 13, 14, 15}
    assert world.plan.activate() == [other]
    assert other.assigned == {*range(12)}
    assert not late.pending or min(late.pending) >= 12
    world.check()
    assert not world.plan.mark_late(other), "no other holder is on time"
    other.is_late = False
    for index in reading[:1]:  # the late answer comes first after all
        world.land(late, index)
    assert reading[0] not in {*other.assigned, *other.pending}
    world.check()
    for index in sorted(other.assigned):
        world.land(other, index)
    assert world.handed == [*range(12)]


def test_a_late_holder_is_given_only_what_no_other_on_time_has_until_it_answers() -> None:
    late = HolderState(indices=range(8), is_late=True, bandwidth=known(1e12))
    other = HolderState(indices=range(4), bandwidth=known(1e12))
    world = World(8, [late, other])
    assert [*world.plan.holders] == [other, late]
    assert world.plan.activate() == [other, late]
    assert (other.assigned, late.assigned) == ({0, 1, 2, 3}, {4, 5, 6, 7})
    world.plan.deactivate(late)
    world.plan.unassign(other, range(4))
    late.is_late = False
    assert world.plan.assign(late)


def test_a_holder_that_stays_late_reads_no_chunk_twice() -> None:
    first, second = (HolderState(indices=range(16), bandwidth=known(rate)) for rate in (1e10, 1e8))
    world = World(16, [first, second])
    assert world.plan.activate() == [first]
    reading = world.plan.next_batch(first)
    world.plan.mark_late(first)
    assert world.plan.activate() == [second]
    assert {*world.plan.next_batch(second)} <= {*reading}
    first.is_late = False
    world.plan.mark_late(second)
    assert world.plan.assign(first), "what it was not reading"
    assert not {*reading} & first.assigned


KEYS = keys_of(8)


def new_tier(chunk_count: int = 8) -> HostTier:
    return HostTier(chunk_count * SMALL.chunk_bytes)


def peer_chunk(index: int = 0) -> PeerChunk:
    return PeerChunk(index=index, address=0, checksum=0, token_count=SMALL.chunk_size, size_bytes=SMALL.chunk_bytes)


def receive(tier: HostTier, key: ChunkKey) -> Chunk:
    writes = PendingWrites(tier)
    reserved = tier.reserve(SMALL.chunk_bytes)
    assert reserved
    chunk = writes.commit(key, None, SMALL.fingerprint, writes.add(peer_chunk(), reserved))
    writes.close()
    assert chunk
    return chunk


def needs(indices: range, *, in_order: bool = True) -> Needs:
    return Needs(spec=SMALL, keys=KEYS[: indices.stop], indices=indices, in_order=in_order)


@given(st.permutations(range(8)), st.integers(0, 7), st.integers(0, 8))
def test_chunks_are_handed_out_in_order_whatever_order_they_come_in(order: list[int], first: int, count: int) -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(
        tier, needs(range(first, len(KEYS))), lambda chunks: handed.extend(index for index, _ in chunks)
    )
    come = [index for index in order[:count] if index >= first]
    for index in come:
        progress.add([(index, receive(tier, KEYS[index]))], "peer")
        until = next(i for i in range(first, 9) if i not in come[: come.index(index) + 1])
        assert handed == list(range(first, until))
        assert progress.front == ({until} - {8})
    assert progress.missing == set(range(first, 8)) - set(come)
    assert progress.result().size_bytes == len(come) * SMALL.chunk_bytes
    progress.close()
    for index in come:
        chunk = tier.get(KEYS[index])
        assert chunk
        assert chunk.holds == (1 if index in handed else 0)
        progress.add([(index, chunk)])  # too late
    assert sum(chunk.holds for chunk in tier) == len(handed)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_chunks_that_stand_for_themselves_are_handed_out_as_they_come(order: list[int], count: int) -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(
        tier,
        needs(range(len(KEYS)), in_order=False),
        lambda chunks: handed.extend(index for index, _ in chunks),
        delivers_in_order=False,
    )
    for number, index in enumerate(order[:count], 1):
        assert index in progress.front
        progress.add([(index, receive(tier, KEYS[index]))], "peer")
        assert handed == order[:number]
        assert progress.front == progress.missing == set(order[number:])
    assert progress.result().chunk_count == count
    progress.close()
    assert sum(chunk.holds for chunk in tier) == count


def test_what_is_in_the_tier_by_now_is_found_if_it_is_of_this_spec() -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(tier, needs(range(len(KEYS))), lambda chunks: handed.extend(index for index, _ in chunks))
    receive(tier, KEYS[0])
    receive(tier, KEYS[1]).fingerprint = b"x" * 16
    progress.find_own()
    assert handed == [0]
    assert progress.result().size_bytes == 0


def test_waiters_get_committed_chunks_and_learn_of_failed_ones() -> None:
    tier, inflight = new_tier(), InflightFetches()
    handed: list[int] = []
    progress = Progress(tier, needs(range(3)), lambda chunks: handed.extend(index for index, _ in chunks))
    assert not inflight.subscribe(progress)
    inflight.begin(KEYS[:2])
    assert KEYS[0] in inflight
    assert inflight.subscribe(progress)
    assert inflight.subscribe(progress)  # twice is once
    inflight.commit(receive(tier, KEYS[0]), "peer")
    assert handed == [0]
    assert progress.result().instance_ids == ("peer",)
    progress.changed.clear()
    inflight.end(KEYS[:2])
    assert progress.changed.is_set()
    assert handed == [0]
    assert len(inflight) == 0


def test_extents_are_freed_only_after_the_last_write() -> None:
    tier = new_tier(2)
    writes = PendingWrites(tier)
    for index in range(2):
        reserved = tier.reserve(SMALL.chunk_bytes)
        assert reserved
        writes.add(peer_chunk(index), reserved)
    stopped = writes.begin()
    writes.close()
    assert writes.is_quarantined
    assert writes.open_bytes == 2 * SMALL.chunk_bytes
    assert tier.reserved_count == 2
    stopped()
    assert not writes.is_quarantined
    assert tier.reserved_count == tier.used_bytes == 0


def test_a_chunk_that_was_committed_first_elsewhere_is_used_and_the_extent_freed() -> None:
    tier = new_tier()
    first = receive(tier, KEYS[0])
    assert receive(tier, KEYS[0]) is first
    tier.check()
    assert tier.reserved_count == 0


def test_a_chunk_that_arrived_keeps_the_one_before_it() -> None:
    tier = new_tier(2)
    keys = [ChunkKey(bytes([number]) * 16) for number in range(2)]
    for index in (1, 0):
        writes = PendingWrites(tier)
        reserved = tier.reserve(SMALL.chunk_bytes)
        assert reserved
        parent = keys[index - 1] if index else None
        writes.commit(keys[index], parent, SMALL.fingerprint, writes.add(peer_chunk(index), reserved))
        writes.close()
    tier.find(keys[:1])
    tier.find(keys[1:])
    assert tier.reserve(SMALL.chunk_bytes)
    assert [chunk.key for chunk in tier] == keys[:1]
