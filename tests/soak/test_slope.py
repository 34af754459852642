"""Leaks are found in synthetic series; noise, steps, saturation and random walks are not taken for leaks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from tests.soak.slope import HOUR_SECONDS, Point, medians, rises, slope_of

LEVEL = 200.0
"""MiB, say."""
BOUND = LEVEL / 100
SPACING_SECONDS = 5
SEEDS = range(20)

Noise = Callable[[random.Random, float], float]


def series(value: Callable[[float], float], seconds: float = 2700) -> list[Point]:
    """A sample every five seconds: the value at the fraction of the series that is over."""
    times = [index * SPACING_SECONDS for index in range(round(seconds / SPACING_SECONDS))]
    return [(at, value(at / seconds)) for at in times]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "spread", [0.0, 0.5, 2.0, 10.0], ids=lambda spread: f"noise-of-{100 * spread / LEVEL:g}-percent"
)
def test_noise_around_a_level_does_not_rise(seed: int, spread: float) -> None:
    chance = random.Random(seed)
    assert not rises(series(lambda _: chance.gauss(LEVEL, spread)), BOUND)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_a_leak_of_five_percent_of_the_level_per_hour_is_found(seed: int, spread: float) -> None:
    chance = random.Random(seed)
    assert rises(series(lambda done: LEVEL * (1 + 0.05 * 0.75 * done) + chance.gauss(0, spread)), BOUND)


def test_a_leak_in_steps_is_found() -> None:
    assert rises(series(lambda done: LEVEL + math.floor(done * 20)), BOUND), "an allocator takes 1 MiB at a time"


def test_one_more_file_descriptor_every_few_minutes_is_found() -> None:
    assert rises(series(lambda done: 40 + math.floor(done * 9)), 1.0)


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_one_step_does_not_rise(at: float) -> None:
    chance = random.Random(1)
    assert not rises(series(lambda done: LEVEL + 8 * (done > at) + chance.gauss(0, 0.5)), BOUND)


def test_what_grows_to_a_limit_does_not_rise() -> None:
    chance = random.Random(1)
    assert not rises(series(lambda done: LEVEL + 64 * min(2 * done, 1) + chance.gauss(0, 0.5)), BOUND)


def test_what_falls_does_not_rise() -> None:
    assert not rises(series(lambda done: LEVEL * (1 - done / 2)), BOUND)


def test_few_random_walks_are_taken_for_a_leak() -> None:
    def walk(seed: int) -> list[Point]:
        chance = random.Random(seed)
        steps = itertools.accumulate((chance.gauss(0, 0.1) for _ in range(540)), initial=LEVEL)
        return [(SPACING_SECONDS * index, value) for index, value in enumerate(steps)]

    assert sum(rises(walk(seed), BOUND) for seed in range(100)) <= 10


def test_the_slope_of_a_line_is_exact() -> None:
    slope = slope_of(medians(series(lambda done: 10 + done, HOUR_SECONDS)))
    assert slope.per_hour == pytest.approx(1)
    assert slope.lower_per_hour == pytest.approx(1)
    assert slope.level == pytest.approx(10.5, rel=0.01)


def test_single_outliers_do_not_count() -> None:
    assert not rises(series(lambda done: LEVEL + 1000 * (round(done * 2700) % 45 == 0)), BOUND)


def test_three_points_are_too_few_to_say_that_they_rise() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert slope_of(points).lower_per_hour == -math.inf
    assert not rises(points, 0.0)
    assert not rises([], 0.0)
