"""Spans recorded by OpenTelemetry's SDK. Imported only if spans are recorded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, Self

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

import lmkv
from lmkv.telemetry.spans import TRACEPARENT, Span, SpanKind, Value, prefixed

CLOSE_SECONDS = 0.2
"""Time that an aborted export has to end."""
_SPAN_KINDS = {kind: trace.SpanKind[kind.value] for kind in SpanKind}


class RecordedSpan(Span):
    """A span that OpenTelemetry records."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: Token[otel_context.Context] | None = None

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TRACEPARENT, self.traceparent),)

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(prefixed(attributes))

    def fail(self, reason: str, message: str = "") -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(trace.StatusCode.ERROR, message or reason)

    def set_rpc_status(self, code: str) -> None:
        self._span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            self.fail(code)

    def set_http_status(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self.fail(str(status))

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()

    def __enter__(self) -> Self:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        if self._token is not None:
            otel_context.detach(self._token)
            self._token = None
        if kind is not None and not self._failed():
            self.fail(getattr(error, "reason", kind.__name__), str(error))
        self.end()

    def _failed(self) -> bool:
        status = getattr(self._span, "status", None)
        return status is not None and status.status_code is trace.StatusCode.ERROR


class OtelTracer:
    """Creates spans with an OpenTelemetry tracer."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @classmethod
    def of_global_provider(cls) -> Self:
        """Uses the global tracer provider, which may be set later: until then nothing is recorded."""
        return cls(trace.get_tracer("lmkv", lmkv.__version__))

    def begin(
        self, name: str, kind: SpanKind, parent: str | None, attributes: Mapping[str, Value], seconds: float = 0.0
    ) -> Span:
        start_time = time.time_ns() - round(seconds * 1e9) if seconds else None
        context = None if parent is None else context_of(parent)
        span = self._tracer.start_span(
            name, context=context, kind=_SPAN_KINDS[kind], attributes=attributes, start_time=start_time
        )
        return RecordedSpan(span)

    def current_ids(self) -> tuple[str, str] | None:
        context = trace.get_current_span().get_span_context()
        return (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else None


class Provider:
    """A tracer provider of lmkv's own, which exports in batches from a bounded queue, in a thread."""

    def __init__(self, service_name: str, instance_id: str) -> None:
        self._exporter = span_exporter()
        self._provider = TracerProvider(resource=resource(service_name, instance_id), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = OtelTracer(self._provider.get_tracer("lmkv", lmkv.__version__))

    def close(self, timeout_seconds: float) -> None:
        """Exports the remaining spans, for at most `timeout_seconds`."""
        closing = threading.Thread(target=self._provider.shutdown, name="lmkv-last-spans", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            self._exporter.shutdown()
            closing.join(CLOSE_SECONDS)


def context_of(traceparent: str) -> otel_context.Context:
    """The context of a `traceparent`; an empty one if it is invalid."""
    parts = traceparent.split("-")
    try:
        _, trace_id, span_id, flags = parts[:4]
        parent = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16) & 1)
        )
    except ValueError:
        return otel_context.Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), otel_context.Context())


def has_named_provider() -> bool:
    """Whether the process has set a tracer provider that names its service. vLLM's does if it is configured."""
    provider = trace.get_tracer_provider()
    return isinstance(provider, TracerProvider) and not _is_unknown(provider.resource.attributes)


def resource(service_name: str, instance_id: str) -> Resource:
    """The exported resource: these names, unless the `OTEL_*` variables set others."""
    configured = Resource.create().attributes
    names: dict[str, Any] = {"service.version": lmkv.__version__}
    if _is_unknown(configured):
        names["service.name"] = service_name
    if instance_id and "service.instance.id=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        names["service.instance.id"] = instance_id
    return Resource.create(names)


def _is_unknown(attributes: Mapping[str, Any]) -> bool:
    """Whether the service has the name that the SDK gives to those without one."""
    return str(attributes.get("service.name", "unknown_service")).startswith("unknown_service")


def span_exporter() -> SpanExporter:
    """The exporter that the `OTEL_*` variables configure."""
    if otlp_protocol("TRACES") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(insecure=insecure("TRACES"))


def otlp_protocol(signal: str) -> str:
    """The OTLP protocol of a signal; `grpc` by default."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", general)


def insecure(signal: str) -> bool | None:
    """Whether to export without TLS: unless the endpoint is https, as in vLLM. None: the variables decide."""
    if any(os.environ.get(f"OTEL_EXPORTER_OTLP_{part}INSECURE") for part in ("", f"{signal}_")):
        return None
    general = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return not os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", general).startswith("https:")
