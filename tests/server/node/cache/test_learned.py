"""The learned policy: what it remembers, how it counts ages, and what it learns from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lmkv.keys import ChunkKey
from lmkv_server.node.cache import learned
from lmkv_server.node.cache.eviction import EvictionPolicy, EvictionQueue, Lru
from lmkv_server.node.cache.learned import Learned
from tests.server.node.cases import chunk_key


def test_what_the_learned_policy_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_SAMPLE", 32)
    policy = Learned()
    queue = EvictionQueue(policy)
    for number in range(2000):
        queue.add(chunk_key(number))
        if len(queue) > 10:
            queue.pop()
        assert len(policy._times) <= 32
    assert len(policy._records) <= (learned.MEMORY + 1) * 12
    sample = policy._times._sample
    assert sample
    assert [record.slot for record in sample] == list(range(len(sample)))
    assert {record for record in policy._records.values() if record.slot >= 0} == set(sample)


def test_keys_that_a_client_invented_do_not_make_the_sample_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_SAMPLE", 4)
    policy = Learned()
    for number in range(100):
        policy.admit(ChunkKey(number.to_bytes(12, "big") + bytes(4)))
    assert len(policy._times) <= 4
    policy.admit(chunk_key(1))
    assert policy.choose() is not None


def test_levels_of_age_are_half_powers_of_two() -> None:
    starts = [learned.first_age(level) for level in range(learned.AGE_COUNT)]
    assert starts[:8] == [0, 2, 3, 4, 6, 8, 12, 16]
    levels = list(range(learned.AGE_COUNT))
    assert [learned.age_level(age) for age in starts] == levels
    assert [learned.age_level(age - 1) for age in starts[1:]] == levels[:-1]
    assert learned.age_level(1 << 60) == levels[-1]
    ages = [0, 1, *starts[1:], *(age - 1 for age in starts[1:]), 1 << 60]
    assert learned.age_levels(np.array(ages)).tolist() == [learned.age_level(age) for age in ages]


def test_the_rank_of_a_chunk_is_the_index_at_its_age() -> None:
    policy = Learned()
    policy.admit(chunk_key(1))
    (group,) = {record.group for record in policy._records.values()}
    policy._times.index[group] = [float(level) for level in range(learned.AGE_COUNT)]
    for age in [0, 1, 2, 3, 5, 6, 7, 100, 1 << 60]:
        policy._time = 1 + age
        assert policy._rank(policy._lines[group], youngest=False) == (learned.age_level(age), 1)


def test_the_index_is_the_steepest_rise_of_hits_over_time() -> None:
    chances = [0.0] * learned.AGE_COUNT
    chances[6] = 1.0  # all are used again at ages from 12 to 16
    index = learned.hit_index(np.array(chances)).tolist()
    assert index[:6] == sorted(index[:6])  # the nearer the use, the higher
    assert index[0] == pytest.approx(1 / 14)
    assert index[5] == pytest.approx(1 / 6)
    assert not any(index[7:])


def counted(sample_size: int) -> learned.ReuseTimes:
    """Counts of chunks that are used at every fourth, fifth, ... moment, many enough to learn from."""
    times = learned.ReuseTimes(2)
    records = [learned.Record(chunk_key(number), 0) for number in range(sample_size)]
    for record in records:
        times.add(record)
        times.used(record)
    for now in range(1, 200):
        for number, record in enumerate(records):
            if now % (4 + number) == 0:
                times.ended(record, now, again=True)
                record.used_at, record.group = now, 1
                times.used(record)
    return times


def test_learning_in_slices_finds_what_learning_at_once_does(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, sliced = counted(50), counted(50)
    steps = {}
    for times, slice_size in (at_once, 50), (sliced, 8):
        monkeypatch.setattr(learned, "SLICE", slice_size)
        times.learn(200)
        steps[slice_size] = 1
        while times._learning:
            times.learn(200)
            steps[slice_size] += 1
    assert any(sliced.index[1])
    assert sliced.index == at_once.index
    assert {len(of_group) for of_group in sliced.index} == {learned.AGE_COUNT}
    assert steps[8] == steps[50] + 6


def test_learning_begins_with_the_first_times_and_again_as_they_grow() -> None:
    times = learned.ReuseTimes(1)
    record = learned.Record(chunk_key(1), 0)
    times.add(record)
    times.used(record)
    learned_at = []
    for count in range(1, 1000):
        times.ended(record, 10, again=True)
        waits = times._learning is None
        times.learn(100)
        if waits and times._learning:
            learned_at.append(count)
        while times._learning:
            times.learn(100)
        assert any(times.index[0]) == bool(learned_at)
    assert learned_at[0] == learned.FIRST_TIMES
    for before, after in itertools.pairwise(learned_at):
        assert after - before <= max(learned.FIRST_TIMES, before // learned.GROWTH)


@pytest.mark.parametrize("size", [63, 64, 65])
def test_a_full_sample_is_made_smaller_in_slices(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_SAMPLE", size)
    monkeypatch.setattr(learned, "PRUNED", 8)
    times = learned.ReuseTimes(1)
    records = [learned.Record(chunk_key(number), 0) for number in range(size + 1)]
    for record in records:
        before = len(times)
        times.add(record)
        assert len(times) > before - 8
    for _ in range(size):
        times.learn(100)
    assert times._prune_from == 0
    kept = [record for record in records if record.slot >= 0]
    assert 0 < len(kept) == len(times) < size
    assert not any(record.bits & 1 for record in kept)


def times_found(policy: EvictionPolicy) -> int:
    """How often ten chunks are found that return after 30 others, which are used once, in a pool of 25."""
    queue = EvictionQueue(policy)
    hot = [chunk_key(number) for number in range(10)]
    found = 0
    for number in range(100, 6100):
        for key in hot if number % 30 == 0 else ():
            if key in queue:
                queue.use([key])
                found += 1
                continue
            queue.pop()
            queue.add(key)
        if len(queue) >= 25:
            queue.pop()
        queue.add(chunk_key(number))
    return found


def test_what_returns_later_than_it_would_stay_by_recency_is_learned() -> None:
    assert times_found(Lru()) == 0
    assert times_found(Learned()) > 1000  # of 2,000


def test_chunks_are_grouped_by_the_number_of_their_uses() -> None:
    policy, key, groups = Learned(), chunk_key(1), []
    policy.admit(key)
    for _ in range(70):
        groups.append(policy._records[key].group // learned.SIZE_COUNT)
        policy.use(key)
    levels = [0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, *[6] * 16]
    assert groups == [*levels, *[7] * (70 - len(levels))]
    policy.forget(key)
    policy.admit(key)
    assert policy._records[key].group == 0, "nothing is known of it any more"


def ask(policy: Learned, *numbers: int) -> None:
    """A prompt is asked for, and what is missing of it is stored."""
    known = [key for key in map(chunk_key, numbers) if key in policy._records]
    policy.ask(known, [chunk_key(number) for number in numbers[len(known) :]])
    for key in reversed(known):
        policy.use(key)
    for number in numbers[len(known) :]:
        policy.admit(chunk_key(number))


def sizes(policy: Learned, *numbers: int) -> list[int]:
    return [policy._records[chunk_key(number)].size for number in numbers]


def test_chunks_are_grouped_by_the_new_chunks_of_the_prompt_that_asked_last() -> None:
    policy = Learned()
    ask(policy, *range(6))
    assert sizes(policy, *range(6)) == [3, 3, 3, 3, 3, learned.LAST]
    ask(policy, *range(4), 10)
    assert sizes(policy, *range(6), 10) == [1, 1, 1, 1, 3, learned.LAST, learned.LAST]
    ask(policy, *range(4), 10)
    assert sizes(policy, *range(4), 10) == [0] * 5, "it has no new chunks"
    assert [policy._records[chunk_key(number)].group % learned.SIZE_COUNT for number in range(4)] == [0] * 4
    ask(policy, *range(1000, 2000))
    assert sizes(policy, 1000, 1998) == [learned.LAST - 1] * 2
    assert not policy._asked


def test_chunks_that_were_evicted_are_not_new_when_they_are_asked_for_again() -> None:
    policy = Learned()
    ask(policy, *range(8))
    ask(policy, 100)
    assert policy.choose() == chunk_key(0)
    policy.ask([], [chunk_key(number) for number in range(11)])
    policy.admit(chunk_key(0))
    assert sizes(policy, 0) == [2], "3 of 11 are new"


def test_chunks_that_no_prompt_asked_for_have_no_size() -> None:
    policy = admitted(1, 2)
    policy.use(chunk_key(1))
    assert sizes(policy, 1, 2) == [0, 0]


def test_what_was_asked_for_and_never_stored_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_ASKED", 4)
    policy = admitted(1)
    for number in range(10, 100, 3):
        policy.ask([], [chunk_key(number + place) for place in range(3)])
        assert len(policy._asked) <= 4
    policy.admit(chunk_key(10))
    policy.admit(chunk_key(97))
    assert sizes(policy, 10, 97) == [0, 2]


def prompts_found(policy: EvictionPolicy, *, asks: bool) -> int:
    """Of 194 prompts of three new chunks, how many are found, all but the last chunk, when they return after 60 others
    of eight new chunks, which do not."""
    queue, found = EvictionQueue(policy), 0

    def request(first: int, count: int) -> bool:
        keys = [chunk_key(first + place) for place in range(count)]
        held = list(itertools.takewhile(queue.__contains__, keys))
        queue.use(held, keys[len(held) :] if asks else None)
        for parent, key in itertools.pairwise((None, *keys)):
            assert key is not None
            if key not in queue:
                if len(queue) == 200:
                    queue.pop()
                queue.add(key, parent)
        return len(held) >= count - 1

    for turn in range(0, 200_000, 1000):
        request(turn, 3)
        for other in range(10):
            request(turn + 100 + 10 * other, 8)
        found += turn >= 6000 and request(turn - 6000, 3)
    return found


def test_prompts_of_a_size_that_never_returns_leave_before_those_of_one_that_does() -> None:
    assert prompts_found(Lru(), asks=True) == 0
    assert prompts_found(Learned(), asks=True) > 150
    assert prompts_found(Learned(), asks=False) < 100


def test_the_same_requests_have_the_same_chunks_evicted() -> None:
    gone: list[list[ChunkKey]] = []
    for _ in range(2):
        policy = Learned()
        gone.append([])
        for number in range(0, 9000, 9):
            ask(policy, *range(number, number + number % 8 + 1))
            ask(policy, *range(number // 2, number // 2 + 3))
            gone[-1].extend(key for _ in range(6) if len(policy._records) > 100 and (key := policy.choose()))
    assert gone[0] == gone[1] != []


def test_a_size_of_few_chunks_has_the_chances_of_its_level_times_a_factor() -> None:
    shape = (2, 2, 20)
    again, passed = np.zeros(shape), np.zeros(shape)
    again[0, 0, 10] = passed[0, 0, 10] = 400  # all of size 0 are used again at one age
    passed[0, 1, 15] = 400  # none of size 1 is
    passed[1, :, 15] = 400
    chances = learned._chances(again, passed)
    many, few = chances[0]
    assert 0.15 < many[10] < 1
    assert 0 < few[10] < 0.2 * many[10]
    assert few[9] / many[9] == pytest.approx(few[10] / many[10]), "one factor for all ages"
    assert (chances[1, 0] == chances[1, 1]).all(), "factors are apart for chunks that were used again"
    assert ((chances >= 0) & (chances <= 1)).all()


def test_old_times_lose_weight_once_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "KEPT", 3)
    times = learned.ReuseTimes(1)
    record = learned.Record(chunk_key(1), 0)
    times.add(record)
    times.used(record)
    counts = []
    for _ in range(200):
        times.ended(record, 10, again=True)
        times.learn(100)
        counts.append(sum(times._ended))
    assert 16 < max(counts) < 64
    assert sum(times._again) == sum(times._ended)


def test_ages_are_smoothed_by_those_beside_them() -> None:
    assert learned._smooth(np.array([3.0, 0.0, 0.0, 6.0])).tolist() == [1.5, 1.0, 2.0, 3.0]
    assert learned._smooth(np.array([3.0])).tolist() == [3.0]


def test_the_rank_at_each_end_of_a_line_is_that_of_its_chunk() -> None:
    policy = Learned()
    for number in range(3):
        policy.admit(chunk_key(number))
    (line,) = (line for line in policy._lines if line)
    assert [policy._rank(line, youngest=youngest)[1] for youngest in (False, True)] == [1, 3]


def admitted(*numbers: int) -> Learned:
    """A policy that has these chunks, all of one group, and nothing learned: the oldest leave first."""
    policy = Learned()
    for number in numbers:
        policy.admit(chunk_key(number))
    return policy


def test_a_forgotten_chunk_leaves_the_sample() -> None:
    policy = admitted(1, 2)
    assert len(policy._times) == 2
    policy.forget(chunk_key(1))
    assert policy._times._sample == [policy._records[chunk_key(2)]]


def test_a_chunk_outside_of_the_sample_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_SAMPLE", 1)
    policy = admitted(*range(20))
    outside = [key for key, record in policy._records.items() if record.slot < 0]
    assert outside
    sample = list(policy._times._sample)
    for key in outside:
        policy.forget(key)
    assert policy._times._sample == sample


def test_of_chunks_of_which_nothing_is_known_the_oldest_leaves() -> None:
    policy = admitted(1, 2, 3)
    assert [policy.choose() for _ in range(4)] == [chunk_key(1), chunk_key(2), chunk_key(3), None]


def test_the_youngest_leaves_if_the_older_ones_are_about_to_be_used() -> None:
    policy = admitted(1, 2, 3)
    for index in policy._times.index:
        index[:] = [float(level) for level in range(learned.AGE_COUNT)]
    assert policy.choose() == chunk_key(3)


def test_groups_are_compared_after_some_choices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = admitted(*range(20))
    compared: list[int] = []
    monkeypatch.setattr(policy._times, "learn", compared.append)
    for count in range(1, 17):
        assert policy.choose() is not None
        assert len(compared) == -(-count // learned.MAX_CHOICES)


def test_a_chunk_that_returns_is_not_forgotten_as_an_evicted_one() -> None:
    policy = admitted(*range(10))
    gone = policy.choose()
    assert gone == chunk_key(0)
    assert list(policy._chosen) == [gone]
    policy.admit(gone)
    assert not policy._chosen
    policy.use(chunk_key(1))
    assert not policy._chosen
    for number in range(2, 6):
        assert policy.choose() == chunk_key(number)
    assert list(policy._chosen) == [chunk_key(number) for number in range(2, 6)]
