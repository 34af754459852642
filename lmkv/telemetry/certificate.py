"""Until when this process's certificate is valid, as a collector of Prometheus's. Used by every server."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv.auth.certificates import validity

NAME = "lmkv_certificate_end_timestamp_seconds"


class CertificateEnd(Collector):
    """Reads the file when somebody collects, for it may be replaced. Tells nothing where there is none.

    Nor where it cannot be read: that is the moment in which it is replaced, or told of by whoever needs it.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> list[Metric]:
        """Nothing, so that the registry does not collect to find out."""
        return []

    def collect(self) -> list[Metric]:
        """The end of the certificate that ends first."""
        family = GaugeMetricFamily(NAME, "When the certificate of tls_cert ends, since 1970.")
        if self._path:
            with suppress(OSError, ValueError):
                family.add_metric([], validity(self._path)[1])
        return [family]
