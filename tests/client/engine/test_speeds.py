"""How fast an engine computes prompts, measured by its steps."""

from __future__ import annotations

import pytest

from lmkv_client.engine.speeds import DOUBT, KEPT, MAX_STEPS, LoadCosts, LoadTimes, PrefillRate


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
    times = LoadTimes()
    for token_count, seconds in loads:
        times.add(token_count, seconds)
    return times


def test_nothing_is_expected_before_a_load_was_measured() -> None:
    assert LoadTimes().seconds(100) == 0


def test_no_tokens_take_no_time() -> None:
    assert times_of((100, 1.0)).seconds(0) == 0


def test_loads_of_one_size_are_taken_for_proportional() -> None:
    times = times_of(*[(1000, 2.0)] * 5)
    assert times.seconds(500) == pytest.approx(1.0)
    assert times.seconds(2000) == pytest.approx(4.0)


def test_the_part_that_every_load_takes_is_found_from_loads_of_two_sizes() -> None:
    times = times_of(*[(size, 0.5 + 0.001 * size) for size in (100, 1000, 400, 100)])
    for size in (1, 100, 10_000):
        assert times.seconds(size) == pytest.approx(0.5 + 0.001 * size)


def test_a_larger_load_that_was_faster_does_not_make_times_negative() -> None:
    times = times_of((100, 1.0), (1000, 0.1))
    assert 0 < times.seconds(1) == times.seconds(100_000) < 1


def test_the_expectation_follows_what_comes() -> None:
    times = times_of(*[(100, 9.0)] * 5, *[(100, 1.0)] * 50)
    assert times.seconds(100) == pytest.approx(1.0, rel=0.01)


def test_each_refusal_lowers_the_expectation_until_a_load_is_tried() -> None:
    costs = LoadCosts()
    for token_count in (100, 1000):
        costs.own.add(token_count, 2.0)
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
    costs = LoadCosts()
    for times, seconds in ((costs.own, own_fixed), (costs.fetched, fetched_fixed)):
        for token_count in (10, 10_000):
            times.add(token_count, seconds)
    assert costs.choose(own, fetched, RATE) == chosen


def test_everything_is_loaded_while_the_rate_of_computing_is_unknown() -> None:
    costs = LoadCosts()
    costs.own.add(100, 100.0)
    assert costs.choose(100, 50, 0) == 150


def test_earlier_loads_lose_weight() -> None:
    times = times_of((100, 1.0), (100, 3.0))
    assert times.seconds(100) == pytest.approx((KEPT * 1.0 + 3.0) / (KEPT + 1))


def test_a_refusal_lowers_the_expectation_of_every_size_alike() -> None:
    times = times_of(*[(size, 0.5 + 0.001 * size) for size in (100, 1000, 400, 100)])
    times.refused()
    for size in (1, 100, 10_000):
        assert times.seconds(size) == pytest.approx(DOUBT * (0.5 + 0.001 * size))


def test_a_load_that_takes_as_long_as_computing_is_made() -> None:
    costs = LoadCosts()
    costs.own.add(RATE, 1.0)
    assert costs.choose(RATE, 0, RATE) == RATE
    costs.fetched.add(RATE, 1.0)
    assert costs.choose(0, RATE, RATE) == RATE
    assert costs.fetched.seconds(RATE) == costs.own.seconds(RATE) == 1.0, "nothing was refused"


def test_what_is_not_fetched_lowers_only_the_expectation_of_fetches() -> None:
    costs = LoadCosts()
    costs.own.add(RATE, 0.1)
    costs.fetched.add(2 * RATE, 9.0)
    assert costs.choose(RATE, RATE, RATE) == RATE
    assert costs.fetched.seconds(2 * RATE) == pytest.approx(DOUBT * 9.0)
    assert costs.own.seconds(RATE) == pytest.approx(0.1)


def test_loads_of_nearly_one_size_are_taken_for_proportional() -> None:
    times = times_of((10_000, 2.0), (10_001, 1.0))
    assert times.seconds(1) == pytest.approx(times.seconds(10_000) / 10_000)
