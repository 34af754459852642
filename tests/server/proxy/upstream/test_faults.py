"""Engines that fail, clients that go: every request ends, with a right answer or a clear error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from lmkv.runtime.memory_budget import MemoryBudget
from lmkv_server.http.json_text import json_bytes
from lmkv_server.proxy import admission
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.pd.test_prefill_decode import (
    CHAT,
    COMPLETIONS,
    PLAIN,
    USAGE,
    alone,
    answer_of,
    chat,
    completion,
)
from tests.server.proxy.scripted_engine import ScriptedEngine

BODY = completion(PLAIN, max_tokens=20, ignore_eos=True)
CHAT_BODY = chat(PLAIN, max_tokens=20, ignore_eos=True)
REPEATED = BODY | {"presence_penalty": 1.0}
STREAM = {"stream": True}


async def fleet(
    make_engine: MakeEngine, make_proxy: MakeProxy, prefill_count: int, decode_count: int, **settings: Any
) -> tuple[Front, list[ScriptedEngine], list[ScriptedEngine]]:
    prefillers = [await make_engine(f"p-{number}") for number in range(prefill_count)]
    decoders = [await make_engine(f"d-{number}") for number in range(decode_count)]
    settings = {"policy": "round_robin", "health_interval": 3600.0} | settings
    front = await make_proxy(prefillers, decoders, **settings)
    return front, prefillers, decoders


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_request_fails_over_to_another_prefill_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, status: int
) -> None:
    front, prefillers, decoders = await fleet(make_engine, make_proxy, 2, 1)
    for prefiller in prefillers:
        prefiller.refusals = [status] if prefiller is prefillers[0] else []
    assert answer_of(await front.ask(COMPLETIONS, BODY)) == await alone(decoders[0], COMPLETIONS, BODY)
    first, second = prefillers[0].bodies()[0], prefillers[1].bodies()[0]
    assert first["kv_transfer_params"]["lmkv"]["handoff_id"] != second["kv_transfer_params"]["lmkv"]["handoff_id"]
    await front.counts("lmkv_proxy_retries_total", 1, role="prefill")
    await front.counts("lmkv_proxy_requests_total", 1, strategy="continue", outcome="ok")


@pytest.mark.parametrize("body", [BODY, REPEATED, BODY | STREAM], ids=["continue", "repeat", "streamed"])
async def test_without_prefill_engines_the_decode_engine_computes(
    make_engine: MakeEngine, make_proxy: MakeProxy, body: dict[str, Any]
) -> None:
    front, prefillers, decoders = await fleet(make_engine, make_proxy, 3, 1)
    for prefiller in prefillers:
        prefiller.refusals = [500, 500]
    assert answer_of(await front.ask(COMPLETIONS, body)) == await alone(decoders[0], COMPLETIONS, body)
    assert sum(len(prefiller.asked) for prefiller in prefillers) == 2, "no third one is tried"
    assert "kv_transfer_params" not in decoders[0].bodies()[0]
    await front.counts("lmkv_proxy_requests_total", 1, strategy="alone", outcome="ok")


async def test_a_prefill_that_was_given_up_is_no_first_token(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    prefiller.abort_after = 0
    assert answer_of(await front.ask(COMPLETIONS, BODY | USAGE)) == await alone(decoder, COMPLETIONS, BODY | USAGE)
    await front.counts("lmkv_proxy_repeats_total", 1, reason="first_token")


async def test_an_engine_that_failed_a_request_no_longer_has_it_as_load(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = [await make_engine(), await make_engine()]
    front = await make_proxy(engines=engines, policy="round_robin", health_interval=3600.0)
    engines[0].refusals = [503]
    engines[1].going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, BODY))
    await until(lambda: engines[1].waiting_count == 1)
    loads = {engine.url: engine.in_flight_count for engine in front.proxy.pools.engines}
    assert loads == {engines[0].url: 0, engines[1].url: 1}
    engines[1].going.set()
    assert (await asking).status_code == 200
    await until(lambda: not any(engine.in_flight_count for engine in front.proxy.pools.engines))


async def test_an_engine_serves_whose_models_cannot_be_read(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await make_engine()
    engine.max_model_len = "long"
    front = await make_proxy(engines=[engine])
    assert (await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=3))).status_code == 200


async def test_a_prefill_engine_that_dies_is_unhealthy_until_it_restarts(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    front, (prefiller,), (decoder,) = await fleet(make_engine, make_proxy, 1, 1, health_interval=0.05)
    await prefiller.stop()
    assert answer_of(await front.ask(COMPLETIONS, BODY)) == await alone(decoder, COMPLETIONS, BODY)
    state = front.proxy.pools.engines[0]
    await until(lambda: not state.is_healthy)
    assert state.failure == "it cannot be reached (Connection refused)"
    prefiller.handoff_params = {"instance_id": "p-new"}
    await prefiller.start()
    await front.all_healthy()
    assert state.instance_id == "p-new"
    await front.ask(COMPLETIONS, BODY)
    assert len(prefiller.asked) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("token_count", [0, 1, 7, 18])
@pytest.mark.parametrize("fault", ["die_after", "error_after", "abort_after"])
async def test_another_decode_engine_continues_where_one_died(
    make_engine: MakeEngine, make_proxy: MakeProxy, path: str, token_count: int, fault: str
) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    body = (BODY if path == COMPLETIONS else chat("hello", max_tokens=20, ignore_eos=True)) | USAGE
    expected = await alone(decoders[0], path, body)
    setattr(decoders[0], fault, token_count)
    setattr(decoders[1], fault, None)
    said = answer_of(await front.ask(path, body))
    assert text(said) == text(expected)
    assert said[-1] == expected[-1], "usage counts each token once"
    assert [chunk["choices"][0]["finish_reason"] for chunk in said[:-1]][-1] == "length"
    await front.counts("lmkv_proxy_retries_total", 1, role="decode")
    assert "lmkv" not in (decoders[1].bodies()[0].get("kv_transfer_params") or {}), "it has no part in the handoff"


def text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@pytest.mark.parametrize("fault", ["die_after", "abort_after"])
async def test_a_complete_response_survives_the_decode_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, fault: str
) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    expected = await alone(decoders[0], COMPLETIONS, BODY)
    setattr(decoders[0], fault, 5)
    assert answer_of(await front.ask(COMPLETIONS, BODY)) == expected


async def test_a_stream_that_cannot_continue_ends_with_an_error(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    for body in (BODY | STREAM, REPEATED | STREAM):
        for decoder in decoders:
            decoder.die_after = 3
        response = await front.ask(COMPLETIONS, body)
        *_, error, done, rest = response.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
        assert (done, rest) == ("data: [DONE]", "")
    await front.counts("lmkv_proxy_requests_total", 2, outcome="failed")


async def test_a_repeated_answer_that_has_not_begun_is_another_engines(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    expected = await alone(decoders[1], COMPLETIONS, REPEATED | STREAM)
    decoders[0].die_after = 0
    assert answer_of(await front.ask(COMPLETIONS, REPEATED | STREAM)) == expected


async def test_a_repeated_answer_that_broke_off_does_not_begin_again(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    decoders[0].die_after = 3
    response = await front.ask(COMPLETIONS, REPEATED | STREAM)
    *_, error, done, rest = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
    assert (done, rest) == ("data: [DONE]", "")
    assert decoders[1].bodies() == []


@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.parametrize("body", [BODY, BODY | STREAM, REPEATED, REPEATED | STREAM])
async def test_a_request_fails_over_to_another_decode_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, body: dict[str, Any], status: int
) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2)
    expected = await alone(decoders[1], COMPLETIONS, body)
    decoders[0].refusals = [status]
    assert answer_of(await front.ask(COMPLETIONS, body)) == expected
    assert not decoders[0].refusals
    await front.counts("lmkv_proxy_retries_total", 1, role="decode")


async def test_an_engines_refusal_is_passed_on_as_it_is(front: Front, prefiller: ScriptedEngine) -> None:
    for body in (BODY, REPEATED):
        response = await front.ask(COMPLETIONS, body | {"model": "unknown"})
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "The model `unknown` does not exist."
    await front.counts("lmkv_proxy_requests_total", 2, outcome="refused")


async def test_a_refusal_behind_the_first_token_is_an_event(front: Front, decoder: ScriptedEngine) -> None:
    decoder.refusals = [400]
    response = await front.ask(COMPLETIONS, BODY | STREAM)
    first, error, done, _ = response.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "as scripted"
    assert done == "data: [DONE]"


async def test_the_last_engines_own_words_are_passed_on(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    prefiller.refusals, decoder.refusals = [503, 503], [503]
    response = await front.ask(COMPLETIONS, BODY)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "as scripted")


@pytest.mark.parametrize("body", [BODY, BODY | STREAM, REPEATED, REPEATED | STREAM])
@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_client_that_disconnects_cancels_its_requests(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, body: dict[str, Any], held: str
) -> None:
    engine = {"prefill": prefiller, "decode": decoder}[held]
    engine.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, body))
    await until(lambda: engine.waiting_count == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: engine.cut_count == 1)
    await front.counts("lmkv_proxy_requests_total", 1, outcome="cancelled")
    assert all(each.in_flight_count == 0 for each in front.proxy.pools.engines)


async def test_a_client_that_disconnects_during_a_stream_ends_it(front: Front, decoder: ScriptedEngine) -> None:
    decoder.going.clear()
    decoder.hold_after = 5
    async with front.client.stream("POST", COMPLETIONS, json=BODY | STREAM) as response:
        lines = response.aiter_lines()
        for _ in range(6):  # the prefill engine's token and five of the decode engine's
            assert (await anext(lines)).startswith("data: ")
            assert await anext(lines) == ""
        await until(lambda: decoder.waiting_count == 1)
    await until(lambda: decoder.cut_count == 1)


@pytest.mark.parametrize(
    ("held", "body", "has_begun"),
    [("prefill", BODY | STREAM, False), ("decode", BODY, False), ("decode", BODY | STREAM, True)],
)
async def test_a_request_has_a_deadline(
    prefiller: ScriptedEngine,
    decoder: ScriptedEngine,
    make_proxy: MakeProxy,
    held: str,
    body: dict[str, Any],
    has_begun: bool,
) -> None:
    front = await make_proxy([prefiller], [decoder], request_timeout=2.0)
    engine = {"prefill": prefiller, "decode": decoder}[held]
    engine.going.clear()
    response = await front.ask(COMPLETIONS, body)
    assert response.status_code == (200 if has_begun else 504)
    assert "the response was not complete within 2 s" in response.text
    await until(lambda: engine.cut_count == 1)
    await front.counts("lmkv_proxy_requests_total", 1, outcome="timeout")


@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_frozen_engine_is_replaced_during_a_request(
    make_engine: MakeEngine, make_proxy: MakeProxy, held: str
) -> None:
    front, prefillers, decoders = await fleet(make_engine, make_proxy, 2, 2, health_interval=0.05, health_timeout=0.5)
    expected = await alone(decoders[0], COMPLETIONS, BODY | STREAM)
    pool = {"prefill": prefillers, "decode": decoders}[held]
    for engine in pool:
        engine.hold_after = 3 if held == "decode" else 0
        engine.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, BODY | STREAM))
    await until(lambda: any(engine.waiting_count for engine in pool))
    frozen = next(engine for engine in pool if engine.waiting_count)
    for engine in pool:
        if engine is not frozen:
            engine.going.set()
    frozen.health = 0
    assert text(answer_of(await asking)) == text(expected)
    await front.counts("lmkv_proxy_retries_total", 1, role=held)
    frozen.going.set()


async def test_an_engine_that_stays_unhealthy_is_logged_once(
    front: Front, prefiller: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    prefiller.health = 503
    before = prefiller.health_count
    await until(lambda: prefiller.health_count > before + 3)
    assert caplog.text.count(f"{prefiller.url} is unhealthy: it returned 503") == 1
    assert caplog.text.count("is unhealthy") == 1


async def test_requests_that_wait_for_their_prefill_count_as_load_of_their_decode_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    front, (prefiller,), decoders = await fleet(make_engine, make_proxy, 1, 2, policy="least_loaded")
    prefiller.going.clear()
    asking = [asyncio.create_task(front.ask(COMPLETIONS, BODY)) for _ in range(6)]
    await until(lambda: prefiller.waiting_count == 6)
    prefiller.going.set()
    await asyncio.gather(*asking)
    assert [len(decoder.asked) for decoder in decoders] == [3, 3]


async def test_an_engine_that_is_not_well_gets_no_requests(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    front, _, decoders = await fleet(make_engine, make_proxy, 1, 2, health_interval=0.05)
    decoders[0].health = 503
    await until(lambda: not front.proxy.pools.decode.engines[0].is_healthy)
    for _ in range(3):
        await front.ask(COMPLETIONS, BODY)
    assert (len(decoders[0].asked), len(decoders[1].asked)) == (0, 3)
    decoders[0].health = 200
    await front.all_healthy()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("extra", [{}, STREAM, {"max_tokens": 1}, {"stop": ["never"]}, {"n": 2}])
@pytest.mark.parametrize("is_known", [True, False], ids=["unhealthy", "not yet unhealthy"])
async def test_without_decode_engines_prefill_engines_serve(
    make_engine: MakeEngine, make_proxy: MakeProxy, path: str, extra: dict[str, Any], is_known: bool
) -> None:
    front, (prefiller,), (decoder,) = await fleet(
        make_engine, make_proxy, 1, 1, health_interval=0.05 if is_known else 3600.0
    )
    body = BODY | extra if path == COMPLETIONS else CHAT_BODY | extra
    expected = answer_of(await front.ask(path, body))
    await decoder.stop()
    if is_known:
        await until(lambda: not front.proxy.pools.decode.engines[0].is_healthy)
    prefiller.asked.clear()
    assert answer_of(await front.ask(path, body)) == expected
    assert (await front.client.get("/readyz")).status_code == 200
    if is_known:
        assert len(prefiller.asked) == 1, "no prefill stage precedes"
        await front.counts("lmkv_proxy_requests_total", 1, strategy="alone", outcome="ok")


async def test_without_any_engine_clients_get_503_with_retry_after(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    assert (await front.client.get("/readyz")).status_code == 200
    await asyncio.gather(prefiller.stop(), decoder.stop())
    await until(lambda: not any(engine.is_healthy for engine in front.proxy.pools.engines))
    response = await front.ask(COMPLETIONS, BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    ready = await front.client.get("/readyz")
    assert ready.status_code == 503
    assert all(engine.url in ready.json()["detail"] for engine in (prefiller, decoder))
    assert (await front.client.get("/healthz")).status_code == 200


async def test_concurrent_requests_are_limited(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy
) -> None:
    front = await make_proxy([prefiller], [decoder], max_concurrent_requests=1)
    prefiller.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, BODY))
    await until(lambda: prefiller.waiting_count == 1)
    response = await front.ask(COMPLETIONS, BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    prefiller.going.set()
    assert (await asking).status_code == 200
    assert (await front.ask(COMPLETIONS, BODY)).status_code == 200


async def test_the_bodies_of_all_requests_together_are_limited(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = BODY | {"metadata": {"padding": "x" * 1600}}
    needs, little = (json_bytes(json.dumps(body).encode()) for body in (large, BODY))
    budget = MemoryBudget(2 * (2 * needs + 2 * little))  # one address may have half: two large bodies and small ones
    monkeypatch.setattr(admission, "of_process", lambda: budget)
    front = await make_proxy([prefiller], [decoder], max_body_size="2KB")
    prefiller.going.clear()
    held = [asyncio.create_task(front.ask(COMPLETIONS, large)) for _ in range(2)]
    await until(lambda: prefiller.waiting_count == 2)
    refused = await front.ask(COMPLETIONS, large)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "take too much memory" in refused.json()["error"]["message"]
    small = asyncio.create_task(front.ask(COMPLETIONS, BODY))
    await until(lambda: prefiller.waiting_count == 3)
    prefiller.going.set()
    assert [(await one).status_code for one in (*held, small)] == [200, 200, 200]
    assert (await front.ask(COMPLETIONS, large)).status_code == 200


async def test_a_body_that_arrives_too_slowly_is_refused(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "BODY_TIMEOUT_SECONDS", 0.1)
    front = await make_proxy([prefiller], [decoder])
    reader, writer = await asyncio.open_connection("127.0.0.1", front.proxy.port)
    fields = ("Host: localhost", "Content-Type: application/json", "Content-Length: 9", "", "{")
    writer.write("\r\n".join((f"POST {COMPLETIONS} HTTP/1.1", *fields)).encode())
    assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
    writer.close()
    await writer.wait_closed()
    assert prefiller.asked == []


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "must be a JSON object"),
        (b"[1]", 400, "must be a JSON object"),
        (b"\xff", 400, "must be a JSON object"),
        (b"", 400, "must be a JSON object"),
        (b"[" * 100_000, 400, "must be a JSON object"),
        (b'{"prompt": "' + b"x" * 20_000 + b'"}', 413, "max_body_size"),
    ],
)
async def test_what_is_no_request_is_refused(
    prefiller: ScriptedEngine,
    decoder: ScriptedEngine,
    make_proxy: MakeProxy,
    content: bytes,
    status: int,
    message: str,
) -> None:
    front = await make_proxy([prefiller], [decoder], max_body_size="16KB" if status == 413 else "1MB")
    response = await front.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert prefiller.asked == []


@pytest.mark.parametrize(
    "odd",
    [
        {"prompt": []},
        {"prompt": None},
        {"max_tokens": "7"},
        {"stop": {}},
        {"stream_options": []},
        {"stream_options": [1]},
        {"kv_transfer_params": "x"},
        {"messages": 1},
        {"n": "x"},
        {"user": {}},
        {"model": []},
    ],
    ids=str,
)
async def test_odd_values_come_to_an_engine_and_to_no_harm(
    front: Front, decoder: ScriptedEngine, odd: dict[str, Any]
) -> None:
    await front.ask(COMPLETIONS, BODY | odd)
    assert answer_of(await front.ask(COMPLETIONS, BODY)) == await alone(decoder, COMPLETIONS, BODY)
    await front.counts("lmkv_proxy_requests_total", 2)


async def test_paths_and_methods_that_are_none_say_so(front: Front) -> None:
    missing = await front.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "the path /v1/nothing does not exist")
    wrong = await front.client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_requests_under_way_get_a_moment_when_it_stops(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy
) -> None:
    front = await make_proxy([prefiller], [decoder], stop_timeout=20.0)
    decoder.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, BODY | STREAM))
    await until(lambda: decoder.waiting_count == 1)
    async with httpx.AsyncClient(base_url=front.proxy.url, trust_env=False, timeout=60) as other:
        await other.get("/healthz")  # a connection of its own, open before the stop
        stopping = asyncio.create_task(front.proxy.aclose())
        await asyncio.sleep(0)
        refused = await other.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 503
    decoder.going.set()
    assert answer_of(await asking) == await alone(decoder, COMPLETIONS, BODY | STREAM)
    await stopping
