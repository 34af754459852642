"""Whether a series of measurements rises: Theil and Sen's slope with its confidence limit, of medians of intervals.

The limit is that of Kendall's test, widened for correlation between neighbours, such as an allocator's steps cause.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

INTERVALS = 40
"""Number of intervals that a series is divided into."""
CONFIDENCE_QUANTILE = 2.326
"""Of the normal distribution: a slope is above the lower limit with a probability of 99 %."""
MAX_CORRELATION = 0.8
"""Highest correlation between neighbours that is assumed; a higher one would hide every leak."""
HOUR_SECONDS = 3600.0

Point = tuple[float, float]
"""Seconds and a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """How much a series rises in an hour."""

    level: float
    """Median of the series."""
    per_hour: float
    """Median of the slopes between any two points (Theil and Sen)."""
    lower_per_hour: float
    """The slope is not below this, with a probability of 99 %; minus infinity if there are too few points."""


def medians(points: Sequence[Point], intervals: int = INTERVALS) -> list[Point]:
    """Median time and value of the points in each of equal intervals; intervals without points are left out."""
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    width = (last - first) / intervals or 1.0
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(min(int((point[0] - first) / width), intervals - 1), []).append(point)
    return [
        (statistics.median(at for at, _ in group), statistics.median(value for _, value in group))
        for _, group in sorted(groups.items())
    ]


def slope_of(points: Sequence[Point]) -> Slope:
    """The slope of points with different times, at least two, in the order of time."""
    slopes = sorted((b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(points, 2))
    middle = statistics.median(slopes)
    count = len(points)
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)  # standard deviation of Kendall's S without a trend
    correlation = min(max(_correlation([value - middle * at for at, value in points]), 0.0), MAX_CORRELATION)
    spread *= math.sqrt((1 + correlation) / (1 - correlation))
    rank = math.floor((len(slopes) - CONFIDENCE_QUANTILE * spread) / 2)
    return Slope(
        level=statistics.median(value for _, value in points),
        per_hour=middle * HOUR_SECONDS,
        lower_per_hour=slopes[rank] * HOUR_SECONDS if rank >= 0 else -math.inf,
    )


def rises(points: Sequence[Point], bound_per_hour: float) -> bool:
    """Whether points, in the order of time, rise by more than the bound, altogether and also in their second half.

    A leak does not end. A table or an allocator that grows to its limit does: then the second half is level.
    """
    grouped = medians(points)
    later = medians(points[len(points) // 2 :], INTERVALS // 2)
    return all(len(some) > 1 and slope_of(some).lower_per_hour > bound_per_hour for some in (grouped, later))


def _correlation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    square = sum((value - mean) ** 2 for value in values)
    return sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values)) / square if square else 0.0
