"""Latency statistics: time to first token, inter-token latency, total time. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_SAMPLES = 10_000
"""Samples per kind. A new one replaces the oldest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """Average and percentiles of durations, in milliseconds. All are 0 without samples."""

    average_ms: float
    median_ms: float
    p99_ms: float


def summarize(seconds: Iterable[float]) -> LatencySummary:
    """Average, median and 99th percentile, the latter two by nearest rank."""
    ordered = sorted(seconds)
    if not ordered:
        return LatencySummary(average_ms=0.0, median_ms=0.0, p99_ms=0.0)
    return LatencySummary(
        average_ms=1000 * math.fsum(ordered) / len(ordered),
        median_ms=1000 * _rank(ordered, 0.5),
        p99_ms=1000 * _rank(ordered, 0.99),
    )


class LatencyStatistics:
    """The most recent durations, in seconds, and the number of requests."""

    def __init__(self) -> None:
        self.request_count = 0
        """Requests whose first token was sent."""
        self._kinds: dict[str, deque[float]] = {
            "Prefill node TTFT": deque(maxlen=MAX_SAMPLES),
            "TTFT": deque(maxlen=MAX_SAMPLES),
            "ITL": deque(maxlen=MAX_SAMPLES),
            "Total": deque(maxlen=MAX_SAMPLES),
        }

    def record_prefill(self, seconds: float) -> None:
        """Records the response time of a prefill engine."""
        self._kinds["Prefill node TTFT"].append(seconds)

    def record_first_token(self, seconds: float) -> None:
        """Records the time from a request to its first token."""
        self.request_count += 1
        self._kinds["TTFT"].append(seconds)

    def record_inter_token(self, seconds: float) -> None:
        """Records the time from one token to the next."""
        self._kinds["ITL"].append(seconds)

    def record_total(self, seconds: float) -> None:
        """Records the time from a request to the end of its response."""
        self._kinds["Total"].append(seconds)

    def summaries(self) -> dict[str, LatencySummary]:
        """Summary per kind, of the kinds with samples."""
        return {kind: summarize(seconds) for kind, seconds in self._kinds.items() if seconds}

    def line(self) -> str:
        """All summaries in one line for the log."""
        kinds = [
            f"{kind} {summary.average_ms:.2f} / {summary.median_ms:.2f} / {summary.p99_ms:.2f} ms"
            for kind, summary in self.summaries().items()
        ]
        count = "1 request" if self.request_count == 1 else f"{self.request_count} requests"
        return "; ".join([f"{count}, average / median / 99th percentile", *kinds])


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]
