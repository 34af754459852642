"""How often something was done, how often with success, and how long it took. Cheap enough for every lookup."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets; the last bucket has none."""


class LatencyHistogram:
    """Counts since the start of the process."""

    def __init__(self) -> None:
        self.hits = 0
        self.seconds = 0.0
        """Time that all of it took."""
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, seconds: float, hit: bool) -> None:
        """Counts one."""
        self.hits += hit
        self.seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def at_most(self) -> list[int]:
        """How many took at most each of `BOUNDS_SECONDS`; the last number counts them all."""
        return list(accumulate(self._buckets))
