"""Responses of two engines as the client receives them: events, complete responses, usage and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from lmkv_server.proxy.openai import CHAT, COMPLETIONS, DONE, data_of
from lmkv_server.proxy.pd.joiner import CannotContinue, ResponseJoiner

PROMPT, FIRST = [1, 2], 3
HEAD = {"id": "cmpl-1", "created": 1, "model": "m"}
OTHER_HEAD = {"id": "cmpl-2", "created": 2, "model": "other"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
"""Of a decode engine: for it, the first token belongs to the prompt."""
JOINED_USAGE = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def choice_of(path: str, text: str | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    """The choice of a complete response."""
    said = {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
    return {"index": 0, "finish_reason": "length", "token_ids": tokens, **said, **more}


def joined(
    path: str = COMPLETIONS, body: Mapping[str, Any] | None = None, *, details: Any = None, **choice: Any
) -> ResponseJoiner:
    """A joiner that has the first token of a prefill engine: 3, whose text is `x`."""
    made = choice_of(path, "x", [FIRST], **choice)
    first: dict[str, Any] = {**HEAD, "system_fingerprint": "f", "choices": [made]}
    first["usage"] = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3, "prompt_tokens_details": details}
    (first if path == CHAT else made)["prompt_token_ids"] = PROMPT
    return ResponseJoiner(path, {"max_tokens": 9, **(body or {})}, first)


def event(text: str | None, *tokens: int, **more: Any) -> dict[str, Any]:
    """An event of a decode engine's completion."""
    return {
        **OTHER_HEAD,
        "choices": [{"index": 0, "text": text, "finish_reason": None, "token_ids": [*tokens], **more}],
    }


def parsed(one: bytes) -> Any:
    return json.loads(data_of(one))


def test_the_prompt_and_the_token_limit_must_fit_into_the_context() -> None:
    assert [joined().fits(limit) for limit in (0, 10, 11)] == [True, False, True]
    unlimited = joined(CHAT, {"max_tokens": None})
    assert [unlimited.fits(limit) for limit in (0, 2, 3)] == [True, False, True]


@pytest.mark.parametrize(("limit", "is_complete"), [(0, False), (2, True), (3, True), (4, False)])
def test_a_response_is_complete_at_the_end_of_the_context(limit: int, is_complete: bool) -> None:
    joiner = joined()
    joiner.complete_at(limit)
    assert joiner.is_complete is is_complete


def test_a_response_is_complete_if_the_first_token_ended_it() -> None:
    assert not joined().is_complete
    assert joined(finish_reason="stop").is_complete
    assert joined(body={"max_tokens": 1}).is_complete
    assert not joined(body={"max_tokens": 2}).is_complete


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_response_is_not_continued(reason: str) -> None:
    with pytest.raises(CannotContinue, match=rf"it aborted its response \({reason}\)"):
        joined(finish_reason=reason)
    with pytest.raises(CannotContinue, match="aborted"):
        joined().rewrite(event("y", 4, finish_reason=reason))
    with pytest.raises(CannotContinue, match="aborted"):
        joined().merge(
            {**OTHER_HEAD, "choices": [choice_of(COMPLETIONS, "y", [4], finish_reason=reason)], "usage": USAGE}
        )


@pytest.mark.parametrize(
    ("message", "can_continue"),
    [
        ({"content": "x"}, True),
        ({"content": ""}, False),
        ({"content": None}, False),
        ({"content": "x\N{REPLACEMENT CHARACTER}"}, False),
        ({"content": "x", "reasoning": "because"}, False),
        ({"content": "x", "tool_calls": [{}]}, False),
        ({"content": "x", "reasoning": None, "tool_calls": []}, True),
    ],
)
def test_what_a_parser_took_or_half_a_character_is_not_continued(message: dict[str, Any], can_continue: bool) -> None:
    assert joined(CHAT, message=message).can_continue is can_continue


def test_the_first_event_of_a_completion_has_the_first_token() -> None:
    (first,) = joined().first_events()
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None, "stop_reason": None}
    hidden = {"prompt_token_ids": None, "token_ids": None}
    assert parsed(first) == {**HEAD, "object": "text_completion", "choices": [choice | hidden]}
    (first,) = joined(body={"return_token_ids": True}).first_events()
    assert parsed(first)["choices"] == [choice | {"prompt_token_ids": PROMPT, "token_ids": [FIRST]}]


def test_the_first_events_of_a_chat_have_the_role_and_the_first_token() -> None:
    role, first = joined(CHAT).first_events()
    common = {**HEAD, "object": "chat.completion.chunk"}
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert parsed(role) == {**common, "choices": [choice], "prompt_token_ids": None, "prompt_text": None}
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    assert parsed(first) == {**common, "choices": [choice]}
    role, first = joined(CHAT, {"return_token_ids": True}).first_events()
    assert parsed(role)["prompt_token_ids"] == PROMPT
    assert parsed(first)["choices"][0]["token_ids"] == [FIRST]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_first_event_ends_a_response_of_one_token(path: str) -> None:
    *_, first = joined(path, finish_reason="stop", stop_reason=7).first_events()
    assert parsed(first)["choices"][0]["finish_reason"] == "stop"
    assert parsed(first)["choices"][0]["stop_reason"] == 7
    assert parsed(first)["system_fingerprint"] == "f"
    *_, first = joined(path, WITH_USAGE, finish_reason="stop").first_events()
    assert "system_fingerprint" not in parsed(first), "it is in the event with the usage"
    *_, first = joined(path, stop_reason=7).first_events()
    assert parsed(first)["choices"][0].get("stop_reason") is None


def test_events_of_a_decode_engine_have_the_first_engines_head_and_no_tokens() -> None:
    joiner = joined()
    rewritten = parsed(joiner.rewrite(event("y", 4, prompt_token_ids=[1, 2, 3])))
    choice = {"index": 0, "text": "y", "finish_reason": None, "token_ids": None, "prompt_token_ids": None}
    assert rewritten == {**HEAD, "choices": [choice]}
    assert joiner.delivered == [3, 4]
    assert not joiner.is_complete
    joiner.rewrite(event("z", 5, finish_reason="stop"))
    assert joiner.is_complete
    asked = joined(body={"return_token_ids": True})
    choice = parsed(asked.rewrite(event("y", 4, prompt_token_ids=[1, 2, 3])))["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([4], None)


def test_the_event_that_starts_a_decode_engines_chat_is_not_sent() -> None:
    joiner = joined(CHAT)

    def chat(**delta: Any) -> dict[str, Any]:
        return {**OTHER_HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "token_ids": [4]}]}

    assert joiner.rewrite(chat(role="assistant", content="")) == b""
    assert joiner.delivered == [3]
    assert parsed(joiner.rewrite(chat(content="y")))["choices"][0]["delta"] == {"content": "y"}
    assert parsed(joiner.rewrite(chat(role="assistant", content="z")))["id"] == "cmpl-1"
    assert joiner.delivered == [3, 4, 4]


def test_tokens_within_a_character_are_delivered_with_its_end() -> None:
    joiner = joined(body=WITH_USAGE)
    joiner.rewrite(event("", 4))
    joiner.rewrite(event("\N{REPLACEMENT CHARACTER}", 5))
    assert joiner.delivered == [3]
    assert parsed(joiner.last_events()[0])["usage"]["completion_tokens"] == 3
    joiner.rewrite(event("é", 6))
    assert joiner.delivered == [3, 4, 5, 6]
    joiner.rewrite(event("", 7))
    joiner.restart()
    assert joiner.delivered == [3, 4, 5, 6]
    assert parsed(joiner.last_events()[0])["usage"]["completion_tokens"] == 4


def test_the_usage_counts_each_token_once_and_is_sent_once() -> None:
    joiner = joined(body=WITH_USAGE)
    running = {**event("y", 4), "usage": dict(USAGE)}
    assert parsed(joiner.rewrite(running))["usage"] == JOINED_USAGE
    assert len(joiner.last_events()) == 2, "that was the usage up to this event"
    last = {**OTHER_HEAD, "choices": [], "usage": {**USAGE, "prompt_tokens_details": None}}
    assert parsed(joiner.rewrite(last))["usage"] == {**JOINED_USAGE, "prompt_tokens_details": None}
    assert joiner.last_events() == [DONE]


def test_the_usage_of_a_second_decode_engine_continues_that_of_the_first() -> None:
    joiner = joined()
    joiner.rewrite(event("y", 4))
    joiner.restart()
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    rewritten = parsed(joiner.rewrite({**OTHER_HEAD, "choices": [], "usage": usage}))
    assert rewritten["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize(
    ("prefill", "decode", "joined_details"),
    [
        ({"cached_tokens": 0}, {"cached_tokens": 2}, {"cached_tokens": 0}),
        ({"cached_tokens": 1}, {"cached_tokens": 2}, {"cached_tokens": 1}),
        ({"cached_tokens": 1}, {"cached_tokens": 0}, {"cached_tokens": 0}),  # it has lost the handoff
        ({"cached_tokens": 0, "created_cache_tokens": 2}, {"cached_tokens": 2, "created_cache_tokens": 0},
         {"cached_tokens": 0, "created_cache_tokens": 2}),
        ({"cached_tokens": 0, "multimodal_tokens": None}, {"cached_tokens": 2}, {"cached_tokens": 0}),
        ({"cached_tokens": 0}, {"cached_tokens": 2, "multimodal_tokens": None},
         {"cached_tokens": 0, "multimodal_tokens": None}),
        (None, {"cached_tokens": 2}, None),
        ({"cached_tokens": None}, {"cached_tokens": 2, "multimodal_tokens": {"image": 1}},
         {"cached_tokens": None, "multimodal_tokens": {"image": 1}}),
        ({"cached_tokens": 1}, None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_prompt_tokens_that_neither_engine_has_computed_are_cached(
    prefill: Any, decode: Any, joined_details: Any, streams: bool
) -> None:
    joiner = joined(details=prefill)
    joiner.restart()
    usage = {**USAGE, "prompt_tokens_details": decode}
    if streams:
        response = parsed(joiner.rewrite({**OTHER_HEAD, "choices": [], "usage": usage}))
    else:
        choice = choice_of(COMPLETIONS, "y", [4])
        response = json.loads(joiner.merge({**OTHER_HEAD, "choices": [choice], "usage": usage}))
    assert response["usage"] == {**JOINED_USAGE, "prompt_tokens_details": joined_details}


def test_a_stream_that_the_first_token_completes_has_the_hits_of_the_prefill_engine() -> None:
    alone = joined(body=WITH_USAGE, details={"cached_tokens": 1, "multimodal_tokens": None}, finish_reason="stop")
    assert parsed(alone.last_events()[0])["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert "prompt_tokens_details" not in parsed(joined(body=WITH_USAGE).last_events()[0])["usage"]
    continued = joined(body=WITH_USAGE, details={"cached_tokens": 1})
    continued.restart()
    assert "prompt_tokens_details" not in parsed(continued.last_events()[0])["usage"], "the decode engine's is unknown"


def test_a_stream_ends_with_the_usage_if_the_client_wants_it() -> None:
    assert joined().last_events() == [DONE]
    assert joined(body={"stream_options": None}).last_events() == [DONE]
    usage, done = joined(body=WITH_USAGE).last_events()
    assert done == DONE
    assert parsed(usage) == {
        **HEAD,
        "object": "text_completion",
        "choices": [],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        "system_fingerprint": "f",
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_response_of_one_token_is_that_of_the_prefill_engine(path: str) -> None:
    response = json.loads(joined(path, finish_reason="stop").merge(None))
    (choice,) = response["choices"]
    assert response["id"] == "cmpl-1"
    assert choice["token_ids"] is None
    assert (response if path == CHAT else choice)["prompt_token_ids"] is None
    response = json.loads(joined(path, {"return_token_ids": True}, finish_reason="stop").merge(None))
    (choice,) = response["choices"]
    assert choice["token_ids"] == [FIRST]
    assert (response if path == CHAT else choice)["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("text", "whole"), [("yz", "xyz"), ("", "x")])
def test_a_response_of_two_engines_is_one(path: str, text: str, whole: str) -> None:
    def continuation() -> dict[str, Any]:
        choice = choice_of(path, text, [4, 5])
        response: dict[str, Any] = {**OTHER_HEAD, "choices": [choice], "usage": dict(USAGE)}
        (response if path == CHAT else choice)["prompt_token_ids"] = [1, 2, 3]
        return response | {"kv_transfer_params": {"lmkv": {"handoff_id": "r"}}}

    response = json.loads(joined(path).merge(continuation()))
    (choice,) = response["choices"]
    assert {name: response[name] for name in HEAD} == HEAD
    assert response["usage"] == JOINED_USAGE
    assert response["kv_transfer_params"] is None
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == whole
    assert choice["token_ids"] is None
    assert (response if path == CHAT else choice)["prompt_token_ids"] is None
    response = json.loads(joined(path, {"return_token_ids": True}).merge(continuation()))
    (choice,) = response["choices"]
    assert choice["token_ids"] == [3, 4, 5]
    assert (response if path == CHAT else choice)["prompt_token_ids"] == PROMPT


def test_a_chat_that_continues_without_content_has_the_first_token() -> None:
    continuation = {**OTHER_HEAD, "choices": [choice_of(CHAT, None, [4])], "usage": dict(USAGE)}
    assert json.loads(joined(CHAT).merge(continuation))["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("lacks", ["usage", "choices"])
def test_a_continuation_without_a_field_is_refused(lacks: str) -> None:
    continuation = {**OTHER_HEAD, "choices": [choice_of(COMPLETIONS, "y", [4])], "usage": dict(USAGE)}
    del continuation[lacks]
    with pytest.raises(CannotContinue, match=f"its response has no '{lacks}'"):
        joined().merge(continuation)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_engine_that_did_not_continue_after_the_first_token_is_refused(path: str) -> None:
    def answer(tokens: list[int]) -> dict[str, Any]:
        choice = choice_of(path, "y", [4])
        response: dict[str, Any] = {**OTHER_HEAD, "choices": [choice], "usage": dict(USAGE)}
        (response if path == CHAT else choice)["prompt_token_ids"] = tokens
        return response

    for tokens in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(CannotContinue, match="did not continue after the first token"):
            joined(path).rewrite(answer(tokens))
        with pytest.raises(CannotContinue, match="did not continue after the first token"):
            joined(path).merge(answer(tokens))
    assert joined(path).rewrite(answer([1, 2, 3]))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": None},
        {**HEAD, "prompt_token_ids": PROMPT, "choices": [{"token_ids": None}]},
        {**HEAD, "prompt_token_ids": PROMPT, "choices": [{"token_ids": [3], "finish_reason": "stop"}]},
    ],
)
def test_a_first_answer_that_lacks_a_field_is_refused(path: str, answer: dict[str, Any]) -> None:
    with pytest.raises(CannotContinue, match="its response has no"):
        ResponseJoiner(path, {}, answer)
