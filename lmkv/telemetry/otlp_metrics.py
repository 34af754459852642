"""Exports the metrics of a Prometheus registry by OTLP.

Names are those of Prometheus, except for metrics of the semantic conventions; values are cumulative from the start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

import lmkv
from lmkv.telemetry.otel import insecure, otlp_protocol, resource

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL_MS = 60_000.0
CUMULATIVE = AggregationTemporality.CUMULATIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """Name and labels of a metric in OpenTelemetry's semantic conventions."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


CONVENTIONS = {
    "rpc_server_call_duration_seconds": Convention(
        name="rpc.server.call.duration",
        labels={
            "rpc_system_name": "rpc.system.name",
            "rpc_method": "rpc.method",
            "rpc_response_status_code": "rpc.response.status_code",
        },
    ),
    "process_cpu_seconds": Convention(name="process.cpu.time"),
    "process_resident_memory_bytes": Convention(name="process.memory.usage"),
    "process_virtual_memory_bytes": Convention(name="process.memory.virtual"),
    "process_open_fds": Convention(name="process.unix.file_descriptor.count"),
}
"""Conventions by the name of the Prometheus metric."""
UNITS = {"_seconds": "s", "_bytes": "By"}


class MetricsExport:
    """Exports a registry's metrics at an interval, and once more on exit. Collects on the event loop that enters it.

    A thread sends the data; while it has not finished, the next export is skipped. Only the exit waits for it, for at
    most `flush_seconds`.
    """

    def __init__(self, registry: CollectorRegistry, service_name: str, instance_id: str, flush_seconds: float) -> None:
        self._registry = registry
        self._resource = resource(service_name, instance_id)
        self._exporter = metric_exporter()
        self._interval_seconds = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_MS)) / 1e3
        self._flush_seconds = flush_seconds
        self._start_ns = time.time_ns()
        self._sent = asyncio.Event()
        self._sent.set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="lmkv-metrics-export")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Exports a last time and stops, within `flush_seconds`. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        with suppress(TimeoutError):
            async with asyncio.timeout(self._flush_seconds):
                await self._sent.wait()
                self._send()
                await self._sent.wait()
        self._exporter.shutdown()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._sent.is_set():
                self._send()

    def _send(self) -> None:
        try:
            data = to_otlp(self._registry.collect(), self._resource, self._start_ns, time.time_ns())
        except Exception:  # an error in one collector must not end the export
            logger.exception("metrics cannot be collected")
            return
        self._sent.clear()
        loop = asyncio.get_running_loop()

        def export() -> None:
            try:
                self._exporter.export(data)
            except Exception:
                logger.exception("metrics cannot be exported")
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._sent.set)

        threading.Thread(target=export, name="lmkv-metrics-export", daemon=True).start()


def to_otlp(families: Iterable[Family], source: Resource, start_ns: int, now_ns: int) -> MetricsData:
    """Converts metric families to OTLP. Types that OTLP does not have are omitted."""
    metrics = []
    for family in families:
        points = _DataPoints(CONVENTIONS.get(family.name), start_ns, now_ns)
        match family.type:
            case "counter":
                data: Any = Sum(points.numbers(family.samples, "_total"), CUMULATIVE, is_monotonic=True)
            case "gauge":
                data = Gauge(points.numbers(family.samples, ""))
            case "histogram":
                data = Histogram(points.histograms(family.samples), CUMULATIVE)
            case _:
                continue
        unit = next((unit for suffix, unit in UNITS.items() if family.name.endswith(suffix)), "1")
        name = points.convention.name if points.convention else family.name
        metrics.append(Metric(name, family.documentation, unit, data))
    scope = ScopeMetrics(InstrumentationScope("lmkv", lmkv.__version__), metrics, "")
    return MetricsData([ResourceMetrics(source, [scope], "")])


class _DataPoints:
    """Data points of one family."""

    def __init__(self, convention: Convention | None, start_ns: int, now_ns: int) -> None:
        self.convention = convention
        self._labels = convention.labels if convention else {}
        self._times: dict[str, Any] = {"start_time_unix_nano": start_ns, "time_unix_nano": now_ns}

    def numbers(self, samples: Iterable[Sample], suffix: str) -> list[NumberDataPoint]:
        """One data point per sample with the suffix; others, such as `_created`, are not values."""
        wanted = (sample for sample in samples if suffix == "" or sample.name.endswith(suffix))
        return [NumberDataPoint(self._attributes(one.labels), **self._times, value=float(one.value)) for one in wanted]

    def histograms(self, samples: Iterable[Sample]) -> list[HistogramDataPoint]:
        """One histogram per set of labels. Prometheus buckets are cumulative, those of OTLP are not."""
        by_labels: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", "")
            group = by_labels.setdefault(tuple(labels.items()), {"bounds": [], "counts": [], "sum": 0.0})
            if sample.name.endswith("_bucket"):
                group["bounds"].append(float(bound))
                group["counts"].append(int(sample.value))
            elif sample.name.endswith("_sum"):
                group["sum"] = sample.value
        return [self._histogram(dict(labels), group) for labels, group in by_labels.items()]

    def _histogram(self, labels: dict[str, str], group: dict[str, Any]) -> HistogramDataPoint:
        at_most = group["counts"]
        return HistogramDataPoint(
            self._attributes(labels),
            **self._times,
            count=at_most[-1],
            sum=group["sum"],
            bucket_counts=[count - before for before, count in zip([0, *at_most], at_most, strict=False)],
            explicit_bounds=group["bounds"][:-1],  # the last bound is infinite
            min=None,  # type: ignore[arg-type]  # unknown; the encoder omits it
            max=None,  # type: ignore[arg-type]
        )

    def _attributes(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {self._labels.get(name, name): value for name, value in labels.items()}


def metric_exporter() -> MetricExporter:
    """An exporter that the variables set up."""
    if otlp_protocol("METRICS") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as OverHttp

        return OverHttp()
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(insecure=insecure("METRICS"))
