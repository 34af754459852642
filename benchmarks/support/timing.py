"""Timing of acts: side by side, in turns, by medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def seconds_of(act: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def in_turns(acts: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each act in each round, one list per act.

    The order is turned round from one round to the next (A B, B A, ...), so that neither a drift nor what one act
    leaves in the caches favours any of them. A first round warms up and does not count.
    """
    seconds: list[list[float]] = [[] for _ in acts]
    for number in range(rounds + 1):
        order = range(len(acts)) if number % 2 else reversed(range(len(acts)))
        for index in order:
            took = seconds_of(acts[index])
            if number:
                seconds[index].append(took)
    return seconds


def median_ratio(values: Sequence[float], baselines: Sequence[float]) -> float:
    """Median of the ratios of pairs that were measured next to each other."""
    return statistics.median(value / baseline for value, baseline in zip(values, baselines, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
