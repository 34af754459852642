"""The metrics of all tenants in one, for OTLP: it is the process's operator who has them sent, and sees them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LABEL = "tenant"

Source = tuple[str, Callable[[], Iterable[Metric]]]
"""A tenant by its name, and what collects its metrics."""


class TenantMetrics(Collector):
    """What `sources` collect, with a label for each tenant that has a name."""

    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources
        self.registry = CollectorRegistry()
        """This, and nothing else."""
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing, so that the registry does not collect to find out."""
        return []

    def collect(self) -> list[Metric]:
        """All of it as it is now, each name once."""
        families: dict[str, Metric] = {}
        for tenant, collect in self._sources():
            own = {LABEL: tenant} if tenant else {}
            for family in collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [sample._replace(labels={**sample.labels, **own}) for sample in family.samples]
        return list(families.values())
