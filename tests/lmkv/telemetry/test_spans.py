"""Spans: parents, attributes and errors at a receiver; almost no cost without tracing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

from lmkv import rpc, telemetry
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import BadChunkKey, Unreachable
from lmkv.rpc.messages import by_keys
from lmkv.telemetry import NO_SPAN, SpanKind, spans
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv_server.coordinator.coordinator import Coordinator
from tests.lmkv.telemetry.receiver import Receiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
SERVICE = "test"


def test_without_a_tracer_every_span_is_the_same_one() -> None:
    with telemetry.begin("a", size=1) as span:
        span.set(more="x")
        span.fail("reason")
        assert span is NO_SPAN
        assert telemetry.follow("b", TRACEPARENT) is NO_SPAN
        assert telemetry.call("s/m", "host:1") is NO_SPAN
        assert telemetry.serve("s/m", [("traceparent", TRACEPARENT)]) is NO_SPAN
    assert (span.traceparent, span.metadata, spans.current_ids()) == ("", (), None)


def test_without_variables_nothing_of_opentelemetry_is_imported_and_no_thread_is_started() -> None:
    program = (
        "import json, sys, threading\n"
        "from lmkv import telemetry\n"
        "import lmkv.rpc.endpoints, lmkv_server.node.node, lmkv_server.coordinator.coordinator\n"
        "telemetry.trace_engine('i', engine_traces=False)\n"
        "with telemetry.trace_process('s', 'i'), telemetry.begin('a'):\n"
        "    print(json.dumps([[name for name in sys.modules if 'opentelemetry' in name], threading.active_count()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [[], 1]


def test_what_is_inside_a_span_is_its_child_and_what_follows_a_traceparent_is_that_ones(exporting: Receiver) -> None:
    with telemetry.trace_process(SERVICE, "i-1"):
        with telemetry.follow("outer", TRACEPARENT, size_bytes=7, names=("a", "b")) as outer:
            assert spans.current_ids() == (TRACE_ID, outer.traceparent.split("-")[2])
            telemetry.begin("inner", kind=SpanKind.CLIENT).end()
            telemetry.begin("stranger", parent="").end()
        assert spans.current_ids() is None
        telemetry.record("noted", 0.5, parent=TRACEPARENT)
        assert telemetry.follow("nothing", "") is NO_SPAN
        telemetry.record("nothing", 0.5, parent="")
    outer_span = exporting.span(SERVICE, "outer")
    assert (outer_span.trace_id, outer_span.parent_id, outer_span.kind) == (TRACE_ID, SPAN_ID, "SERVER")
    assert outer_span.attributes == {"lmkv.size_bytes": 7, "lmkv.names": ("a", "b")}
    assert outer_span.instance_id == "i-1"
    inner, stranger = exporting.span(SERVICE, "inner"), exporting.span(SERVICE, "stranger")
    assert (inner.trace_id, inner.parent_id, inner.kind) == (TRACE_ID, outer_span.span_id, "CLIENT")
    assert stranger.trace_id != TRACE_ID
    assert stranger.parent_id == ""
    assert exporting.span(SERVICE, "noted").parent_id == SPAN_ID
    assert {span.name for span in exporting.spans} == {"outer", "inner", "stranger", "noted"}


def test_an_exception_that_leaves_a_span_is_its_error(exporting: Receiver) -> None:
    with telemetry.trace_process(SERVICE, ""):
        with pytest.raises(Unreachable), telemetry.begin("a", parent=""):
            raise Unreachable("gone")
        with telemetry.begin("b", parent="") as span:
            span.fail("timeout", "too late")
        with pytest.raises(ZeroDivisionError), telemetry.begin("c", parent=""):
            raise ZeroDivisionError
    assert exporting.span(SERVICE, "a").attributes["error.type"] == "UNREACHABLE"
    assert exporting.span(SERVICE, "c").attributes["error.type"] == "ZeroDivisionError"
    assert exporting.span(SERVICE, "b").attributes["error.type"] == "timeout"
    assert all(span.failed for span in exporting.spans)


def test_a_trace_that_is_not_sampled_stays_so(exporting: Receiver) -> None:
    with telemetry.trace_process(SERVICE, ""):
        with telemetry.follow("a", UNSAMPLED) as span:
            assert span.traceparent.endswith("-00")
        telemetry.follow("b", TRACEPARENT).end()
    exporting.span(SERVICE, "b")
    assert len(exporting.spans) == 1


@pytest.mark.parametrize("nonsense", ["x", "00-12", "00-zz-yy-01", f"00-{'0' * 32}-{'0' * 16}-01", "00-1-2-zz", "----"])
def test_a_traceparent_that_is_none_begins_a_trace(exporting: Receiver, nonsense: str) -> None:
    with telemetry.trace_process(SERVICE, ""):
        telemetry.follow("a", nonsense).end()
    assert exporting.span(SERVICE, "a").parent_id == ""


async def test_a_call_is_a_span_on_both_sides_with_its_code(exporting: Receiver) -> None:
    with telemetry.trace_process(SERVICE, ""):
        async with (
            Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
            rpc.open_channel(coordinator.address) as channel,
        ):
            stub = cache_service_pb2_grpc.CacheServiceStub(channel)

            async def look_up(request: cache_service_pb2.LookupRequest) -> None:
                name = "lmkv.v1.CacheService/Lookup"
                await rpc.call(stub.Lookup, name, coordinator.address, request, 5.0)

            with telemetry.follow("right", TRACEPARENT):
                await look_up(cache_service_pb2.LookupRequest(prompt=by_keys([b"k" * 16])))
            with telemetry.begin("wrong", parent=""), pytest.raises(BadChunkKey):
                await look_up(cache_service_pb2.LookupRequest(prompt=by_keys([b"k"])))
            await look_up(cache_service_pb2.LookupRequest(prompt=by_keys([b"k" * 16])))  # outside of any trace
            port = coordinator.port
    right = exporting.span(SERVICE, "right")
    by_parent = {span.parent_id: span for span in exporting.spans if span.name == "lmkv.v1.CacheService/Lookup"}
    client = by_parent[right.span_id]
    server = by_parent[client.span_id]
    assert (client.kind, server.kind) == ("CLIENT", "SERVER")
    rpc_attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": "lmkv.v1.CacheService/Lookup",
        "rpc.response.status_code": "OK",
    }
    assert server.attributes == rpc_attributes
    assert client.attributes == rpc_attributes | {"server.address": "127.0.0.1", "server.port": port}
    refused = by_parent[exporting.span(SERVICE, "wrong").span_id]
    for span in (refused, by_parent[refused.span_id]):
        assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert span.failed
    assert by_parent[""].kind == "SERVER"


async def test_tasks_that_run_beside_each_other_keep_their_spans_apart(exporting: Receiver) -> None:
    async def work(number: int, go: asyncio.Event) -> None:
        with telemetry.begin(f"outer-{number}", parent=""):
            await go.wait()
            telemetry.begin(f"inner-{number}").end()

    with telemetry.trace_process(SERVICE, ""):
        go = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(work(number, go))
            await asyncio.sleep(0)
            go.set()
    for number in range(3):
        outer, inner = exporting.span(SERVICE, f"outer-{number}"), exporting.span(SERVICE, f"inner-{number}")
        assert inner.parent_id == outer.span_id


async def test_a_request_over_http_continues_its_headers_trace(exporting: Receiver) -> None:
    with telemetry.trace_process(SERVICE, ""):
        async with (
            Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator,
            httpx.AsyncClient(base_url=f"http://{coordinator.http_address}", trust_env=False, timeout=60) as client,
        ):
            await client.post("/lookup", json={"tokens": [1]}, headers={"traceparent": TRACEPARENT})
            await client.post("/made/up", json={}, headers={"traceparent": TRACEPARENT})
            await client.post("/health", json={"instance_id": "unknown"})
            await client.get("/healthz")
    lookup = exporting.span(SERVICE, "POST /lookup")
    assert (lookup.trace_id, lookup.parent_id, lookup.kind) == (TRACE_ID, SPAN_ID, "SERVER")
    status = lookup.attributes["http.response.status_code"]
    assert lookup.attributes == {
        "http.request.method": "POST",
        "http.route": "/lookup",
        "http.response.status_code": status,
    }
    assert exporting.span(SERVICE, "POST other").attributes["http.response.status_code"] == 404
    assert exporting.span(SERVICE, "POST /health").parent_id == ""
    assert len(exporting.spans) == 3, "probes and scrapes begin no trace"
