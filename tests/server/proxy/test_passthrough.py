"""Paths that the proxy passes on: to an engine that serves them, with admission, deadlines, streams and failover."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine

EVERY_PATH = ("/v1/responses", "/v1/embeddings", "/v1/messages", "/version", "/ping")
RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "a prompt"}


async def serving(make_engine: MakeEngine, *paths: str, model: str = MODEL) -> ScriptedEngine:
    engine = await make_engine()
    await engine.stop()
    engine.other_paths, engine.model = paths, model
    await engine.start()
    return engine


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_a_path_reaches_an_engine_that_serves_it(
    make_engine: MakeEngine, make_proxy: MakeProxy, path: str
) -> None:
    lacking = [await make_engine() for _ in range(3)]
    engine = await serving(make_engine, *EVERY_PATH)
    front = await make_proxy(engines=[*lacking, engine])
    has_body = path.startswith("/v1")
    for _ in range(4):
        response = await (front.ask(path, BODY, **{"x-request-id": "7"}) if has_body else front.client.get(path))
        assert (response.status_code, response.json()["path"]) == (200, path)
    assert [(path, body) for path, body, _ in engine.asked] == [(path, BODY if has_body else {})] * 4
    assert not has_body or engine.asked[0][2]["x-request-id"] == "7"
    await front.counts("lmkv_proxy_requests_total", 4, path=path, outcome="ok")


async def test_a_path_that_no_engine_serves_is_a_clear_error(front: Front) -> None:
    response = await front.ask("/v1/embeddings", BODY)
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "no engine serves /v1/embeddings"
    assert (await front.client.get("/version")).status_code == 404


async def test_without_a_healthy_engine_it_is_503(
    front: Front, decoder: ScriptedEngine, prefiller: ScriptedEngine
) -> None:
    await decoder.stop()
    await prefiller.stop()
    await until(lambda: not any(engine.is_healthy for engine in front.proxy.pools.engines))
    response = await front.client.get("/ping")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_the_engine_that_has_the_model_is_selected(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engines = [await serving(make_engine, "/v1/embeddings", model=model) for model in ("one", "two")]
    front = await make_proxy(engines=engines)
    for model, engine in zip(("one", "two"), engines, strict=True):
        for _ in range(2):
            assert (await front.ask("/v1/embeddings", {**BODY, "model": model})).json()["model"] == model
        assert len(engine.asked) == 2
    unknown = await front.ask("/v1/embeddings", {**BODY, "model": "three"})
    assert unknown.status_code == 404
    assert "`three` does not exist" in unknown.text


async def test_events_arrive_as_they_are(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await serving(make_engine, RESPONSES)
    front = await make_proxy(engines=[engine])
    response = await front.ask(RESPONSES, BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [line for line in response.text.splitlines() if line.startswith("event:")]
    assert names == ["event: response.created", "event: response.output_text.delta", "event: response.completed"]
    (state,) = front.proxy.pools.engines
    assert len(state.first_token_seconds) == 1
    await front.counts("lmkv_proxy_time_to_first_token_seconds_count", 1)


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_request_fails_over(make_engine: MakeEngine, make_proxy: MakeProxy, status: int) -> None:
    engines = [await serving(make_engine, RESPONSES) for _ in range(2)]
    front = await make_proxy(engines=engines, health_interval=3600.0)
    engines[0].refusals = [status]
    assert (await front.ask(RESPONSES, BODY)).status_code == 200
    assert [len(engine.asked) for engine in engines] == [1, 1]
    await front.counts("lmkv_proxy_retries_total", 1)


async def test_a_stream_that_breaks_before_its_first_event_is_repeated(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = [await serving(make_engine, RESPONSES) for _ in range(2)]
    front = await make_proxy(engines=engines, health_interval=3600.0)
    engines[0].die_after = 0
    assert "response.completed" in (await front.ask(RESPONSES, BODY | {"stream": True})).text


async def test_a_stream_that_breaks_later_ends_with_an_error(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engines = [await serving(make_engine, RESPONSES) for _ in range(2)]
    front = await make_proxy(engines=engines, health_interval=3600.0)
    engines[0].die_after = 1
    text = (await front.ask(RESPONSES, BODY | {"stream": True})).text
    assert "response.created" in text
    assert "its response broke off" in text
    assert engines[1].asked == []


async def test_a_request_ends_at_its_deadline(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await serving(make_engine, RESPONSES)
    front = await make_proxy(engines=[engine], request_timeout=1.0)
    engine.going.clear()
    assert (await front.ask(RESPONSES, BODY)).status_code == 504
    await until(lambda: engine.cut_count == 1)


async def test_requests_are_admitted_and_count_as_load(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await serving(make_engine, RESPONSES)
    front = await make_proxy(engines=[engine], max_concurrent_requests=1)
    engine.going.clear()
    asking = asyncio.create_task(front.ask(RESPONSES, BODY))
    await until(lambda: engine.waiting_count == 1)
    assert front.proxy.pools.engines[0].in_flight_count == 1
    assert (await front.ask(RESPONSES, BODY)).status_code == 503
    engine.going.set()
    assert (await asking).status_code == 200


async def test_clients_cannot_control_handoffs(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await serving(make_engine, RESPONSES)
    front = await make_proxy(engines=[engine])
    await front.ask(RESPONSES, BODY | {"kv_transfer_params": {"lmkv": {"handoff_id": "x"}, "other": 1}})
    assert engine.asked[0][1]["kv_transfer_params"] == {"other": 1}


async def test_a_body_that_is_no_object_is_refused(front: Front) -> None:
    for content in (b"[1]", b"{"):
        response = await front.client.post(RESPONSES, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "must be a JSON object" in response.text


async def test_a_path_is_tried_again_after_the_engine_has_returned(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engine = await make_engine()
    front = await make_proxy(engines=[engine])
    assert (await front.client.get("/ping")).status_code == 404
    (state,) = front.proxy.pools.engines
    assert state.missing_paths == {"/ping"}
    await engine.stop()
    await until(lambda: not state.is_healthy)
    engine.other_paths = ("/ping",)
    await engine.start()
    await front.all_healthy()
    assert (await front.client.get("/ping")).status_code == 200
