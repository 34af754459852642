"""`/metrics` in Prometheus's text format, and the metrics of all tenants for OTLP.

`docs/reference/metrics.md` lists the names.
Most values are read from the core at a scrape, so that they cost nothing in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.tiers import INSTANCE_TIERS
from lmkv_server.coordinator.core.history import BOUNDS_SECONDS
from lmkv_server.coordinator.core.layout_map import tier_id
from lmkv_server.coordinator.services.services import Services
from lmkv_server.http.server import metrics_response

PREFIX = "lmkv_coordinator_"
TENANT_LABEL = "tenant"

MetricSource = tuple[str, Callable[[], Iterable[Metric]]]
"""The name of a tenant, and what collects its metrics."""


class CoordinatorMetrics(Collector):
    """The metrics of one tenant, in a registry of their own: two coordinators in one process stay apart."""

    def __init__(self, services: Services, own: Sequence[Collector] = ()) -> None:
        self._services = services
        self._http_requests: Counter[tuple[str, str]] = Counter()
        self.registry = CollectorRegistry()
        """The metrics that `/metrics` shows."""
        self.registry.register(self)
        for collector in own:
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def count_http(self, path: str, code: int) -> None:
        """Counts a request by the pattern of its path and the status of its answer."""
        self._http_requests[path, str(code)] += 1

    def routes(self) -> list[Route]:
        """`/metrics`."""

        async def serve(_: Request) -> Response:
            return metrics_response(self.registry)

        return [Route("/metrics", serve)]

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        return chain(self._fleet(), self._chunks(), self._work(), self._http())

    def _fleet(self) -> Iterator[Metric]:
        core = self._services.core
        synced = sum(instance.synced for instance in core.instances)
        instances = _gauge("instances", "Registered instances, by whether their first snapshot is complete.", "synced")
        instances.add_metric(["true"], synced)
        instances.add_metric(["false"], len(core.instances) - synced)
        yield instances
        partial = _gauge("layout_partial", "1 while the layout map is incomplete: instances may hold more.")
        partial.add_metric([], core.is_partial(time.monotonic()))
        yield partial
        pins = Counter(pin.position.instance_id for pin in self._services.fleet_operations.pins.in_force())
        family = _gauge("pins", "Pins in force.", "instance_id")
        for instance in core.instances:
            family.add_metric([instance.info.instance_id], pins[instance.info.instance_id])
        yield family

    def _chunks(self) -> Iterator[Metric]:
        labels = ("instance_id", "tier")
        chunks = _gauge("chunks", "Chunks that the layout map knows an instance to hold.", *labels)
        capacity = _gauge(
            "tier_capacity_bytes", "Capacity of a tier, as its node last reported; 0 if it has no limit.", *labels
        )
        used = _gauge(
            "tier_used_bytes", "Bytes used by chunks and grants in a tier, as its node last reported.", *labels
        )
        for instance in self._services.core.instances:
            instance_id = instance.info.instance_id
            held: Counter[str] = Counter()
            for (number, _), count in self._services.core.layout.chunk_counts(instance_id).items():
                held[tier_id(number)] += count
            for usage in instance.tiers:
                if usage.tier in INSTANCE_TIERS:
                    held.setdefault(usage.tier, 0)
                capacity.add_metric([instance_id, usage.tier], usage.capacity_bytes)
                used.add_metric([instance_id, usage.tier], usage.used_bytes)
            for tier, count in held.items():
                chunks.add_metric([instance_id, tier], count)
        known = _gauge("layout_keys", "Different chunk keys in the layout map.")
        known.add_metric([], len(self._services.core.layout))
        return iter((chunks, capacity, used, known))

    def _work(self) -> Iterator[Metric]:
        lookups = self._services.lookups.latencies
        counts = lookups.cumulative()
        seconds = HistogramMetricFamily(f"{PREFIX}lookup_seconds", "Time that answered lookups took in the handler.")
        bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
        seconds.add_metric([], list(zip(bounds, counts, strict=True)), lookups.seconds)
        yield seconds
        yield _counter("lookup_hits", "Lookups that found at least one holder.", lookups.hits)
        yield _counter("reports", "Reports of nodes that were applied.", self._services.reports.report_count)
        watchers = _gauge("watchers", "Open watches.")
        watchers.add_metric([], self._services.watch.watcher_count)
        yield watchers
        running = _gauge("operations_running", "Operations that this coordinator runs.", "kind")
        kinds = Counter(operation.kind for operation in self._services.fleet_operations.table.running())
        for kind in ("clear", "copy", "drain", "move"):
            running.add_metric([kind], kinds[kind])
        yield running
        ended = CounterMetricFamily(f"{PREFIX}operations_ended", "Operations that ended.", labels=["kind", "state"])
        for labels, count in self._services.fleet_operations.table.ended_counts.items():
            ended.add_metric(labels, count)
        yield ended

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            f"{PREFIX}http_requests", "HTTP requests, by path and status.", labels=["path", "code"]
        )
        for labels, count in self._http_requests.items():
            requests.add_metric(labels, count)
        yield requests


class TenantMetrics(Collector):
    """The metrics of all `sources`, with a label for each tenant that has a name."""

    def __init__(self, sources: Callable[[], Iterable[MetricSource]]) -> None:
        self._sources = sources
        self.registry = CollectorRegistry()
        """A registry with this collector only."""
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not collect."""
        return []

    def collect(self) -> list[Metric]:
        """The current values, each metric name once."""
        families: dict[str, Metric] = {}
        for tenant, collect in self._sources():
            own = {TENANT_LABEL: tenant} if tenant else {}
            for family in collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [sample._replace(labels={**sample.labels, **own}) for sample in family.samples]
        return list(families.values())


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, labels=labels)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)
