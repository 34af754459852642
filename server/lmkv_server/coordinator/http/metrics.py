"""`/metrics`: what the coordinator knows and has done, in Prometheus's text. `docs/http.md` lists the names.

Most of it is read from the core when somebody scrapes, so that it costs nothing between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.tiers import tier_name
from lmkv_server.coordinator.core.latency_histogram import BOUNDS_SECONDS
from lmkv_server.coordinator.services.services import Services

PREFIX = "lmkv_coordinator_"


class Metrics(Collector):
    """The coordinator's metrics, in a registry of their own: two coordinators in one process do not mix."""

    def __init__(self, services: Services, own: Sequence[Collector] = ()) -> None:
        self._services = services
        self._http_requests: Counter[tuple[str, str]] = Counter()
        self.registry = CollectorRegistry()
        """What `/metrics` shows, and OTLP exports."""
        self.registry.register(self)
        for collector in own:
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def count_http(self, path: str, code: int) -> None:
        """Counts a request by the path's pattern and the answer's status."""
        self._http_requests[path, str(code)] += 1

    def routes(self) -> list[Route]:
        """`/metrics`."""

        async def serve(_: Request) -> Response:
            return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        return [Route("/metrics", serve)]

    def describe(self) -> list[Metric]:
        """Nothing, so that the registry does not collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it as it is now."""
        return chain(self._fleet(), self._chunks(), self._work(), self._http())

    def _fleet(self) -> Iterator[Metric]:
        core = self._services.core
        synced = sum(instance.synced for instance in core.instances)
        instances = _gauge("instances", "Registered instances, by whether their opening snapshot is in.", "synced")
        instances.add_metric(["true"], synced)
        instances.add_metric(["false"], len(core.instances) - synced)
        yield instances
        partial = _gauge("layout_partial", "1 while the layout map is being rebuilt: more may be held than is said.")
        partial.add_metric([], core.is_partial(time.monotonic()))
        yield partial
        pins = Counter(pin.position.instance_id for pin in self._services.pins.in_force())
        family = _gauge("pins", "Pins in force.", "instance_id")
        for instance in core.instances:
            family.add_metric([instance.said.instance_id], pins[instance.said.instance_id])
        yield family

    def _chunks(self) -> Iterator[Metric]:
        labels = ("instance_id", "tier")
        chunks = _gauge("chunks", "Chunks that the layout map knows an instance to hold.", *labels)
        capacity = _gauge("tier_capacity_bytes", "Bytes that a tier may hold, as its node last said.", *labels)
        used = _gauge("tier_used_bytes", "Bytes that chunks and grants take in a tier, as its node last said.", *labels)
        for instance in self._services.core.instances:
            instance_id = instance.said.instance_id
            held: Counter[int] = Counter()
            for (tier, _), count in self._services.core.layout.chunk_counts(instance_id).items():
                held[tier] += count
            for usage in instance.tiers:
                held.setdefault(usage.tier, 0)
                capacity.add_metric([instance_id, tier_name(usage.tier)], usage.capacity_bytes)
                used.add_metric([instance_id, tier_name(usage.tier)], usage.used_bytes)
            for tier, count in held.items():
                chunks.add_metric([instance_id, tier_name(tier)], count)
        known = _gauge("layout_keys", "Different chunk keys in the layout map.")
        known.add_metric([], len(self._services.core.layout))
        return iter((chunks, capacity, used, known))

    def _work(self) -> Iterator[Metric]:
        lookups = self._services.cache.lookups
        counts = lookups.at_most()
        seconds = HistogramMetricFamily(f"{PREFIX}lookup_seconds", "Time that answered lookups took in the handler.")
        bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
        seconds.add_metric([], list(zip(bounds, counts, strict=True)), lookups.seconds)
        yield seconds
        yield _counter("lookup_hits", "Lookups that found at least one holder.", lookups.hits)
        yield _counter("reports", "Reports of nodes that were applied.", self._services.registry.report_count)
        watchers = _gauge("watchers", "Watches that are open.")
        watchers.add_metric([], self._services.watch.watcher_count)
        yield watchers
        running = _gauge("operations_running", "Operations that this coordinator sees through.", "kind")
        kinds = Counter(operation.kind for operation in self._services.operations_core.driven())
        for kind in ("clear", "copy", "move"):
            running.add_metric([kind], kinds[kind])
        yield running
        ended = CounterMetricFamily(f"{PREFIX}operations_ended", "Operations that ended.", labels=["kind", "state"])
        for place, count in self._services.operations_core.ended_counts.items():
            ended.add_metric(place, count)
        yield ended

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(f"{PREFIX}http_requests", "Requests over HTTP.", labels=["path", "code"])
        for place, count in self._http_requests.items():
            requests.add_metric(place, count)
        yield requests


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, labels=labels)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)
