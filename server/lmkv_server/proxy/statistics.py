"""How long clients wait: for the first token, between tokens, for the whole. No IO."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_SAMPLES = 10_000
"""Of each kind; the oldest give way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What some durations come to, in milliseconds. Without durations all is 0."""

    average_ms: float
    median_ms: float
    p99_ms: float


def summarize(seconds: Iterable[float]) -> Summary:
    """Average, median and 99th percentile, the latter two by nearest rank."""
    ordered = sorted(seconds)
    if not ordered:
        return Summary(average_ms=0.0, median_ms=0.0, p99_ms=0.0)
    return Summary(
        average_ms=1000 * math.fsum(ordered) / len(ordered),
        median_ms=1000 * _rank(ordered, 0.5),
        p99_ms=1000 * _rank(ordered, 0.99),
    )


class Statistics:
    """The last durations, in seconds, and how many requests there were."""

    def __init__(self) -> None:
        self.request_count = 0
        """Requests whose first token has come."""
        self._kinds: dict[str, deque[float]] = {
            "Prefill node TTFT": deque(maxlen=MAX_SAMPLES),
            "TTFT": deque(maxlen=MAX_SAMPLES),
            "ITL": deque(maxlen=MAX_SAMPLES),
            "Total": deque(maxlen=MAX_SAMPLES),
        }

    def prefilled(self, seconds: float) -> None:
        """A prefill engine has answered, so long after it was asked."""
        self._kinds["Prefill node TTFT"].append(seconds)

    def first(self, seconds: float) -> None:
        """A client got its first token, so long after it asked."""
        self.request_count += 1
        self._kinds["TTFT"].append(seconds)

    def between(self, seconds: float) -> None:
        """A client waited so long from one event of its stream to the next."""
        self._kinds["ITL"].append(seconds)

    def whole(self, seconds: float) -> None:
        """A client got its whole answer, so long after it asked."""
        self._kinds["Total"].append(seconds)

    def summaries(self) -> dict[str, Summary]:
        """Of each kind of which there are durations."""
        return {kind: summarize(seconds) for kind, seconds in self._kinds.items() if seconds}

    def table(self) -> str:
        """All of it as lines for the log."""
        lines = ["=" * 31, f"Num requests: {self.request_count}"]
        for kind, summary in self.summaries().items():
            lines += [
                f"{kind} stats:",
                f"- Average (ms): {summary.average_ms:.2f}",
                f"- Median (ms): {summary.median_ms:.2f}",
                f"- 99th Percentile (ms): {summary.p99_ms:.2f}",
            ]
        return "\n".join([*lines, "=" * 31])


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]
