"""Requests through a prefill engine and a decode engine: as one engine would answer them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv.auth.credentials import NO_TOKEN
from lmkv.auth.handoff import HandoffKeys
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.scripted_engine import EOS, MAX_MODEL_LEN, MODEL, ScriptedEngine, answer_to, next_token
from tests.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(prompt: Any, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **parameters}


def chat(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **parameters}


def answer_of(response: httpx.Response) -> Any:
    """The content of a response without its id and time; of a stream the events, which must share both."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return plain(response.json())
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return [plain(chunk) for chunk in chunks]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer.pop("id").startswith(("cmpl-", "chatcmpl-"))
    assert answer.pop("created")
    return answer


async def alone(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> Any:
    """The response of one engine alone, which does not record the request."""
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=60) as client:
        said = answer_of(await client.post(path, json=body))
    engine.asked.pop()
    return said


def prompt_whose_answer(begins: int, at_least: int = 4) -> str:
    """A prompt whose completion starts with a token of this kind: 0xC3 within a character, EOS at once, 0 otherwise."""
    for number in range(10_000):
        prompt = f"prompt {number}"
        tokens = list(prompt.encode())
        first = next_token(tokens)
        kind = first if first in (0xC3, EOS) else 0
        if kind == begins and (begins == EOS or len(answer_to(tokens, {"max_tokens": 50})) >= at_least):
            return prompt
    raise AssertionError("there is none")


PLAIN = prompt_whose_answer(0, at_least=20)
WITHIN_A_CHARACTER = prompt_whose_answer(0xC3)
ENDS_AT_ONCE = prompt_whose_answer(EOS)

WITH_RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def test_a_body_in_which_nothing_is_replaced_passes_as_it_was_sent(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    """Writing a text of 31 MB again would take longer than reading it; nothing else is served meanwhile."""
    engine = await make_engine()
    front = await make_proxy(engines=[engine])
    sent = json.dumps(completion(PLAIN, max_tokens=1), indent=8).encode()
    forged = sent.replace(b"{", b'{"kv_transfer_params": {"lmkv": {"handoff_id": "mine"}},', 1)
    for body in (sent, forged):
        answer = await front.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    lengths = [int(headers["content-length"]) for _, _, headers in engine.asked]
    assert lengths[0] == len(sent) > lengths[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(PLAIN, max_tokens=20)),
        (COMPLETIONS, completion(PLAIN)),
        (COMPLETIONS, completion(list(PLAIN.encode()), max_tokens=20)),
        (COMPLETIONS, completion([PLAIN], max_tokens=20)),
        (COMPLETIONS, completion(PLAIN, max_tokens=1)),
        (COMPLETIONS, completion(ENDS_AT_ONCE, max_tokens=20)),
        (COMPLETIONS, completion(WITHIN_A_CHARACTER, max_tokens=20)),
        (COMPLETIONS, completion(ENDS_AT_ONCE, max_tokens=20, min_tokens=5)),
        (COMPLETIONS, completion(ENDS_AT_ONCE, max_tokens=200, ignore_eos=True)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, return_token_ids=True)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, truncate_prompt_tokens=5)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, presence_penalty=1.5)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, logprobs=0)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, repetition_penalty=1.0, logprobs=None)),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, something_new=1)),
        (COMPLETIONS, completion([PLAIN, "another"], max_tokens=20)),
        (CHAT, chat("hello", max_tokens=20)),
        (CHAT, chat("hello", max_completion_tokens=20, max_tokens=500)),
        (CHAT, chat("hello")),
        (CHAT, chat("hello", max_tokens=1)),
        (CHAT, chat("hello", max_tokens=20, return_token_ids=True)),
        (CHAT, chat("hello", max_tokens=20, presence_penalty=0.5)),
        (CHAT, chat("hello", max_tokens=20, seed=1, temperature=0.0)),
    ],
)
async def test_the_answer_is_that_of_one_engine(
    front: Front, decoder: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    for stream in ({}, {"stream": True}, USAGE):
        asked = body | stream
        assert answer_of(await front.ask(path, asked)) == await alone(decoder, path, asked)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.text("abcé", min_size=1, max_size=6),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 3),
    stream=st.sampled_from([{}, USAGE]),
    is_chat=st.booleans(),
)
async def test_any_answer_is_that_of_one_engine(
    front: Front,
    decoder: ScriptedEngine,
    prompt: str,
    max_tokens: int,
    min_tokens: int,
    stream: dict[str, Any],
    is_chat: bool,
) -> None:
    path, body = (CHAT, chat(prompt)) if is_chat else (COMPLETIONS, completion(prompt))
    body |= {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens), **stream}
    assert answer_of(await front.ask(path, body)) == await alone(decoder, path, body)


@pytest.mark.parametrize("stream", [{}, USAGE, {"stream": True, "stream_options": WITH_RUNNING_USAGE}])
@pytest.mark.parametrize(
    ("path", "body", "cached_tokens"),
    [
        (COMPLETIONS, completion(PLAIN, max_tokens=20), 2),
        (COMPLETIONS, completion(PLAIN, max_tokens=1), 2),
        (COMPLETIONS, completion(ENDS_AT_ONCE, max_tokens=20), 2),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, logprobs=0), 2),
        (COMPLETIONS, completion(PLAIN, max_tokens=20, n=2), 2),
        (COMPLETIONS, completion([PLAIN, "another"], max_tokens=20), 5),  # the decode engine alone
        (CHAT, chat("hello", max_tokens=20), 2),
        (CHAT, chat("hello", max_tokens=20, presence_penalty=0.5), 2),
    ],
)
async def test_only_tokens_that_neither_engine_has_computed_count_as_cached(
    front: Front,
    prefiller: ScriptedEngine,
    decoder: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    cached_tokens: int,
    stream: dict[str, Any],
) -> None:
    prefiller.cached_tokens, decoder.cached_tokens = 2, 5
    said = answer_of(await front.ask(path, body | stream))
    usage = (said[-1] if stream else said)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached_tokens
    prefiller.cached_tokens, decoder.cached_tokens = None, 5  # without --enable-prompt-tokens-details
    said = answer_of(await front.ask(path, body | stream))
    usage = (said[-1] if stream else said)["usage"]
    assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens") == (5 if cached_tokens == 5 else None)


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_what_one_engine_alone_has_loaded_counts_as_cached(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, logprobs: int | None
) -> None:
    prefiller.cached_tokens, decoder.cached_tokens = 2, 5
    body = completion(PLAIN, max_tokens=20, logprobs=logprobs)
    prefiller.refusals = [500] * 2
    assert (await front.ask(COMPLETIONS, body)).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    prefiller.refusals = []
    decoder.refusals = [500]
    assert (await front.ask(COMPLETIONS, body)).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_the_first_token_is_the_prefill_engines_and_nothing_is_generated_twice(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=20, min_tokens=2))
    (first,), (rest,) = prefiller.bodies(), decoder.bodies()
    tokens = list(PLAIN.encode())
    handoff = first["kv_transfer_params"]["lmkv"]
    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
    assert handoff["decode_instance"] == "d-1"
    assert rest["prompt"] == [*tokens, next_token(tokens)]
    assert (rest["max_tokens"], rest["min_tokens"]) == (19, 1)
    assert rest["kv_transfer_params"]["lmkv"] == {
        "handoff_id": handoff["handoff_id"],
        "decode_instance": "d-1",
        "prompt_token_count": len(tokens),
    }
    await front.counts("lmkv_proxy_requests_total", 1, strategy="continue", outcome="ok")


async def test_every_handoff_has_its_own_id(front: Front, prefiller: ScriptedEngine) -> None:
    for _ in range(3):
        await front.ask(COMPLETIONS, completion(PLAIN), **{"x-request-id": "same"})
    names = {body["kv_transfer_params"]["lmkv"]["handoff_id"] for body in prefiller.bodies()}
    assert len(names) == 3
    assert all(len(name) == 32 for name in names)


async def test_a_chat_continues_in_a_chat_by_tokens(front: Front, decoder: ScriptedEngine) -> None:
    await front.ask(CHAT, chat("hello", max_completion_tokens=20))
    (rest,) = decoder.bodies()
    tokens = list(b"user: hello\nassistant: ")
    assert rest["kv_transfer_params"]["prompt_token_ids"] == [*tokens, next_token(tokens)]
    assert rest["max_completion_tokens"] == 19


async def test_a_request_that_cannot_continue_is_generated_by_the_decode_engine_alone(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    body = completion(PLAIN, max_tokens=20, presence_penalty=1.0, n=1, stop=["zzz"])
    await front.ask(COMPLETIONS, body)
    (rest,) = decoder.bodies()
    decoder_parameters = rest.pop("kv_transfer_params")["lmkv"]
    assert rest == body
    assert decoder_parameters["prompt_token_count"] == len(PLAIN)
    assert prefiller.bodies()[0]["max_tokens"] == 1
    await front.counts("lmkv_proxy_requests_total", 1, strategy="repeat", outcome="ok")
    await front.counts("lmkv_proxy_repeats_total", 1, reason="presence_penalty")


async def test_a_first_token_within_a_character_is_not_shown(front: Front) -> None:
    await front.ask(COMPLETIONS, completion(WITHIN_A_CHARACTER))
    await front.counts("lmkv_proxy_repeats_total", 1, reason="first_token")


async def test_reasoning_is_left_to_one_engine(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    prefiller.thinks = decoder.thinks = True
    body = chat("hello", max_tokens=20)
    assert answer_of(await front.ask(CHAT, body)) == await alone(decoder, CHAT, body)
    await front.counts("lmkv_proxy_requests_total", 1, strategy="repeat")


async def test_no_parameter_that_clients_make_up_becomes_a_label(front: Front) -> None:
    await front.ask(COMPLETIONS, completion(PLAIN, made_up=1))
    await front.counts("lmkv_proxy_repeats_total", 1, reason="other")


async def test_a_prompt_that_fills_the_model_ends_after_one_token(front: Front, decoder: ScriptedEngine) -> None:
    body = chat("x" * (MAX_MODEL_LEN - len("user: \nassistant: ") - 1))
    assert answer_of(await front.ask(CHAT, body)) == await alone(decoder, CHAT, body)
    assert decoder.bodies() == []


async def test_a_limit_beyond_the_model_returns_the_error_of_the_engine(front: Front) -> None:
    response = await front.ask(COMPLETIONS, completion(PLAIN, max_tokens=MAX_MODEL_LEN, stream=True))
    assert (response.status_code, response.json()["error"]["message"]) == (
        400,
        "This model's maximum context length is exceeded.",
    )


async def test_clients_neither_control_nor_see_handoffs(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    forged = {"handoff_id": "mine", "decode_address": "10.6.6.6:1", "decode_instance": "evil"}
    for more in ({}, {"presence_penalty": 1.0}):
        body = completion(PLAIN, **more)
        response = await front.ask(COMPLETIONS, body | {"kv_transfer_params": {"lmkv": forged}})
        assert response.json()["kv_transfer_params"] is None
    assert "10.6.6.6" not in json.dumps(prefiller.bodies() + decoder.bodies())
    for word in ("mine", "evil"):
        assert word not in json.dumps(prefiller.bodies() + decoder.bodies())


async def test_headers_reach_both_engines(front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine) -> None:
    sent = {"authorization": "Bearer key", "x-request-id": "r-1", "traceparent": "00-1-2-01"}
    await front.ask(COMPLETIONS, completion(PLAIN), **sent)
    for engine in (prefiller, decoder):
        ((_, _, headers),) = engine.asked
        assert sent.items() <= headers.items()
        assert headers["host"] == f"127.0.0.1:{engine.port}"


async def test_without_an_instance_the_decode_engine_does_it_all(
    prefiller: ScriptedEngine, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    decoder = await make_engine()
    front = await make_proxy([prefiller], [decoder])
    body = completion(PLAIN)
    assert answer_of(await front.ask(COMPLETIONS, body)) == await alone(decoder, COMPLETIONS, body)
    assert prefiller.bodies() == []
    await front.counts("lmkv_proxy_requests_total", 1, strategy="alone", outcome="ok")


async def test_handoffs_are_vouched_for_with_what_the_fleet_shares(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy
) -> None:
    front = await make_proxy([prefiller], [decoder], cluster_secret="of the fleet", auth_token="of-the-proxy")
    await front.ask(COMPLETIONS, completion(PLAIN))
    await front.ask(COMPLETIONS, completion(ENDS_AT_ONCE))
    await until(lambda: len(decoder.ended) == 1)
    engine = HandoffKeys("of the fleet", NO_TOKEN)
    for body in prefiller.bodies() + decoder.bodies() + [{"kv_transfer_params": {"lmkv": decoder.ended[0]}}]:
        said = body["kv_transfer_params"]["lmkv"]
        proof = said["handoff_id"], said["decode_instance"], said["expire_time"], said["mac"]
        assert engine.refusal(*proof) == ""


# ---- handoffs that no decode request will load


@pytest.mark.parametrize(
    "body",
    [
        completion(PLAIN, max_tokens=1),
        chat("hello", max_tokens=1),
        completion(PLAIN, max_tokens=4, use_beam_search=True, n=2),
        completion(PLAIN, max_tokens=4, echo=True, logprobs=0),
        completion(PLAIN, max_tokens=4, prompt_logprobs=0),
        completion([PLAIN, "another"], max_tokens=4),
    ],
)
async def test_what_loads_no_handoff_begins_none(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, body: dict[str, Any]
) -> None:
    assert (await front.ask(CHAT if "messages" in body else COMPLETIONS, body)).status_code == 200
    assert "lmkv" not in json.dumps(prefiller.bodies() + decoder.bodies())
    assert not decoder.ended
    is_one_token = body["max_tokens"] == 1
    assert [len(engine.asked) for engine in (prefiller, decoder)] == [is_one_token, not is_one_token]


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
async def test_a_handoff_is_ended_when_the_first_token_is_the_last(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, stream: dict[str, Any]
) -> None:
    await front.ask(COMPLETIONS, completion(ENDS_AT_ONCE, **stream), authorization="Bearer key")
    await until(lambda: len(decoder.ended) == 1)
    (asked,) = prefiller.bodies()
    named = asked["kv_transfer_params"]["lmkv"]["handoff_id"]
    assert decoder.ended == [{"handoff_id": named, "decode_instance": "d-1", "prompt_token_count": 0}]
    assert decoder.bodies() == []


async def test_a_handoff_that_is_loaded_is_not_ended(front: Front, decoder: ScriptedEngine) -> None:
    for more in ({}, {"stream": True}, {"presence_penalty": 1.0}, {"presence_penalty": 1.0, "stream": True}):
        await front.ask(COMPLETIONS, completion(PLAIN, **more))
    assert len(decoder.bodies()) == 4
    assert not decoder.ended


async def test_the_handoff_of_a_prefill_that_fails_is_ended(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine
) -> None:
    prefiller.refusals.append(500)
    await front.ask(COMPLETIONS, completion(PLAIN))
    named = prefiller.bodies()[0]["kv_transfer_params"]["lmkv"]["handoff_id"]
    await until(lambda: [one["handoff_id"] for one in decoder.ended] == [named])
    assert "lmkv" not in json.dumps(decoder.bodies())


@pytest.mark.parametrize("waits_at", ["prefill", "decode"])
async def test_the_handoff_of_a_client_that_leaves_is_ended(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, waits_at: str
) -> None:
    held_back = prefiller if waits_at == "prefill" else decoder
    held_back.going.clear()
    asking = asyncio.create_task(front.ask(COMPLETIONS, completion(PLAIN)))
    await until(lambda: held_back.waiting_count == 1)
    asking.cancel()
    await until(lambda: held_back.cut_count == 1)
    decoder.going.set()  # it answers what it is asked next
    named = prefiller.bodies()[0]["kv_transfer_params"]["lmkv"]["handoff_id"]
    await until(lambda: [one["handoff_id"] for one in decoder.ended] == [named])


async def test_a_handoff_that_the_prefill_refuses_is_not_named_to_the_decode(
    front: Front, prefiller: ScriptedEngine, decoder: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert prefiller.handoff_params is not None
    prefiller.handoff_params["handoff_refused"] = "no proxy of this fleet has vouched for it"
    for more in ({}, {"presence_penalty": 1.0}):
        for _ in range(2):
            body = completion(PLAIN, **more)
            assert answer_of(await front.ask(COMPLETIONS, body)) == await alone(decoder, COMPLETIONS, body)
    assert len(decoder.bodies()) == 4
    assert "lmkv" not in json.dumps(decoder.bodies())
    assert not decoder.ended
    assert caplog.text.count("rejects handoffs: no proxy of this fleet") == 1
