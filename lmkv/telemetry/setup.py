"""Sets up the export of traces and metrics by the standard `OTEL_*` variables. Called once per process."""

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
"""Maximum time for the last export of spans, and of metrics, when the process exits."""


def wanted(signal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `traces` or `metrics` are exported: an endpoint is set, and the export is not disabled."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp") != "otlp":
        return False
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name) for name in names)


@contextmanager
def trace_process(service_name: str, instance_id: str) -> Iterator[None]:
    """Records the spans of a process of lmkv, if configured; flushes them on exit, for at most `FLUSH_SECONDS`.

    `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override both names.
    """
    provider = _own_provider(service_name, instance_id) if wanted("traces") else None
    if provider is None:
        yield
        return
    spans.set_tracer(provider.tracer)
    try:
        yield
    finally:
        spans.set_tracer(None)
        provider.close(FLUSH_SECONDS)


def trace_engine(instance_id: str, *, engine_traces: bool) -> None:
    """Records the connector's spans until the process exits: with the engine's provider, if that names its service.

    Otherwise with a provider of its own, as the service `lmkv-connector`: vLLM sets the variable of the endpoint.
    There is nothing to close: the exit of an engine waits for no span.
    """
    if spans.tracing() or not (engine_traces or wanted("traces")):
        return
    try:
        from lmkv.telemetry import otel
    except ImportError as error:
        _warn_not_installed(error)
        return
    if otel.has_named_provider() or not wanted("traces"):
        spans.set_tracer(otel.OtelTracer.of_global_provider())
    elif provider := _own_provider("lmkv-connector", instance_id):
        spans.set_tracer(provider.tracer)


def export_metrics(
    registry: CollectorRegistry, service_name: str, instance_id: str
) -> AbstractAsyncContextManager[object]:
    """A context that exports the registry's metrics, if configured, every `OTEL_METRIC_EXPORT_INTERVAL` and on exit.

    Collects on the event loop, and sends in a thread.
    """
    if not wanted("metrics"):
        return nullcontext()
    try:
        from lmkv.telemetry.otlp_metrics import MetricsExport

        return MetricsExport(registry, service_name, instance_id, FLUSH_SECONDS)
    except ImportError as error:
        _warn_not_installed(error)
        return nullcontext()


def _own_provider(service_name: str, instance_id: str) -> Provider | None:
    try:
        from lmkv.telemetry.otel import Provider

        return Provider(service_name, instance_id)
    except ImportError as error:
        _warn_not_installed(error)
        return None


def _warn_not_installed(error: ImportError) -> None:
    logger.warning(
        "OTEL_* variables set an endpoint, but nothing is exported: pip install '.[telemetry]' in a clone of lmkv (%s)",
        error,
    )
