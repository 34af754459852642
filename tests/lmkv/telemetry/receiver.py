"""A real OTLP receiver: a gRPC server in the test's process that keeps what processes export to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, TypeVar

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

T = TypeVar("T")

WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A span, as it arrived."""

    service: str
    instance_id: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    failed: bool


class Receiver:
    """What has arrived so far. Its server's threads add to it."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Received] = []
        self._metrics: dict[tuple[str, str, str], Any] = {}
        self._news = Condition()

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which a process exports here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }

    @property
    def spans(self) -> list[Received]:
        """All spans, in the order of their arrival."""
        with self._news:
            return list(self._spans)

    def span(self, service: str, name: str, **fields: str) -> Received:

        def find() -> Received | None:
            wanted = {"service": service, "name": name} | fields
            found = [span for span in self._spans if all(getattr(span, key) == value for key, value in wanted.items())]
            assert len(found) <= 1, f"{name} of {service} came more than once"
            return found[0] if found else None

        return self._wait(find, f"no span {name} of {service} with {fields}")

    def metric(
        self, service: str, name: str, instance_id: str = "", enough: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """The latest state of a metric, of any instance unless one is named; waits until there is enough of it."""

        def find() -> Any:
            for (said_by, instance, known), metric in self._metrics.items():
                if (said_by, known) == (service, name) and instance_id in ("", instance) and enough(metric):
                    return metric
            return None

        return self._wait(find, f"no metric {name} of {service}")

    def metric_names(self, service: str) -> set[str]:
        """The metrics that have come from a service."""
        with self._news:
            return {name for said_by, _, name in self._metrics if said_by == service}

    def take_spans(self, request: trace_pb.ExportTraceServiceRequest) -> None:
        """Spans have come."""
        with self._news:
            for resource in request.resource_spans:
                who = attributes_of(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [received(who, span) for span in scope.spans]
            self._news.notify_all()

    def take_metrics(self, request: metrics_pb.ExportMetricsServiceRequest) -> None:
        """Metrics have come."""
        with self._news:
            for resource in request.resource_metrics:
                attributes = attributes_of(resource.resource.attributes)
                who = (attributes["service.name"], attributes.get("service.instance.id", ""))
                for scope in resource.scope_metrics:
                    self._metrics.update({(*who, metric.name): metric for metric in scope.metrics})
            self._news.notify_all()

    def _wait(self, find: Callable[[], T | None], complaint: str) -> T:
        deadline = time.monotonic() + WAIT_SECONDS
        with self._news:
            while (found := find()) is None:
                left = deadline - time.monotonic()
                assert left > 0, f"{complaint}; there are {[(span.service, span.name) for span in self._spans]}"
                self._news.wait(left)
        return found


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> trace_pb.ExportTraceServiceResponse:  # noqa: N802
        self._receiver.take_spans(request)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> metrics_pb.ExportMetricsServiceResponse:  # noqa: N802
        self._receiver.take_metrics(request)
        return metrics_pb.ExportMetricsServiceResponse()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(receiver), server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(receiver), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def received(who: Mapping[str, Any], span: SpanProto) -> Received:
    """A span of the process that `who` describes."""
    return Received(
        service=who["service.name"],
        instance_id=who.get("service.instance.id", ""),
        name=span.name,
        kind=SpanProto.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=attributes_of(span.attributes),
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes as Python has them; lists as tuples."""
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(value_of(one) for one in value.array_value.values)
    return getattr(value, kind)
