"""A request's trace continues through the proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmkv.telemetry import spans
from lmkv.telemetry.otel import OtelTracer
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS, PLAIN, completion
from tests.server.proxy.scripted_engine import ScriptedEngine

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def recorded() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.set_tracer(OtelTracer(provider.get_tracer("test")))
    yield exporter
    spans.set_tracer(None)


async def test_engines_continue_the_proxys_span(
    recorded: InMemorySpanExporter, front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    await front.ask(COMPLETIONS, completion(PLAIN), traceparent=TRACEPARENT)
    await until(lambda: bool(recorded.get_finished_spans()))
    (span,) = recorded.get_finished_spans()
    assert span.name == f"POST {COMPLETIONS}"
    assert span.parent is not None
    assert span.context is not None
    assert format(span.parent.span_id, "016x") == "00f067aa0ba902b7"
    for engine in (prefiller, decoder):
        ((_, _, headers),) = engine.asked
        assert headers["traceparent"] == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
