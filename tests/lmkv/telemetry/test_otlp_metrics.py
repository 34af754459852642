"""Metrics by OTLP: the numbers of a registry, as a receiver reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.registry import Collector

from lmkv import telemetry
from lmkv.telemetry.calls import ServerCalls
from lmkv.telemetry.otlp_metrics import to_otlp
from tests.lmkv.telemetry.receiver import Receiver, attributes_of

SERVICE = "test"


def points(metric: Any, kind: str) -> dict[tuple[str, ...], Any]:
    return {
        tuple(attributes_of(point.attributes).values()): point.as_double for point in getattr(metric, kind).data_points
    }


async def test_a_receiver_gets_what_prometheus_would(exporting: Receiver) -> None:
    registry = CollectorRegistry()
    used = Gauge("pool_used_bytes", "Bytes used.", ["tier"], registry=registry)
    lookups = Counter("lookups", "Lookups.", registry=registry)
    took = Histogram("took_seconds", "Time.", buckets=(0.1, 1.0), registry=registry)
    Info("build", "No number.", registry=registry)
    used.labels("host").set(7)
    lookups.inc(3)
    for seconds in (0.05, 0.5, 0.6, 5.0):
        took.observe(seconds)
    async with telemetry.export_metrics(registry, SERVICE, "i"):
        pass  # the last word is said even if the interval never ends
    gauge = exporting.metric(SERVICE, "pool_used_bytes")
    assert (gauge.unit, gauge.description, points(gauge, "gauge")) == ("By", "Bytes used.", {("host",): 7})
    counter = exporting.metric(SERVICE, "lookups")
    assert counter.sum.is_monotonic
    assert counter.sum.aggregation_temporality == counter.sum.aggregation_temporality.__class__(2)  # cumulative
    assert points(counter, "sum") == {(): 3}
    (histogram,) = exporting.metric(SERVICE, "took_seconds").histogram.data_points
    assert list(histogram.explicit_bounds) == [0.1, 1.0]
    assert list(histogram.bucket_counts) == [1, 2, 1]
    assert (histogram.count, histogram.sum) == (4, pytest.approx(6.15))
    assert not histogram.HasField("min")
    assert exporting.metric_names(SERVICE) == {"pool_used_bytes", "lookups", "took_seconds"}


async def test_they_come_again_and_again(exporting: Receiver) -> None:
    registry = CollectorRegistry()
    lookups = Counter("lookups", "Lookups.", registry=registry)
    async with telemetry.export_metrics(registry, SERVICE, "i"):
        await asyncio.to_thread(exporting.metric, SERVICE, "lookups")
        lookups.inc(5)
        await asyncio.to_thread(
            exporting.metric, SERVICE, "lookups", "", lambda metric: points(metric, "sum") == {(): 5}
        )


def test_what_the_conventions_name_goes_by_their_names() -> None:
    registry = CollectorRegistry()
    calls = ServerCalls()
    calls.record("s/m", "OK", 0.002)
    registry.register(calls)
    ProcessCollector(registry=registry)
    (resource,) = to_otlp(registry.collect(), Resource({}), 1, 2).resource_metrics
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert {
        "rpc.server.call.duration",
        "process.cpu.time",
        "process.memory.usage",
        "process.memory.virtual",
        "process.unix.file_descriptor.count",
    } <= found.keys()
    assert found["rpc.server.call.duration"].unit == found["process.cpu.time"].unit == "s"
    (point,) = found["rpc.server.call.duration"].data.data_points
    assert point.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "s/m",
        "rpc.response.status_code": "OK",
    }
    assert (point.start_time_unix_nano, point.time_unix_nano) == (1, 2)


class Broken(Collector):
    """Cannot be read."""

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Any:
        raise ZeroDivisionError


async def test_a_collector_that_fails_ends_nothing(exporting: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    registry.register(Broken())
    async with telemetry.export_metrics(registry, SERVICE, "i"):
        pass
    assert "metrics cannot be collected" in caplog.text
