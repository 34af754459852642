"""Reads token ids and fields of a body as a decoder of the whole body would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmkv_server.proxy.openai import CHAT, COMPLETIONS
from lmkv_server.proxy.routing.prompt import NotJson, read_prompt

IDS = [1, 22, 128_255, 0]


@pytest.mark.parametrize("prompt", [IDS, [IDS], [7]])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
def test_token_ids_are_lifted_out(prompt: Any, separators: tuple[str, str]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "user": "u", "cache_salt": "s"}, separators=separators)
    found = read_prompt(COMPLETIONS, body.encode())
    assert found.tokens is not None
    assert found.tokens.tolist() == (IDS if len(str(prompt)) > 5 else [7])
    assert (found.model_name, found.user, found.cache_salt) == ("m", "u", "s")
    assert not found.has_text


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1, 2], [3]]},
        {"prompt": [1, -2]},
        {"prompt": [1, "two"]},
        {"prompt": []},
        {"metadata": {"prompt": [1, 2]}},
        {"prompt": "text", "metadata": {"prompt": [1, 2]}},
        {"messages": [{"role": "user", "content": '"prompt": [1, 2]'}]},
        {"prompt": None, "user": 3, "model": ["m"]},
    ],
)
def test_other_prompts_are_not_taken_for_tokens(body: dict[str, Any]) -> None:
    found = read_prompt(COMPLETIONS, json.dumps(body).encode())
    assert found.tokens is None
    assert found.body == body
    assert (found.model_name, found.user) == ("", "")


def test_texts_and_chats() -> None:
    assert read_prompt(COMPLETIONS, b'{"prompt": "text"}').text_prompt == "text"
    assert read_prompt(COMPLETIONS, b'{"prompt": ["text"]}').text_prompt == "text"
    assert not read_prompt(COMPLETIONS, b'{"prompt": ["one", "two"]}').has_text
    assert not read_prompt(COMPLETIONS, b'{"messages": []}').has_text
    assert read_prompt(CHAT, b'{"messages": []}').has_text
    assert not read_prompt(CHAT, b'{"messages": "hello"}').has_text
    assert not read_prompt("/v1/embeddings", b'{"prompt": "text"}').has_text


@pytest.mark.parametrize("body", [b"", b"[]", b"text", b'{"prompt": [1, 2', b'{"prompt": [1]', b"\xff", b"[" * 100_000])
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotJson):
        read_prompt(COMPLETIONS, body)


@example({"prompt": [], "model": {"prompt": [0]}})
@example({"prompt": [1], "x": {"prompt": []}})
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "model", "x"]),
        st.recursive(
            st.integers(-2, 300) | st.text(max_size=3) | st.just('"prompt": [1]'),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("prompt"), inner, max_size=1),
            max_leaves=6,
        ),
    )
)
def test_whatever_the_body_it_is_read_as_a_whole_would_be(body: dict[str, Any]) -> None:
    found = read_prompt(COMPLETIONS, json.dumps(body).encode())
    if found.tokens is None:
        assert found.body == body
    else:
        prompt = body["prompt"]
        assert found.tokens.tolist() == (prompt[0] if isinstance(prompt[0], list) else prompt)
        assert {**found.body, "prompt": prompt} == body
