"""Averages, medians and percentiles, in the unit they name."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.proxy.statistics import MAX_SAMPLES, LatencyStatistics, LatencySummary, summarize


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=300))
def test_summaries_are_those_of_the_standard_library(seconds: list[float]) -> None:
    summary = summarize(seconds)
    ordered = sorted(seconds)
    assert summary.average_ms == pytest.approx(1000 * statistics.fmean(seconds))
    assert summary.median_ms == pytest.approx(1000 * statistics.median_low(seconds))
    assert summary.p99_ms >= summary.median_ms
    below = sum(1000 * each <= summary.p99_ms for each in ordered)
    assert below >= 0.99 * len(ordered)


def test_nothing_is_zero() -> None:
    assert summarize([]) == LatencySummary(average_ms=0.0, median_ms=0.0, p99_ms=0.0)


def test_the_line_for_the_log_has_the_unit_that_it_names_and_no_kind_without_samples() -> None:
    statistics = LatencyStatistics()
    statistics.record_prefill(0.1)
    statistics.record_first_token(0.101)
    assert statistics.line() == (
        "1 request, average / median / 99th percentile; Prefill node TTFT 100.00 / 100.00 / 100.00 ms; "
        "TTFT 101.00 / 101.00 / 101.00 ms"
    )
    for seconds in (0.2, 0.3):
        statistics.record_prefill(seconds)
        statistics.record_first_token(seconds + 0.001)
    statistics.record_inter_token(0.004)
    assert statistics.line() == (
        "3 requests, average / median / 99th percentile; Prefill node TTFT 200.00 / 200.00 / 300.00 ms; "
        "TTFT 201.00 / 201.00 / 301.00 ms; ITL 4.00 / 4.00 / 4.00 ms"
    )


def test_the_number_of_samples_is_limited() -> None:
    statistics = LatencyStatistics()
    for number in range(MAX_SAMPLES + 10):
        statistics.record_first_token(float(number))
    assert statistics.request_count == MAX_SAMPLES + 10
    assert statistics.summaries()["TTFT"].average_ms == 1000 * (10 + (MAX_SAMPLES - 1) / 2)


def test_percentiles_are_samples_by_nearest_rank() -> None:
    summary = summarize(number / 1000 for number in range(200, 0, -1))
    assert (summary.median_ms, summary.p99_ms) == (100.0, 198.0)
    assert summarize([0.25]) == LatencySummary(average_ms=250.0, median_ms=250.0, p99_ms=250.0)
