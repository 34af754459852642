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
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.telemetry.calls import Scraped
from lmkv.tiers import INSTANCE_TIERS
from lmkv_server.coordinator.core.history import BOUNDS_SECONDS
from lmkv_server.coordinator.core.layout_map import tier_id
from lmkv_server.coordinator.services.services import Services
from lmkv_server.http.server import metrics_response

TENANT_LABEL = "tenant"

MetricSource = tuple[str, Callable[[], Iterable[Metric]]]
"""The name of a tenant, and what collects its metrics."""


class CoordinatorMetrics(Scraped):
    """The metrics of one tenant, in a registry of their own: two coordinators in one process stay apart."""

    prefix = "lmkv_coordinator_"

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

        async def serve(_: Request) -> Response:
            return metrics_response(self.registry)

        return [Route("/metrics", serve)]

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        return chain(self._fleet(), self._chunks(), self._work())

    def _fleet(self) -> Iterator[Metric]:
        core = self._services.core
        synced = sum(instance.synced for instance in core.instances)
        yield self.gauges(
            "instances",
            "Registered instances, by whether their first snapshot is complete.",
            ["synced"],
            {"true": synced, "false": len(core.instances) - synced},
        )
        is_partial = core.is_partial(time.monotonic())
        yield self.gauge("layout_partial", "1 while the layout map is incomplete: instances may hold more.", is_partial)
        pins = Counter(pin.position.instance_id for pin in self._services.fleet_operations.pins.in_force())
        by_instance = {instance.info.instance_id: pins[instance.info.instance_id] for instance in core.instances}
        yield self.gauges("pins", "Pins in force.", ["instance_id"], by_instance)

    def _chunks(self) -> Iterator[Metric]:
        labels = ("instance_id", "tier")
        chunks: Counter[tuple[str, str]] = Counter()
        capacity: dict[tuple[str, str], int] = {}
        used: dict[tuple[str, str], int] = {}
        for instance in self._services.core.instances:
            instance_id = instance.info.instance_id
            for (number, _), count in self._services.core.layout.chunk_counts(instance_id).items():
                chunks[instance_id, tier_id(number)] += count
            for usage in instance.tiers:
                if usage.tier in INSTANCE_TIERS:
                    chunks.setdefault((instance_id, usage.tier), 0)
                capacity[instance_id, usage.tier] = usage.capacity_bytes
                used[instance_id, usage.tier] = usage.used_bytes
        yield self.gauges("chunks", "Chunks that the layout map knows an instance to hold.", labels, chunks)
        yield self.gauges(
            "tier_capacity_bytes",
            "Capacity of a tier, as its node last reported; 0 if it has no limit.",
            labels,
            capacity,
        )
        yield self.gauges(
            "tier_used_bytes",
            "Bytes used by chunks and grants in a tier, as its node last reported.",
            labels,
            used,
        )
        yield self.gauge("layout_keys", "Different chunk keys in the layout map.", len(self._services.core.layout))

    def _work(self) -> Iterator[Metric]:
        lookups = self._services.lookups.latencies
        counts = lookups.cumulative()
        seconds = HistogramMetricFamily(
            f"{self.prefix}lookup_seconds", "Time that answered lookups took in the handler."
        )
        bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
        seconds.add_metric([], list(zip(bounds, counts, strict=True)), lookups.seconds)
        yield seconds
        yield self.counter("lookup_hits", "Lookups that found at least one holder.", lookups.hits)
        yield self.counter("reports", "Reports of nodes that were applied.", self._services.reports.report_count)
        yield self.gauge("watchers", "Open watches.", self._services.watch.watcher_count)
        table = self._services.fleet_operations.table
        kinds = Counter(operation.kind for operation in table.running())
        running = {kind: kinds[kind] for kind in ("clear", "copy", "drain", "move")}
        yield self.gauges("operations_running", "Operations that this coordinator runs.", ["kind"], running)
        yield self.counters("operations_ended", "Operations that ended.", ["kind", "state"], table.ended_counts)
        yield self.counters(
            "http_requests", "HTTP requests, by path and status.", ["path", "code"], self._http_requests
        )


class TenantMetrics(Scraped):
    """The metrics of all `sources`, with a label for each tenant that has a name."""

    def __init__(self, sources: Callable[[], Iterable[MetricSource]]) -> None:
        self._sources = sources
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> list[Metric]:
        """The current values, each metric name once."""
        families: dict[str, Metric] = {}
        for tenant, collect in self._sources():
            own = {TENANT_LABEL: tenant} if tenant else {}
            for family in collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [sample._replace(labels={**sample.labels, **own}) for sample in family.samples]
        return list(families.values())
