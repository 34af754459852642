"""Prometheus collector for a shared layout map."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv_server.coordinator.layout_store.shared_map import SharedMap

PREFIX = "lmkv_coordinator_layout_map_"


class SharedMapMetrics(Collector):
    """Metrics of a coordinator that has a `layout_map_url`."""

    def __init__(self, shared: SharedMap) -> None:
        self._shared = shared

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        is_shared = GaugeMetricFamily(f"{PREFIX}shared", "1 while the layout map is shared with other coordinators.")
        is_shared.add_metric([], bool(self._shared.map_id))
        yield is_shared
        stats = self._shared.stats()
        for name, documentation, value in (
            ("published_reports", "Reports published to other coordinators.", stats.published_count),
            ("followed_reports", "Reports of other coordinators that were applied.", stats.followed_count),
            ("loads", "Instances whose chunks were loaded from the shared map.", stats.load_count),
            ("losses", "Times that the connection to the shared map was lost.", stats.loss_count),
        ):
            yield CounterMetricFamily(PREFIX + name, documentation, value=value)
