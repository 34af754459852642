"""How fast an engine computes prompts, measured by its steps."""

from __future__ import annotations

import pytest

from lmkv_client.engine.speeds import (
    DOUBT,
    KEPT,
    MAX_STEPS,
    LoadCosts,
    LoadTimes,
    PrefillQueue,
    PrefillRate,
    is_too_late,
    seconds_left,
)


def test_nothing_is_known_before_the_first_step_has_ended() -> None:
    rate = PrefillRate(100)
    rate.planned(1000, 1.0)
    assert rate.tokens_per_second == 0
    rate.ended(1.5)
    assert rate.tokens_per_second == 2000


def test_small_steps_do_not_count() -> None:
    rate = PrefillRate(100)
    rate.planned(99, 0.0)
    rate.ended(1.0)
    assert rate.tokens_per_second == 0


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_it_ends() -> None:
    rate = PrefillRate(100)
    for number in range(2):
        rate.planned(1000, 0.001 * number)
    rate.ended(1.0)
    rate.ended(2.0)
    assert rate.tokens_per_second == 1000


def test_the_time_between_steps_is_not_theirs() -> None:
    rate = PrefillRate(100)
    for start in (0.0, 100.0):
        rate.planned(1000, start)
        rate.ended(start + 0.5)
    assert rate.tokens_per_second == 2000


def test_the_average_follows_what_comes() -> None:
    rate = PrefillRate(100)
    now = 0.0
    for seconds in [1.0] * 5 + [0.1] * 50:
        rate.planned(1000, now)
        now += seconds
        rate.ended(now)
    assert rate.tokens_per_second == pytest.approx(10_000, rel=0.01)


def test_steps_without_tokens_and_ends_without_a_step_change_nothing() -> None:
    rate = PrefillRate(100)
    rate.ended(0.5)
    rate.planned(0, 1.0)
    rate.ended(2.0)
    assert rate.tokens_per_second == 0
    for number in range(10 * MAX_STEPS):  # whose end is never reported
        rate.planned(1000, float(number))
    rate.ended(1000.0)
    assert rate.tokens_per_second > 0


def test_a_step_of_the_least_size_counts_and_earlier_ones_lose_weight() -> None:
    rate = PrefillRate(100)
    rate.planned(100, 0.0)
    rate.ended(1.0)
    assert rate.tokens_per_second == 100
    rate.planned(1000, 1.0)
    rate.ended(2.0)
    assert rate.tokens_per_second == round((KEPT * 100 + 1000) / (KEPT + 1))


def test_a_step_without_a_duration_does_not_count_but_ends_the_one_before_it() -> None:
    rate = PrefillRate(100)
    rate.planned(1000, 5.0)
    rate.planned(1000, 5.0)
    rate.ended(5.0)
    assert rate.tokens_per_second == 0
    rate.ended(5.5)
    assert rate.tokens_per_second == 2000


RATE = 1000
"""Tokens that are computed per second."""


def times_of(*loads: tuple[int, float]) -> LoadTimes:
    """The times of these loads, after the one that connects."""
    times = LoadTimes()
    for token_count, seconds in ((1, 1000.0), *loads):
        times.add(token_count, seconds)
    return times


def costs_of(own: tuple[int, float], fetched: tuple[int, float]) -> LoadCosts:
    """Costs by one load of each kind."""
    costs = LoadCosts()
    costs.own, costs.fetched = times_of(own), times_of(fetched)
    return costs


def test_nothing_is_expected_before_a_load_was_measured_nor_from_the_one_that_connects() -> None:
    times = LoadTimes()
    assert times.seconds(100) == 0
    times.add(100, 1000.0)
    assert times.seconds(100) == 0
    times.add(100, 1.0)
    assert times.seconds(100) == 1.0


def test_no_tokens_take_no_time() -> None:
    assert times_of((100, 1.0)).seconds(0) == 0


def test_by_loads_of_one_size_others_are_as_fast_as_they_can_be() -> None:
    times = times_of(*[(1000, 2.0)] * 5)
    assert times.seconds(500) == pytest.approx(1.0)
    assert times.seconds(1000) == pytest.approx(2.0)
    assert times.seconds(16_000) == pytest.approx(2.0)


def test_a_large_hit_is_not_refused_for_what_small_loads_have_taken() -> None:
    costs = costs_of((1, 0.0), (256, 0.18))
    assert costs.choose(0, 4096, 4 * RATE) == 4096
    costs.fetched.add(256, 0.16)
    assert costs.choose(0, 4096, 4 * RATE) == 4096
    for token_count in (4096, 256, 4096):
        costs.fetched.add(token_count, token_count * 0.0007)
    assert costs.choose(0, 4096, 4 * RATE) == 0, "large ones were measured"


def test_the_part_that_every_load_takes_is_found_from_loads_of_two_sizes() -> None:
    times = times_of(*[(size, 0.5 + 0.001 * size) for size in (100, 1000, 400, 100)])
    for size in (1, 100, 10_000):
        assert times.seconds(size) == pytest.approx(0.5 + 0.001 * size, rel=0.02)


def test_a_larger_load_that_was_faster_does_not_make_times_negative() -> None:
    times = times_of((100, 1.0), (1000, 0.1))
    assert 0 < times.seconds(1) <= times.seconds(100_000) < 1


def test_the_expectation_follows_what_comes() -> None:
    times = times_of(*[(100, 9.0)] * 5, *[(100, 1.0)] * 50)
    assert times.seconds(100) == pytest.approx(1.0, rel=0.01)


def test_each_refusal_lowers_the_expectation_until_a_load_is_tried() -> None:
    costs = costs_of((100, 2.0), (100, 2.0))
    chosen = [costs.choose(100, 0, RATE) for _ in range(60)]
    assert chosen[0] == 0
    assert chosen[-1] == 100
    assert chosen == sorted(chosen)


@pytest.mark.parametrize(
    ("own", "fetched", "own_fixed", "fetched_fixed", "chosen"),
    [
        (500, 0, 0.4, 0.0, 500),
        (500, 0, 0.6, 0.0, 0),
        (500, 500, 0.1, 0.5, 1000),
        (500, 500, 0.1, 0.7, 500),  # 0.1 s for the own ones, 0.5 s to compute the others
        (500, 500, 0.6, 0.7, 1000),
        (500, 100, 0.6, 0.8, 0),
        (0, 500, 0.0, 0.6, 0),
        (0, 500, 0.6, 0.4, 500),
    ],
)
def test_what_is_expected_to_be_over_first_is_chosen(
    own: int, fetched: int, own_fixed: float, fetched_fixed: float, chosen: int
) -> None:
    costs = costs_of((10, own_fixed), (10, fetched_fixed))
    for times, seconds in ((costs.own, own_fixed), (costs.fetched, fetched_fixed)):
        times.add(10_000, seconds)
    assert costs.choose(own, fetched, RATE) == chosen


def test_everything_is_loaded_while_the_rate_of_computing_is_unknown() -> None:
    costs = costs_of((100, 100.0), (100, 100.0))
    assert costs.choose(100, 50, 0) == 150


def test_earlier_loads_lose_weight() -> None:
    times = times_of((100, 1.0), (100, 3.0))
    assert times.seconds(100) == pytest.approx((KEPT * 1.0 + 3.0) / (KEPT + 1))


def test_a_refusal_lowers_the_expectation_of_every_size_alike() -> None:
    times, other = (times_of(*[(size, 0.5 + 0.001 * size) for size in (100, 1000, 400, 100)]) for _ in range(2))
    times.refused()
    for size in (1, 100, 10_000):
        assert times.seconds(size) == pytest.approx(DOUBT * other.seconds(size))


def test_a_load_that_takes_as_long_as_computing_is_made() -> None:
    costs = costs_of((RATE, 1.0), (RATE, 1.0))
    assert costs.choose(RATE, 0, RATE) == RATE
    assert costs.choose(0, RATE, RATE) == RATE
    assert costs.fetched.seconds(RATE) == costs.own.seconds(RATE) == 1.0, "nothing was refused"


def test_what_is_not_fetched_lowers_only_the_expectation_of_fetches() -> None:
    costs = costs_of((RATE, 0.1), (2 * RATE, 9.0))
    assert costs.choose(RATE, RATE, RATE) == RATE
    assert costs.fetched.seconds(2 * RATE) == pytest.approx(DOUBT * 9.0)
    assert costs.own.seconds(RATE) == pytest.approx(0.1)


def test_by_loads_of_nearly_one_size_others_are_as_fast_as_they_can_be() -> None:
    for loads in ([(10_000, 2.0), (10_001, 1.0)], [(10_000, 1.0), (10_001, 2.0)]):
        times = times_of(*loads)
        assert times.seconds(1) == pytest.approx(times.seconds(10_000) / 10_000, rel=0.01)
        assert times.seconds(100_000) == pytest.approx(times.seconds(10_000), rel=0.01)


# ---- what prompts wait for


LATER = 1e6
"""Long after the last request has come."""


def queued(*counts: int) -> PrefillQueue:
    """Requests `a`, `b`, ..., all at time 0."""
    queue = PrefillQueue()
    for request_id, count in zip("abcd", counts, strict=False):
        queue.add(request_id, count, 0.0)
    return queue


def before(queue: PrefillQueue, request_id: str) -> float:
    """The tokens that a request waits for."""
    return queue.seconds(request_id, 0, 1, LATER)


def test_a_prompt_waits_for_those_that_came_before_it_until_their_turn() -> None:
    queue = queued(1000, 500, 200)
    assert [before(queue, request_id) for request_id in ("a", "b", "c", "new")] == [0, 1000, 1500, 1700]
    queue.expect("b", 100)  # the rest of it is held
    assert before(queue, "c") == 1100
    queue.planned({"a": 600})  # the rest of it is for another step
    assert before(queue, "b") == 400
    queue.planned({"a": 400, "b": 100})
    assert before(queue, "c") == 0
    queue.remove("c")
    assert len(queue) == 0
    queue.expect("gone", 5)
    queue.planned({"gone": 5})
    queue.remove("gone")
    assert len(queue) == 0


def test_what_is_computed_costs_those_that_wait_behind() -> None:
    queue = queued(1000, 500, 200)
    assert queue.seconds("c", 200, 100, LATER) == pytest.approx(17)
    assert queue.seconds("b", 500, 100, LATER) == pytest.approx(15 + 5)
    assert queue.seconds("a", 1000, 100, LATER) == pytest.approx(10 + 2 * 10)
    assert queue.seconds("a", 1000, 0, LATER) == 0, "the rate is not known"


def test_what_is_computed_costs_those_that_come_meanwhile_if_as_many_come_as_lately() -> None:
    queue = PrefillQueue()
    for number in range(600):  # one a second
        queue.add(str(number), 100, float(number))
        queue.remove(str(number))
    assert queue.seconds("a", 1000, 1000, 600.0) == pytest.approx(1 + 1, rel=0.05)
    assert queue.seconds("a", 4000, 1000, 600.0) == pytest.approx(4 + 4 * 4, rel=0.05)
    assert queue.seconds("a", 1000, 1000, 900.0) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("waited", "arrived", "missing", "computing", "is_late"),
    [
        (0.1, 0, 1000, 0.5, False),  # silent, but not for as long as computing takes
        (0.6, 0, 1000, 0.5, True),
        (0.6, 500, 500, 0.25, True),  # at this pace the rest takes 0.6 s
        (0.6, 900, 100, 0.5, False),  # nearly done
        (0.2, 100, 900, 0.5, False),  # slow, but a slow beginning proves nothing yet
        (5.0, 0, 1000, 10.0, False),  # the engine computes others first: waiting is free
    ],
)
def test_a_load_is_too_late_once_computing_its_rest_beats_its_pace(
    waited: float, arrived: int, missing: int, computing: float, is_late: bool
) -> None:
    assert is_too_late(waited, arrived, missing, computing) is is_late


@pytest.mark.parametrize(
    ("waited", "steady", "is_late"),
    [
        (0.2, 1.5, True),  # the rest takes three times as long as computing
        (0.1, 1.5, False),  # too early for an estimate
        (0.2, 0.9, False),  # not slow enough to give up what comes until then
        (0.2, 0.0, False),  # not known
    ],
)
def test_a_load_behind_a_slow_link_is_abandoned_before_the_time_of_computing_is_lost(
    waited: float, steady: float, is_late: bool
) -> None:
    assert is_too_late(waited, 100, 900, 0.5, steady) is is_late


@pytest.mark.parametrize("pace", [0.01, 0.1, 0.3, 0.9, 1.1, 3.0, 20.0])
@pytest.mark.parametrize("silence", [0.0, 0.3, 2.0, 50.0])
def test_waiting_costs_no_more_than_twice_the_better_of_loading_and_computing(pace: float, silence: float) -> None:
    """A load of 1,000 tokens at `pace` times the engine's rate, after a silence; computing all takes a second."""
    rate, count, now = 1000.0, 1000, 0.0
    loading = silence + 1 / pace
    while True:
        arrived = min(count, max(0, int((now - silence) * rate * pace)))
        if arrived == count:
            took = now
            break
        steady = seconds_left(now - silence, arrived, count - arrived) if arrived else 0.0
        if is_too_late(now, arrived, count - arrived, (count - arrived) / rate, steady):
            took = now + (count - arrived) / rate
            break
        now += 0.001
    assert took <= 2.01 * min(1.0, loading) or took <= 1.01 * loading
    assert took <= 2.01


def test_the_pace_of_what_has_arrived_says_when_the_rest_comes() -> None:
    assert seconds_left(2.0, 100, 300) == 6.0
    assert seconds_left(2.0, 0, 300) == 2.0


def test_the_expected_time_of_a_load_depends_on_whether_it_is_fetched() -> None:
    assert LoadCosts().seconds(100, 0) == LoadCosts().seconds(100, 100) == 0
    costs = costs_of((100, 1.0), (100, 5.0))
    assert (costs.seconds(100, 0), costs.seconds(0, 100), costs.seconds(50, 50)) == (1.0, 5.0, 5.0)
