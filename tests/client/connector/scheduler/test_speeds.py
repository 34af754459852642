"""How fast an engine computes prompts, measured by its steps."""

from __future__ import annotations

import pytest

from lmkv_client.engine.prefill_rate import KEPT, MAX_STEPS, PrefillRate


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
