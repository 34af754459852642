"""The histogram of lookups: buckets with inclusive upper bounds, cumulative as Prometheus expects them."""

from __future__ import annotations

import pytest

from lmkv_server.coordinator.core.latency_histogram import BOUNDS_SECONDS, LatencyHistogram


def test_an_event_counts_in_each_bucket_from_its_own_on() -> None:
    histogram = LatencyHistogram()
    assert histogram.cumulative() == [0] * (len(BOUNDS_SECONDS) + 1)
    histogram.add(BOUNDS_SECONDS[2], hit=True)  # a bound belongs to its bucket
    histogram.add(BOUNDS_SECONDS[2] * 1.01, hit=False)
    histogram.add(BOUNDS_SECONDS[-1] + 1, hit=True)
    assert histogram.cumulative() == [0, 0, 1] + [2] * (len(BOUNDS_SECONDS) - 3) + [3]
    assert histogram.hits == 2
    assert histogram.seconds == pytest.approx(BOUNDS_SECONDS[2] * 2.01 + BOUNDS_SECONDS[-1] + 1)


def test_the_bounds_ascend() -> None:
    assert list(BOUNDS_SECONDS) == sorted(set(BOUNDS_SECONDS))
    assert BOUNDS_SECONDS[0] > 0
