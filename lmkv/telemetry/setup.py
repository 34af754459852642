"""Whether and where this process exports, as the standard `OTEL_*` variables say. Called once, where it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from lmkv.telemetry import spans

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from lmkv.telemetry.otel import Provider

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""Most time that a process which ends gives its last spans, and its last metrics, to leave."""


def wanted(signal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `traces` or `metrics` are to be exported: an endpoint is prefixed, and nothing switches it off."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp") != "otlp":
        return False
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name) for name in names)


@contextmanager
def trace_process(service_name: str, instance_id: str) -> Iterator[None]:
    """Records the spans of a process of lmkv's own, if that is wanted; in the end waits `FLUSH_SECONDS` for the last.

    Both names are for those that `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` do not say.
    """
    provider = _own_provider(service_name, instance_id) if wanted("traces") else None
    if provider is None:
        yield
        return
    spans.use(provider.tracer)
    try:
        yield
    finally:
        spans.use(None)
        provider.close(FLUSH_SECONDS)


def trace_engine(instance_id: str, *, engine_traces: bool) -> None:
    """Records the connector's spans, for the rest of the process: with those of the engine, if it traces itself.

    Otherwise on its own, if the variables say so. Nothing needs closing: no engine waits for a span when it ends.
    """
    if spans.tracing() or not (engine_traces or wanted("traces")):
        return
    try:
        from lmkv.telemetry import otel
    except ImportError as error:
        _explain(error)
        return
    if engine_traces or otel.has_tracer_provider():
        spans.use(otel.OtelTracer.of_global_provider())
    elif provider := _own_provider("lmkv-connector", instance_id):
        spans.use(provider.tracer)


def export_metrics(
    registry: CollectorRegistry, service_name: str, instance_id: str
) -> AbstractAsyncContextManager[object]:
    """While entered, sends what the registry collects, if that is wanted, at `OTEL_METRIC_EXPORT_INTERVAL`.

    It is collected on the event loop, and sent by a thread; the last of it when this is left.
    """
    if not wanted("metrics"):
        return nullcontext()
    try:
        from lmkv.telemetry.otlp_metrics import MetricsExport

        return MetricsExport(registry, service_name, instance_id, FLUSH_SECONDS)
    except ImportError as error:
        _explain(error)
        return nullcontext()


def _own_provider(service_name: str, instance_id: str) -> Provider | None:
    try:
        from lmkv.telemetry.otel import Provider

        return Provider(service_name, instance_id)
    except ImportError as error:
        _explain(error)
        return None


def _explain(error: ImportError) -> None:
    logger.warning("OTEL_* variables name an endpoint, but nothing is exported: install lmkv[telemetry] (%s)", error)
