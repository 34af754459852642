"""The strategy of a request, and the request to each engine."""

from __future__ import annotations

from typing import Any

import pytest

from lmkv_server.proxy.openai import CHAT, COMPLETIONS, Json
from lmkv_server.proxy.pd.parameters import (
    OTHER,
    REASONS,
    decode_body,
    needs_one_engine,
    prefill_body,
    repeat_reason,
    with_handoff,
    without_handoff,
)

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "p", "max_tokens": 9}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "stop": [], "presence_penalty": 0.0},
        {"repetition_penalty": 1.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "stop_token_ids": [3]},
        {"seed": 1, "temperature": 0},
        {"seed": None, "response_format": {"type": "text"}, "kv_transfer_params": {}},
        {"user": "u", "cache_salt": "s", "min_tokens": 3},
        {"frequency_penalty": 0, "length_penalty": 1, "n": 1, "top_logprobs": 0, "tools": [], "bad_words": []},
        {"tool_choice": "auto", "stop": "", "suffix": "", "spaces_between_special_tokens": True, "logprobs": False},
    ],
)
def test_it_continues(more: dict[str, Any]) -> None:
    assert repeat_reason(COMPLETION | more, COMPLETIONS) == ""
    assert repeat_reason(MESSAGES | more, CHAT) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("logprobs", 0),
        ("logprobs", 5),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("prompt_logprobs", 1),
        ("echo", True),
        ("stop", "x"),
        ("stop", ["x"]),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("seed", 1),
        ("suffix", "x"),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("spaces_between_special_tokens", False),
        ("max_tokens", 0),
        ("max_tokens", "9"),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("stream_options", {"include_usage": True, "continuous_usage_stats": True}),
        ("thinking_token_budget", 5),
    ],
)
def test_it_repeats_and_the_reason_has_a_name(name: str, value: object) -> None:
    assert repeat_reason({**COMPLETION, name: value}, COMPLETIONS) == name
    assert name in REASONS


def test_what_is_not_known_repeats() -> None:
    assert repeat_reason(COMPLETION | {"from_the_future": 1}, COMPLETIONS) == "from_the_future"
    assert repeat_reason(COMPLETION | {"": 1}, COMPLETIONS) == OTHER, "a parameter may have an empty name"
    greedy = {"temperature": 0, "seed": 1}
    assert repeat_reason(COMPLETION | greedy | {"from_the_future": 1}, COMPLETIONS) == "from_the_future"


def test_a_completion_without_limit_has_its_default_and_a_chat_has_none() -> None:
    unlimited: dict[str, Any] = {"model": "m", "prompt": "p"}
    assert repeat_reason(unlimited, COMPLETIONS) == ""
    assert decode_body(unlimited, COMPLETIONS, [1], [2], None)["max_tokens"] == 15
    assert repeat_reason(unlimited | {"max_tokens": None}, COMPLETIONS) == "max_tokens"
    assert repeat_reason(MESSAGES, CHAT) == ""
    assert "max_tokens" not in decode_body(MESSAGES, CHAT, [1], [2], None)


@pytest.mark.parametrize("content", [[IMAGE], [{"type": "text", "text": "a"}, IMAGE], ["text"]])
def test_what_is_not_in_the_tokens_repeats(content: list[Any]) -> None:
    assert repeat_reason({"messages": [{"role": "user", "content": content}]}, CHAT) == "messages"


def test_parts_of_text_continue() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant"}]}
    assert repeat_reason(body, CHAT) == ""


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [1, 2]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": []}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt_embeds": "x"}, True),
        ({"prompt": "a", "use_beam_search": True}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "prompt_logprobs": None}, False),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "echo": True, "logprobs": False}, False),
        ({"prompt": "a", "echo": True, "logprobs": True}, True),
        ({"prompt": "a", "echo": True, "logprobs": 0}, True),
        ({"prompt": "a", "echo": False, "logprobs": 5}, False),
        (MESSAGES, False),
    ],
)
def test_several_prompts_are_for_one_engine(body: dict[str, Any], alone: bool) -> None:
    assert needs_one_engine(body) == alone


def test_the_prefill_request_has_one_token_and_no_expensive_parameter() -> None:
    body = COMPLETION | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "prompt_logprobs": 2,
        "min_tokens": 4,
        "max_completion_tokens": 8,
        "kv_transfer_params": {"other": 1},
    }
    assert prefill_body(body, {"handoff_id": "r"}, with_tokens=True) == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {"other": 1, "lmkv": {"handoff_id": "r"}},
    }
    assert "return_token_ids" not in prefill_body(body, {}, with_tokens=False)


def test_the_decode_request_has_the_remaining_tokens() -> None:
    body = COMPLETION | {"min_tokens": 4, "truncate_prompt_tokens": 3, "add_special_tokens": False, "top_p": 0.5}
    assert decode_body(body, COMPLETIONS, [1, 2], [3, 4, 5], {"handoff_id": "r"}) == {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 6,
        "min_tokens": 1,
        "top_p": 0.5,
        "return_token_ids": True,
        "kv_transfer_params": {"lmkv": {"handoff_id": "r"}},
    }


def test_hints_are_for_the_decode_and_no_reason_to_repeat() -> None:
    hints: Json = {"kv_hints": {"actions": []}}
    body = COMPLETION | {"kv_transfer_params": {"lmkv": hints}}
    assert repeat_reason(body, COMPLETIONS) == ""
    assert repeat_reason(body | {"kv_transfer_params": {"lmkv": hints, "x": 1}}, COMPLETIONS) == "kv_transfer_params"
    prefill = prefill_body(body, {"handoff_id": "r"}, with_tokens=True)
    assert prefill["kv_transfer_params"] == {"lmkv": {"handoff_id": "r"}}
    decode = decode_body(body, COMPLETIONS, [1], [2], {"handoff_id": "r"})
    assert decode["kv_transfer_params"] == {"lmkv": {"handoff_id": "r", **hints}}


def test_words_on_hand_overs_are_the_proxys_alone() -> None:
    assert without_handoff({"a": 1}) == {"a": 1}
    assert without_handoff({"kv_transfer_params": {"lmkv": {}, "x": 1}}) == {"kv_transfer_params": {"x": 1}}
    assert without_handoff({"kv_transfer_params": {"lmkv": {}}}) == {"kv_transfer_params": None}
    assert without_handoff({"kv_transfer_params": "odd"}) == {"kv_transfer_params": "odd"}
    hinted = {"kv_transfer_params": {"lmkv": {"handoff_id": "r", "kv_hints": {"actions": []}}}}
    assert without_handoff(hinted) == {"kv_transfer_params": {"lmkv": {"kv_hints": {"actions": []}}}}
    assert without_handoff({"kv_transfer_params": {"lmkv": "kv_hints"}}) == {"kv_transfer_params": None}
    assert with_handoff({"a": 1}, None) == {"a": 1}


def test_a_limit_of_no_token_stays_one() -> None:
    body = {"messages": [], "max_tokens": 0, "max_completion_tokens": 4}
    made = decode_body(body, CHAT, [1], [2, 3], None)
    assert (made["max_tokens"], made["max_completion_tokens"]) == (0, 2)
