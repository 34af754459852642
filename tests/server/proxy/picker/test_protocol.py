"""The endpoint picker protocol, phase by phase, as a gateway sees it that is made from the published protos."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lmkv.runtime.memory_budget import MAX_JSON_OBJECTS, MemoryBudget
from lmkv.runtime.turns import Turns
from lmkv_server.proxy.picker import service as picker_service
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import Front, MakePicker, host_port
from tests.server.proxy.picker.published import Gateway, HttpExchange, endpoint_of
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine
from tests.support.tokens import entry, write

BODY = json.dumps({"model": MODEL, "prompt": "once upon a time", "max_tokens": 3}).encode()
LARGE = json.dumps({"model": MODEL, "prompt": "x" * 150_000}).encode()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> ScriptedEngine:
    return await make_engine("i-0")


@pytest.fixture
async def front(engine: ScriptedEngine, make_picker: MakePicker) -> Front:
    return await make_picker([engine])


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", ""])
@pytest.mark.parametrize(("body", "parts"), [(BODY, 1), (BODY, 4), (LARGE, 1), (LARGE, 3)])
async def test_a_streamed_body_is_held_until_the_choice_and_returned_unchanged(
    front: Front, engine: ScriptedEngine, mode: str, body: bytes, parts: int
) -> None:
    async with front.gateway.exchange() as exchange:
        assert endpoint_of(await exchange.pick(body, parts, mode=mode)) == host_port(engine)
        assert await exchange.body() == body
    assert front.metric("lmkv_picker_requests_total", outcome="picked") == 1


async def test_the_parts_of_a_large_body_are_read_in_turn_with_those_of_others(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_of = list[str]()
    read = Turns.read

    async def counted(turns: Turns, caller: str) -> None:
        turns_of.append(caller)
        await read(turns, caller)

    monkeypatch.setattr(Turns, "read", counted)
    for body, large_parts in ((BODY, 0), (LARGE, 5)):
        turns_of.clear()
        async with front.gateway.exchange() as exchange:
            await exchange.pick(body, 5)
        assert len(turns_of) == large_parts, "all messages with the body but the first have a turn"


async def test_a_destination_that_the_client_names_is_replaced(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        answer = await exchange.pick(BODY, headers={"x-gateway-destination-endpoint": "192.0.2.1:80"})
        assert endpoint_of(answer) == host_port(engine)


async def test_no_answer_comes_before_the_body_is_complete(front: Front) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers()
        await exchange.send(request_body={"body": BODY})
        waiting = asyncio.ensure_future(exchange.answer())
        async with front.gateway.exchange() as other:  # a whole exchange in the meantime
            await other.pick(BODY)
        assert not waiting.done()
        await exchange.send(request_body={"body": b"", "end_of_stream": True})
        endpoint_of(await waiting)


async def test_a_body_that_ends_with_trailers(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers()
        await exchange.send(request_body={"body": BODY})
        await exchange.send(request_trailers={})
        assert endpoint_of(await exchange.answer()) == host_port(engine)
        part = (await exchange.answer()).request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (BODY, False)
        assert (await exchange.answer()).WhichOneof("response") == "request_trailers"


async def test_a_buffered_body_is_answered_once_with_the_choice(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers(mode="BUFFERED")
        first = await exchange.answer()
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.response.HasField("header_mutation")
        await exchange.send(request_body={"body": BODY, "end_of_stream": True})
        answer = await exchange.answer()
        assert answer.WhichOneof("response") == "request_body"
        assert endpoint_of(answer) == host_port(engine)
        assert not answer.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_other_modes_pick_at_the_headers(front: Front, engine: ScriptedEngine, mode: str) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers(mode=mode)
        assert endpoint_of(await exchange.answer()) == host_port(engine)
        for is_last in (False, True):
            await exchange.send(request_body={"body": BODY, "end_of_stream": is_last})
            answer = await exchange.answer()
            assert answer.WhichOneof("response") == "request_body"
            assert not answer.request_body.response.HasField("body_mutation")
        await exchange.send(request_trailers={})
        assert (await exchange.answer()).WhichOneof("response") == "request_trailers"


async def test_a_request_without_a_body(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers("/v1/models?all=1", end=True)
        assert endpoint_of(await exchange.answer()) == host_port(engine)


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "NONE"])
async def test_the_response_is_returned_unchanged_and_ends_the_load(
    front: Front, engine: ScriptedEngine, mode: str
) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.pick(BODY, response_mode=mode)
        await exchange.body()
        assert front.in_flight(engine) == 1
        await exchange.send(response_headers={"headers": {"headers": [{"key": ":status", "raw_value": b"200"}]}})
        answer = await exchange.answer()
        assert answer.WhichOneof("response") == "response_headers"
        for text, is_last in ((b"data: a\n\n", False), (b"data: [DONE]\n\n", True)):
            assert front.in_flight(engine) == 1
            await exchange.send(response_body={"body": text, "end_of_stream": is_last})
            response = (await exchange.answer()).response_body.response
            if mode == "NONE":
                assert not response.HasField("body_mutation")
            else:
                part = response.body_mutation.streamed_response
                assert (part.body, part.end_of_stream) == (text, is_last)
        await until(lambda: front.in_flight(engine) == 0)
        assert front.metric("lmkv_picker_streams") == 1
    await until(lambda: front.metric("lmkv_picker_streams") == 0)


async def test_response_trailers_end_the_load(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.pick(BODY)
        await exchange.body()
        await exchange.send(response_trailers={})
        assert (await exchange.answer()).WhichOneof("response") == "response_trailers"
        await until(lambda: front.in_flight(engine) == 0)


async def test_a_stream_that_ends_early_ends_the_load(front: Front, engine: ScriptedEngine) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.pick(BODY)
        assert front.in_flight(engine) == 1
    await until(lambda: front.in_flight(engine) == 0)


async def test_the_load_moves_to_the_engine_that_served(make_engine: MakeEngine, make_picker: MakePicker) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(2)]
    front = await make_picker(engines)
    async with front.gateway.exchange() as exchange:
        picked = endpoint_of(await exchange.pick(BODY))
        await exchange.body()
        (other,) = (engine for engine in engines if host_port(engine) != picked)
        await exchange.send(
            response_headers={},
            metadata_context=_metadata("envoy.lb", {"x-gateway-destination-endpoint-served": host_port(other)}),
        )
        await exchange.answer()
        await until(lambda: front.in_flight(other) == 1)
        assert sum(map(front.in_flight, engines)) == 1


async def test_an_observed_request_is_never_answered(front: Front) -> None:
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers(end=True, observability_mode=True)
        await exchange.call.done_writing()
        assert await exchange.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    assert front.metric("lmkv_picker_requests_total") == 0


@pytest.mark.parametrize("is_text", [False, True])
async def test_only_endpoints_of_the_subset_are_picked(
    make_engine: MakeEngine, make_picker: MakePicker, is_text: bool
) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(3)]
    front = await make_picker(engines)
    allowed = [host_port(engine) for engine in engines[1:]]
    subset: Any = ",".join(allowed) if is_text else allowed
    picked = {await front.gateway.pick(BODY, subset=subset) for _ in range(6)}
    assert picked == set(allowed)


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"], ""])
async def test_a_subset_without_a_healthy_engine_is_503(front: Front, subset: Any) -> None:
    async with front.gateway.exchange() as exchange:
        answer = await exchange.pick(BODY, subset=subset)
        assert answer.WhichOneof("response") == "immediate_response"
        assert answer.immediate_response.status.code == 503
        headers = {one.header.key: one.header.raw_value for one in answer.immediate_response.headers.set_headers}
        assert headers == {"content-type": b"application/json", "retry-after": b"1"}
        assert json.loads(answer.immediate_response.body)["error"]["code"] == 503
    assert front.metric("lmkv_picker_requests_total", outcome="no_endpoint") == 1


async def test_without_a_healthy_engine_requests_are_503_and_the_picker_is_not_ready(
    engine: ScriptedEngine, make_picker: MakePicker
) -> None:
    engine.health = 500
    front = await make_picker([engine], healthy=False)
    await until(lambda: engine.health_count > 1)
    assert (await front.get("/readyz")).status_code == 503
    assert await _status(front, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await _status(front, "liveness") == health_pb2.HealthCheckResponse.SERVING
    async with front.gateway.exchange() as exchange:
        assert (await exchange.pick(BODY)).immediate_response.status.code == 503
    engine.health = 200
    await until(lambda: front.picker.engines[0].is_healthy)
    assert (await front.get("/readyz")).status_code == 200
    for service in ("readiness", "liveness", "", "envoy.service.ext_proc.v3.ExternalProcessor"):
        await _until_serving(front, service)


async def test_more_requests_than_allowed_are_429(engine: ScriptedEngine, make_picker: MakePicker) -> None:
    front = await make_picker([engine], max_concurrent_requests=1)
    async with front.gateway.exchange() as first:
        await first.pick(BODY)
        async with front.gateway.exchange() as second:
            answer = await second.pick(BODY)
            assert answer.immediate_response.status.code == 429
            assert await second.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    await until(lambda: front.metric("lmkv_picker_streams") == 0)
    assert await front.gateway.pick(BODY) == host_port(engine)
    assert front.metric("lmkv_picker_requests_total", outcome="rejected") == 1


async def test_a_body_over_the_limit_is_routed_by_load_and_passes_unchanged(
    engine: ScriptedEngine, make_picker: MakePicker
) -> None:
    front = await make_picker([engine], max_body_size=50_000 / (1 << 30))
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers()
        await exchange.send(request_body={"body": LARGE[:60_000]})
        assert endpoint_of(await exchange.answer()) == host_port(engine)
        await exchange.send(request_body={"body": LARGE[60_000:], "end_of_stream": True})
        assert await exchange.body() == LARGE


async def test_a_body_of_too_many_values_is_refused_and_a_text_of_such_characters_is_not(
    front: Front, engine: ScriptedEngine
) -> None:
    text = b'{"model": "scripted", "prompt": "' + b"[,{:" * MAX_JSON_OBJECTS + b'"}'
    values = b'{"model": "scripted", "more": [' + b"{}," * MAX_JSON_OBJECTS + b"{}]}"
    async with front.gateway.exchange() as exchange:
        assert endpoint_of(await exchange.pick(text, parts=4)) == host_port(engine)
    async with front.gateway.exchange() as exchange:
        refusal = (await exchange.pick(values, parts=4)).immediate_response
        assert refusal.status.code == 413
        assert b"objects, lists and texts" in refusal.body
    assert front.metric("lmkv_picker_requests_total", outcome="refused") == 1


async def test_a_stream_over_the_deadline_ends(engine: ScriptedEngine, make_picker: MakePicker) -> None:
    front = await make_picker([engine], request_timeout=0.2)
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers()
        assert await exchange.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    await until(lambda: front.metric("lmkv_picker_requests_total", outcome="timeout") == 1)


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1, 2]", b'{"prompt": [1, "two"]}', b"\xff\xfe"])
async def test_a_body_that_cannot_be_read_reaches_an_engine(front: Front, engine: ScriptedEngine, body: bytes) -> None:
    async with front.gateway.exchange() as exchange:
        assert endpoint_of(await exchange.pick(body)) == host_port(engine)
        assert await exchange.body() == body


async def test_bytes_that_are_no_message_end_the_stream_with_an_error(front: Front, engine: ScriptedEngine) -> None:
    process: Any = front.channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")  # type: ignore[call-arg]
    call = process(timeout=60)
    exchange = HttpExchange(call)
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await exchange.call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await front.gateway.pick(BODY) == host_port(engine)


def _metadata(namespace: str, values: dict[str, Any]) -> Any:
    from tests.server.proxy.picker.published import Request

    metadata = Request().metadata_context
    metadata.filter_metadata[namespace].update(values)
    return metadata


async def _status(front: Front, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(front.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(answer.status)


async def _until_serving(front: Front, service: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(front.channel)
    async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def test_the_bodies_of_all_requests_together_are_limited(
    make_engine: MakeEngine, make_picker: MakePicker, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = MemoryBudget(2 * 2 * 1900)  # one gateway may have half: two bodies
    monkeypatch.setattr(picker_service, "of_process", lambda: budget)
    front = await make_picker([await make_engine("i-0")], max_body_size=2000 / (1 << 30))
    async with front.gateway.exchange() as one, front.gateway.exchange() as two, front.gateway.exchange() as three:
        for exchange in (one, two):
            await exchange.send_headers()
            await exchange.send(request_body={"body": b" " * 1900})
        await until(lambda: front.metric("lmkv_picker_held_bytes") == 3800)
        await three.send_headers()
        await three.send(request_body={"body": b" " * 1900})
        assert (await three.answer()).immediate_response.status.code == 429
        budget.capacity_bytes = 1 << 20
        for exchange in (one, two):
            await exchange.send(request_body={"body": b"{}", "end_of_stream": True})
            assert await exchange.body() == b" " * 1900 + b"{}"
        await until(lambda: front.metric("lmkv_picker_held_bytes") == 0)
        await until(lambda: budget.held_bytes == 0)  # though the responses have not come


async def test_the_bodies_of_one_gateway_leave_memory_to_another_at_the_same_address(
    make_engine: MakeEngine, make_picker: MakePicker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = MemoryBudget(2 * 2 * 1900)
    monkeypatch.setattr(picker_service, "of_process", lambda: budget)
    tokens = write(tmp_path / "tokens.yaml", entry("engine", "a"), entry("engine", "b"))
    front = await make_picker([await make_engine("i-0")], max_body_size=2000 / (1 << 30), auth_tokens=tokens)
    hog, honest = (
        Gateway(front.channel, [("authorization", f"Bearer engine-of-{tenant}-token")]) for tenant in ("a", "b")
    )
    async with hog.exchange() as one, hog.exchange() as two:
        for exchange in (one, two):
            await exchange.send_headers()
            await exchange.send(request_body={"body": b" " * 1900})
        await until(lambda: budget.held_bytes == 3800)
        assert await honest.pick(BODY)
