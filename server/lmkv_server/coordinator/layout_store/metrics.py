"""Whether the layout map is shared, and what that does, as a collector of Prometheus's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv_server.coordinator.layout_store.shared_map import SharedMap

PREFIX = "lmkv_coordinator_layout_map_"


class SharedMapMetrics(Collector):
    """Of one coordinator that has a `layout_map_url`."""

    def __init__(self, shared: SharedMap) -> None:
        self._shared = shared

    def describe(self) -> list[Metric]:
        """Nothing, so that the registry does not collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it as it is now."""
        is_shared = GaugeMetricFamily(f"{PREFIX}shared", "1 while the layout map is shared with other coordinators.")
        is_shared.add_metric([], bool(self._shared.map_id))
        yield is_shared
        counts = self._shared.counts
        for name, documentation, value in (
            ("published_reports", "Reports that were published to other coordinators.", counts.published),
            ("followed_reports", "Reports that other coordinators published and that were applied.", counts.followed),
            ("loads", "Instances whose chunks were loaded whole.", counts.loads),
            ("losses", "Times that the layout map ceased to be shared.", counts.losses),
        ):
            yield CounterMetricFamily(PREFIX + name, documentation, value=value)
