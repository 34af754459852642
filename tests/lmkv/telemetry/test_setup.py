"""Exporters: enabled by environment variables, and harmless if no receiver answers."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from lmkv import telemetry
from lmkv.telemetry import otel, setup, spans
from tests.lmkv.telemetry.receiver import Receiver
from tests.waiting import WAIT_SECONDS, wait_until

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}
PATIENCE_SECONDS = "600"
"""An exporter's own with an endpoint, and longer than a test may take."""


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, set()),
        (ENDPOINT, {"traces", "metrics"}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1"}, {"traces"}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h:1"}, {"metrics"}),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, {"metrics"}),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, {"traces"}),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, set()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, set()),
        ({"OTEL_SERVICE_NAME": "x"}, set()),
    ],
)
def test_an_endpoint_switches_it_on_and_others_switch_it_off(environ: dict[str, str], wanted: set[str]) -> None:
    assert {signal for signal in ("traces", "metrics") if setup.wanted(signal, environ)} == wanted


@pytest.mark.parametrize(
    ("variables", "service", "instance_id"),
    [
        ({}, "own", "i"),
        ({"OTEL_SERVICE_NAME": "theirs"}, "theirs", "i"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,service.instance.id=7"}, "theirs", "7"),
    ],
)
def test_names_are_those_of_the_variables_else_the_processs_own(
    exporting: Receiver, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], service: str, instance_id: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with telemetry.trace_process("own", "i"):
        telemetry.begin("a", parent="").end()
    assert exporting.span(service, "a").instance_id == instance_id


@pytest.mark.parametrize(
    ("variables", "insecure"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "h:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "grpc://h:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://h:1"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://h:1"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "h:1", "OTEL_EXPORTER_OTLP_INSECURE": "false"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "h:1", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "false"}, None),
    ],
)
def test_only_https_is_encrypted_unless_the_variables_say_so(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], insecure: bool | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel.insecure("TRACES") is insecure


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_an_endpoint_that_does_not_answer_delays_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if kind == "hangs":
            dead.listen(0)  # connects, and never says a word
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{dead.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", PATIENCE_SECONDS)
        with telemetry.trace_process("s", "i"):
            for number in range(5000):  # more than the queue takes
                telemetry.begin("a", parent="", number=number).end()
    wait_until(lambda: not any(thread.name == "lmkv-last-spans" for thread in threading.enumerate()))


async def test_an_endpoint_that_does_not_answer_delays_no_end_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{dead.getsockname()[1]}")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", PATIENCE_SECONDS)
        async with telemetry.export_metrics(CollectorRegistry(), "s", "i"):
            pass


def test_where_opentelemetry_is_missing_nothing_is_exported_and_one_line_says_why() -> None:
    program = (
        "import asyncio, logging, sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from lmkv import telemetry\n"
        "logging.basicConfig()\n"
        "with telemetry.trace_process('s', 'i'):\n"
        "    assert not telemetry.tracing()\n"
        "telemetry.trace_engine('i', engine_traces=False)\n"
        "async def main():\n"
        "    async with telemetry.export_metrics(None, 's', 'i'):\n"
        "        pass\n"
        "asyncio.run(main())\n"
        "assert not telemetry.tracing()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=ENDPOINT
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("pip install '.[telemetry]'" in line for line in lines)


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_an_engine_that_exports_by_itself_ends_as_it_would_without(kind: str) -> None:
    program = (
        "from lmkv import telemetry\n"
        "telemetry.trace_engine('i', engine_traces=False)\n"
        "for _ in range(2000):\n"
        "    telemetry.begin('a', parent='').end()\n"
        "print('ends')\n"
    )
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if kind == "hangs":
            dead.listen(0)
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{dead.getsockname()[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "1",
            "OTEL_EXPORTER_OTLP_TIMEOUT": PATIENCE_SECONDS,
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=True,
            env=environment,
        )
    assert done.stdout == "ends\n"


class TestEngine:
    """`trace_engine`: what is used inside of a process that may trace by itself."""

    @pytest.fixture(autouse=True)
    def made(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[otel.Provider]]:
        """lmkv's own providers. An engine ends them only with its process; here they would repeat exports to a receiver
        that is gone, and OpenTelemetry logs the same failure of later ones only once in 20 s."""
        made: list[otel.Provider] = []
        of_class = otel.Provider.__init__

        def remembered(self: otel.Provider, *names: str) -> None:
            of_class(self, *names)
            made.append(self)

        monkeypatch.setattr(otel.Provider, "__init__", remembered)
        yield made
        spans.set_tracer(None)
        for provider in made:
            provider.close(0.0)

    @pytest.fixture
    def of_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
        """The engine's own spans; it has set a provider for the whole process."""
        exporter = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource.create({"service.name": "engine"}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        return exporter

    def test_nothing_is_traced_unless_configured(self) -> None:
        telemetry.trace_engine("i", engine_traces=False)
        assert not telemetry.tracing()

    def test_an_engine_that_traces_gets_the_spans_with_its_own(self, of_the_engine: InMemorySpanExporter) -> None:
        telemetry.trace_engine("i", engine_traces=True)
        telemetry.begin("a", parent="").end()
        assert [span.name for span in of_the_engine.get_finished_spans()] == ["a"]

    def test_an_existing_provider_is_used_and_not_replaced(
        self, of_the_engine: InMemorySpanExporter, exporting: Receiver
    ) -> None:
        before = trace.get_tracer_provider()
        telemetry.trace_engine("i", engine_traces=False)
        telemetry.begin("a", parent="").end()
        assert [span.name for span in of_the_engine.get_finished_spans()] == ["a"]
        assert trace.get_tracer_provider() is before

    def test_spans_of_an_engine_without_a_name_are_of_a_service_that_has_one(
        self, of_the_engine: InMemorySpanExporter, exporting: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unnamed = TracerProvider(shutdown_on_exit=False)
        unnamed.add_span_processor(SimpleSpanProcessor(of_the_engine))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", unnamed)
        telemetry.trace_engine("i", engine_traces=True)
        telemetry.begin("a", parent="").end()
        assert exporting.span("lmkv-connector", "a").instance_id == "i"
        assert of_the_engine.get_finished_spans() == ()

    def test_where_the_engine_does_not_trace_the_variables_decide(
        self, exporting: Receiver, made: list[otel.Provider]
    ) -> None:
        telemetry.trace_engine("i", engine_traces=False)
        telemetry.trace_engine("i", engine_traces=False)  # a second engine in the process
        telemetry.begin("a", parent="").end()
        assert exporting.span("lmkv-connector", "a").instance_id == "i"
        assert len(made) == 1
        assert not isinstance(trace.get_tracer_provider(), TracerProvider)


def test_loggers_of_opentelemetry_say_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with caplog.at_level(logging.WARNING), telemetry.trace_process("s", "i"):
            telemetry.begin("a", parent="").end()
    assert "UNAVAILABLE" in caplog.text
