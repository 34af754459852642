"""Metrics of servers that are read at each scrape, and those of every server: its unary gRPC calls, which have spans,
and which version of lmkv runs.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv import __version__
from lmkv.telemetry import spans

BOUNDS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets. Those of the semantic conventions begin at 5 ms, more than most calls here take."""


Labels = TypeVar("Labels", bound=str | tuple[str, ...])
"""The value of the only label, or those of all."""


class Scraped(Collector):
    """A collector that reads its values at each scrape, so that they cost nothing in between."""

    prefix = ""
    """The beginning of the names of its metrics."""

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering does not collect."""
        return []

    def gauge(self, name: str, documentation: str, value: float) -> Metric:
        """A gauge without labels."""
        return GaugeMetricFamily(self.prefix + name, documentation, value=value)

    def counter(self, name: str, documentation: str, value: float) -> Metric:
        """A counter without labels."""
        return CounterMetricFamily(self.prefix + name, documentation, value=value)

    def gauges(self, name: str, documentation: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
        """A gauge for each combination of labels."""
        return _filled(GaugeMetricFamily(self.prefix + name, documentation, labels=labels), values)

    def counters(self, name: str, documentation: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
        """A counter for each combination of labels."""
        return _filled(CounterMetricFamily(self.prefix + name, documentation, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Labels, float]) -> Metric:
    for labels, value in values.items():
        family.add_metric([labels] if isinstance(labels, str) else labels, value)
    return family


class _Histogram:
    """Durations of the calls of one method that ended with one code."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_SECONDS) + 1)


class ServerCalls(Scraped):
    """Prometheus collector of the unary calls of one server."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], _Histogram] = {}
        self.in_flight_count = 0
        """Calls in flight."""

    def observe(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> ServerCall:
        """A context manager that measures one call."""
        return ServerCall(self, method.removeprefix("/"), metadata)

    def record(self, method: str, code: str, seconds: float) -> None:
        """Counts a call that has ended."""
        histogram = self._histograms.get((method, code))
        if histogram is None:
            histogram = self._histograms[method, code] = _Histogram()
        histogram.seconds += seconds
        histogram.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def collect(self) -> list[Metric]:
        """`rpc.server.call.duration` of the semantic conventions, by its Prometheus name."""
        family = HistogramMetricFamily(
            "rpc_server_call_duration_seconds",
            "Time that answered unary gRPC calls took in the server.",
            labels=("rpc_system_name", "rpc_method", "rpc_response_status_code"),
        )
        bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
        for (method, code), histogram in self._histograms.items():
            counts = accumulate(histogram.buckets)
            family.add_metric(("grpc", method, code), list(zip(bounds, counts, strict=True)), histogram.seconds)
        return [family]


class ServerCall:
    """One call. It counts as successful unless `fail` was called or it is left by an exception."""

    __slots__ = ("_begun", "_calls", "_code", "_method", "_span")

    def __init__(self, calls: ServerCalls, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        self._calls = calls
        self._method = method
        self._span = spans.serve(method, metadata)
        self._code = ""
        self._begun = time.perf_counter()

    def fail(self, code: str) -> None:
        """Sets the gRPC status code that the call ends with."""
        self._code = code

    def __enter__(self) -> Self:
        self._calls.in_flight_count += 1
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.in_flight_count -= 1
        code = self._code or ("OK" if kind is None else "CANCELLED")  # `fail` sets errors; the rest are cancellations
        self._calls.record(self._method, code, time.perf_counter() - self._begun)
        self._span.set_rpc_status(code)
        self._span.__exit__(None, None, None)


METRIC_NAME = "lmkv_build_info"


class BuildInfo(Scraped):
    """Prometheus collector of the versions of lmkv and Python, as labels of a sample that is always 1."""

    def collect(self) -> list[Metric]:
        """One gauge with one sample."""
        versions = {(__version__, platform.python_version()): 1}
        text = "Always 1; its labels are the versions of the process."
        return [self.gauges(METRIC_NAME, text, ["version", "python_version"], versions)]
