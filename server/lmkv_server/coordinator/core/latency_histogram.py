"""Counts events, their hits and their latency. Cheap enough for every lookup."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets; the last bucket has none."""


class LatencyHistogram:
    """Counts since the process started."""

    def __init__(self) -> None:
        self.hits = 0
        self.seconds = 0.0
        """Total time of all events."""
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, seconds: float, hit: bool) -> None:
        """Counts an event."""
        self.hits += hit
        self.seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def cumulative(self) -> list[int]:
        """For each of `BOUNDS_SECONDS`, the number of events up to it; the last number counts all."""
        return list(accumulate(self._buckets))
