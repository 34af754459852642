"""Prometheus metrics of the proxy. `docs/reference/metrics.md` lists their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.statistics import LatencyStatistics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PICK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ProxyMetrics(Collector):
    """The proxy's metrics in their own registry."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.latencies = LatencyStatistics()
        """The most recent latencies, for the page and the log."""
        self.registry = CollectorRegistry()
        """Exposed at `/metrics` and exported by OTLP."""
        self.requests = Counter(
            "lmkv_proxy_requests",
            "Requests. strategy: continue, repeat, alone, none. "
            "outcome: ok, refused, failed, timeout, cancelled, rejected.",
            ["path", "strategy", "outcome"],
            registry=self.registry,
        )
        self.repeats = Counter(
            "lmkv_proxy_repeats",
            "Requests whose first token the decode engine generated again, by the parameter that requires it.",
            ["reason"],
            registry=self.registry,
        )
        self.retries = Counter(
            "lmkv_proxy_retries",
            "Requests repeated on another engine after a failure, by the role of the engine that failed.",
            ["role"],
            registry=self.registry,
        )
        self.lookups = Counter(
            "lmkv_proxy_lookups",
            "Lookups at the coordinator. outcome: hit, miss, failed; skipped if the prompt's tokens are unknown.",
            ["outcome"],
            registry=self.registry,
        )
        self.asked_tokens = Counter(
            "lmkv_proxy_lookup_asked_tokens", "Tokens of prompts that were looked up.", registry=self.registry
        )
        self.hit_tokens = Counter(
            "lmkv_proxy_lookup_hit_tokens",
            "Tokens of them that the chosen engine held: the hit rate of routing.",
            registry=self.registry,
        )
        self.engines_file_failures = Counter(
            "lmkv_proxy_engines_file_failures",
            "Changes of `engines_file` that were not applied, since the file is invalid.",
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "lmkv_proxy_time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "lmkv_proxy_prefill_seconds",
            "Response time of prefill engines.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.inter_token_seconds = Histogram(
            "lmkv_proxy_inter_token_seconds",
            "Time from one event of a stream to the next.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "lmkv_proxy_request_seconds",
            "Time from a request to the end of its response.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current health and load of each engine."""
        labels = ["engine", "role"]
        healthy = GaugeMetricFamily(
            "lmkv_proxy_engine_healthy", "1 while the engine is healthy, also while it drains.", labels=labels
        )
        load = GaugeMetricFamily(
            "lmkv_proxy_engine_requests_in_flight", "Requests in flight at the engine.", labels=labels
        )
        for engine in self._engines:
            healthy.add_metric([engine.url, engine.role], engine.is_healthy)
            load.add_metric([engine.url, engine.role], engine.in_flight_count)
        yield healthy
        yield load


class PickerMetrics(Collector):
    """The endpoint picker's metrics in their own registry."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.stream_count = 0
        """Streams of the gateway that are open."""
        self.held_bytes = 0
        """Bytes of all bodies that are held back until their engine is picked."""
        self.registry = CollectorRegistry()
        """Exposed at `/metrics` and exported by OTLP."""
        self.requests = Counter(
            "lmkv_picker_requests",
            "Requests. outcome: picked, no_endpoint (503), rejected (429), refused (by cache_salt_policy), timeout.",
            ["outcome"],
            registry=self.registry,
        )
        self.lookups = Counter(
            "lmkv_picker_lookups",
            "Lookups at the coordinator. outcome: hit, miss, failed, skipped.",
            ["outcome"],
            registry=self.registry,
        )
        self.asked_tokens = Counter(
            "lmkv_picker_lookup_asked_tokens", "Tokens of prompts that were looked up.", registry=self.registry
        )
        self.hit_tokens = Counter(
            "lmkv_picker_lookup_hit_tokens",
            "Tokens of them that the picked engine held: the hit rate of routing.",
            registry=self.registry,
        )
        self.pick_seconds = Histogram(
            "lmkv_picker_pick_seconds",
            "Time from the end of a request's body to the choice of its engine, tokenization included.",
            buckets=_PICK_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Open streams, and the current health and load of each engine."""
        yield GaugeMetricFamily("lmkv_picker_streams", "Open streams of the gateway.", value=self.stream_count)
        yield GaugeMetricFamily(
            "lmkv_picker_held_bytes",
            "Bytes of bodies that wait for the choice of their engine, and of their token ids.",
            value=self.held_bytes,
        )
        healthy = GaugeMetricFamily(
            "lmkv_picker_engine_healthy", "1 while the engine is healthy and is picked.", labels=["engine"]
        )
        load = GaugeMetricFamily(
            "lmkv_picker_engine_requests_in_flight",
            "Requests in flight at the engine, of this picker's.",
            labels=["engine"],
        )
        for engine in self._engines:
            healthy.add_metric([engine.url], engine.is_healthy)
            load.add_metric([engine.url], engine.in_flight_count)
        yield healthy
        yield load
