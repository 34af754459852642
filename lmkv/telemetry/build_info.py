"""The metric `lmkv_build_info` of every server: which version of lmkv runs."""

from __future__ import annotations

import platform

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from lmkv import __version__

METRIC_NAME = "lmkv_build_info"


class BuildInfo:
    """Prometheus collector of the versions of lmkv and Python, as labels of a sample that is always 1."""

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering does not collect."""
        return []

    def collect(self) -> list[Metric]:
        """One gauge with one sample."""
        family = GaugeMetricFamily(
            METRIC_NAME, "Always 1; its labels are the versions of the process.", labels=["version", "python_version"]
        )
        family.add_metric([__version__, platform.python_version()], 1)
        return [family]
