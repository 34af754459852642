"""Prometheus metrics of the proxy. `docs/reference/metrics.md` lists their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import Metric

from lmkv.telemetry.calls import Scraped
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.statistics import LatencyStatistics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PICK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class RouterMetrics(Scraped):
    """Metrics of what chooses engines, in a registry of their own."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.registry = CollectorRegistry()
        """Exposed at `/metrics` and exported by OTLP."""
        self.lookups = self._count(
            "lookups",
            "Lookups at the coordinator. outcome: hit, miss, failed; skipped if the prompt's tokens are unknown.",
            "outcome",
        )
        self.asked_tokens = self._count("lookup_asked_tokens", "Tokens of prompts that were looked up.")
        self.hit_tokens = self._count(
            "lookup_hit_tokens", "Tokens of them that the chosen engine held: the hit rate of routing."
        )
        self.replicas = self._count(
            "replicas",
            "Copies of prompts that instances were asked for, since requests wait at their holders. outcome: that of "
            "the hint `replicate` (accepted, clipped, deferred, missing, rejected), or failed.",
            "outcome",
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _count(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(self.prefix + name, documentation, labels, registry=self.registry)

    def _time(self, name: str, documentation: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(self.prefix + name, documentation, buckets=buckets, registry=self.registry)


class ProxyMetrics(RouterMetrics):
    prefix = "lmkv_proxy_"

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.latencies = LatencyStatistics()
        """The most recent latencies, for the page and the log."""
        self.requests = self._count(
            "requests",
            "Requests. strategy: continue, repeat, alone, none. "
            "outcome: ok, refused, failed, timeout, cancelled, rejected.",
            *("path", "strategy", "outcome"),
        )
        self.repeats = self._count(
            "repeats",
            "Requests whose first token the decode engine generated again, by the parameter that requires it.",
            "reason",
        )
        self.retries = self._count(
            "retries",
            "Requests repeated on another engine after a failure, by the role of the engine that failed.",
            "role",
        )
        self.engines_file_failures = self._count(
            "engines_file_failures", "Changes of `engines_file` that were not applied, since the file is invalid."
        )
        self.first_token_seconds = self._time("time_to_first_token_seconds", "Time from a request to its first token.")
        self.prefill_seconds = self._time("prefill_seconds", "Response time of prefill engines.")
        self.inter_token_seconds = self._time(
            "inter_token_seconds", "Time from one event of a stream to the next.", _TOKEN_SECONDS
        )
        self.request_seconds = self._time("request_seconds", "Time from a request to the end of its response.")

    def collect(self) -> Iterator[Metric]:
        """The current health and load of each engine."""
        labels = ["engine", "role"]
        healthy = {(engine.url, engine.role): engine.is_healthy for engine in self._engines}
        yield self.gauges("engine_healthy", "1 while the engine is healthy, also while it drains.", labels, healthy)
        load = {(engine.url, engine.role): engine.in_flight_count for engine in self._engines}
        yield self.gauges("engine_requests_in_flight", "Requests in flight at the engine.", labels, load)


class PickerMetrics(RouterMetrics):
    """Metrics of the endpoint picker."""

    prefix = "lmkv_picker_"

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.stream_count = 0
        """Streams of the gateway that are open."""
        self.held_bytes = 0
        """Bytes of all bodies that are held back until their engine is picked."""
        self.requests = self._count(
            "requests",
            "Requests. outcome: picked, no_endpoint (503), rejected (429), refused (by cache_salt_policy), timeout.",
            "outcome",
        )
        self.pick_seconds = self._time(
            "pick_seconds",
            "Time from the end of a request's body to the choice of its engine, tokenization included.",
            _PICK_SECONDS,
        )

    def collect(self) -> Iterator[Metric]:
        """Open streams, and the current health and load of each engine."""
        yield self.gauge("streams", "Open streams of the gateway.", self.stream_count)
        yield self.gauge(
            "held_bytes",
            "Bytes of bodies that wait for the choice of their engine, and of their token ids.",
            self.held_bytes,
        )
        healthy = {engine.url: engine.is_healthy for engine in self._engines}
        yield self.gauges("engine_healthy", "1 while the engine is healthy and is picked.", ["engine"], healthy)
        load = {engine.url: engine.in_flight_count for engine in self._engines}
        yield self.gauges(
            "engine_requests_in_flight", "Requests in flight at the engine, of this picker's.", ["engine"], load
        )
