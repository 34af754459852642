"""Traces, metrics and logs of all processes (docs/reference/telemetry.md).

The standard `OTEL_*` variables configure the export. Without them this package neither imports OpenTelemetry nor starts
a thread, and a span costs a fraction of a microsecond. Imports `lmkv.safe_text`. Start with `spans`.
"""

from lmkv.telemetry.logs import bound, set_up_logging
from lmkv.telemetry.setup import export_metrics, trace_engine, trace_process
from lmkv.telemetry.spans import NO_SPAN, Span, SpanKind, begin, call, follow, record, serve, serve_http, tracing

__all__ = [
    "NO_SPAN",
    "Span",
    "SpanKind",
    "begin",
    "bound",
    "call",
    "export_metrics",
    "follow",
    "record",
    "serve",
    "serve_http",
    "set_up_logging",
    "trace_engine",
    "trace_process",
    "tracing",
]
