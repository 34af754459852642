"""Reads token ids and fields of a body as a decoder of the whole body would."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmkv_server.http import json_text
from lmkv_server.http.json_text import JsonText, NotJson, encode
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lmkv_server.proxy.pd.parameters import needs_one_engine, repeat_reason
from lmkv_server.proxy.routing import prompt
from lmkv_server.proxy.routing.prompt import ArrivingPrompt, PromptRequest, read_prompt
from lmkv_server.proxy.upstream.tokenization import NotTokenizable, tokenize_body

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


LONG_IDS = list(range(0, 120_000, 7))
Found = tuple[dict[str, Any], list[int] | None] | None


def outcome(request: PromptRequest) -> Found:
    """What was read."""
    return dict(request.body), None if request.tokens is None else request.tokens.tolist()


def whole(body: bytes) -> Found:
    try:
        return outcome(read_prompt(COMPLETIONS, body))
    except NotJson:
        return None


def in_parts(parts: list[bytes]) -> Found:
    """What is read of parts. Their token ids must have been returned before, if they are said to be."""
    prompt = ArrivingPrompt()
    early = [prompt.add(part, is_last=at == len(parts) - 1) for at, part in enumerate(parts)]
    early.append(prompt.end())
    try:
        found = prompt.read(COMPLETIONS)
    except NotJson:
        return None
    if prompt.has_returned_tokens:
        assert found.tokens is not None
        assert np.concatenate(early).tolist() == found.tokens.tolist()
    return outcome(found)


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[begin:end] for begin, end in itertools.pairwise(places)]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of a few bytes exceed them."""
    monkeypatch.setattr(prompt, "MIN_TEXT_BYTES", 4)
    monkeypatch.setattr(prompt, "MAX_GAP_BYTES", 30)
    monkeypatch.setattr(prompt, "MAX_HEAD_BYTES", 60)


VALUES = st.recursive(
    st.integers(-2, 2**33) | st.text(max_size=3) | st.sampled_from(['"prompt": [1]', "[1, 2]", "x" * 70]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["prompt", "x"]), inner, max_size=2),
    max_leaves=6,
)
LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
NAMED = st.dictionaries(st.sampled_from(["model", "x", "user"]), VALUES, max_size=2)
BODIES = st.builds(
    lambda before, prompt, after, separators: json.dumps(
        {**before, **({} if prompt is None else {"prompt": prompt}), **after}, separators=separators
    ).encode(),
    NAMED,
    st.none() | VALUES | LISTS | st.lists(LISTS, max_size=2),
    NAMED,
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t"), ("," + " " * 40, ":"), (",", ":" + " " * 90)]),
)
PIECES = st.lists(
    st.sampled_from(
        [
            b'{"prompt":[',
            b'"prompt"',
            b'"pr\\u006fmpt":[]',
            b'"prompt":[1,',
            b'"prompt": [[1 ,2],[3]]',
            b'{"model":"m","prompt":[1,2,3],"cache_salt":"s"}',
            b'"prompt":"text"',
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b" " * 50,
            b"1",
            b"23,",
            b"4.5",
            b"-6",
            b"null",
            b'"',
            b"\\",
            b"\xff",
        ]
    ),
    max_size=10,
).map(b"".join)


@settings(max_examples=500)
@given(BODIES | PIECES, st.lists(st.integers(0, 500), max_size=12))
@example(b'{"prompt": [1, 2, 3], "prompt": "text"}', [11, 15])
@example(b'{"prompt": [1, 2, 3], "pr\\u006fmpt": []}', [11, 15])
@example(b'{"x": {"prompt": [1, 2, 3]}, "prompt": []}', [20, 22])
@example(b'{"prompt": [1, 2, 3], "x": {"prompt": [4]}}', [13])
@example(b'{"prompt": [1, 2, 3,]}', [19])
@example(b'{"prompt": [1,, 2, 3]}', [14])
@example(b'{"prompt": [1,' + b" " * 100 + b"2]}", [50])
@example(b'{"prompt":[1,23]}', list(range(17)))
def test_however_a_body_is_split_it_is_read_as_the_whole(body: bytes, cuts: list[int]) -> None:
    assert in_parts(split(body, cuts)) == whole(body)


@settings(max_examples=50)
@given(BODIES)
def test_a_body_that_arrives_byte_by_byte(body: bytes) -> None:
    assert in_parts([body[at : at + 1] for at in range(len(body))]) == whole(body)


@pytest.mark.parametrize("prompt", [LONG_IDS, [LONG_IDS]])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_token_ids_are_returned_before_the_end(prompt: Any, separators: tuple[str, str]) -> None:
    fields = {"model": "m", "cache_salt": "s", "prompt": prompt, "user": "u"}
    body = json.dumps(fields, separators=separators).encode()
    arriving = ArrivingPrompt()
    parts = [body[begin : begin + 1000] for begin in range(0, len(body), 1000)]
    early = [arriving.add(part) for part in parts]
    assert sum(ids.size for ids in early) >= len(LONG_IDS) - 1
    before = PromptRequest(path="", body=arriving.fields)
    assert (before.model_name, before.cache_salt, before.user) == ("m", "s", "")
    early.append(arriving.end())
    assert np.concatenate(early).tolist() == LONG_IDS
    assert outcome(arriving.read(COMPLETIONS)) == ({**fields, "prompt": []}, LONG_IDS)
    assert arriving.has_returned_tokens


@pytest.mark.parametrize(
    "body", [b'{"x": {"prompt": [1, 2, 3', b'{"messages": [], "prompt": "text"', b'["prompt": [1, 2, 3', b"", b"{}"]
)
def test_fields_before_a_list_that_is_not_the_prompt_are_unknown(body: bytes) -> None:
    arriving = ArrivingPrompt()
    arriving.add(body)
    assert arriving.fields == {}


def test_a_body_that_comes_at_once_is_not_read_in_advance() -> None:
    arriving = ArrivingPrompt()
    body = json.dumps({"prompt": LONG_IDS}).encode()
    assert not arriving.add(body, is_last=True).size
    assert not arriving.end().size
    assert outcome(arriving.read(COMPLETIONS)) == whole(body)
    assert not arriving.has_returned_tokens


PROMPTS = st.text(max_size=9) | LISTS | st.lists(st.text(max_size=9) | LISTS, max_size=3) | st.just([1, "two"])


@settings(deadline=None)
@given(
    st.sampled_from([COMPLETIONS, CHAT, RESPONSES, MESSAGES]),
    PROMPTS,
    st.dictionaries(st.sampled_from(["user", "cache_salt", "tools", "kv_transfer_params", "suffix", "echo"]), VALUES),
    st.booleans(),
)
def test_a_body_whose_long_values_are_not_decoded_is_routed_as_the_whole(
    path: str, prompt: Any, others: dict[str, Any], reads_prompt: bool
) -> None:
    body = {"model": "m", "prompt": prompt, **others}
    if path != COMPLETIONS:
        body = {"model": "m", "messages": [{"role": "user", "content": str(prompt)}], "input": prompt, **others}
    content = json.dumps(body).encode()
    scanned = JsonText()
    scanned.add(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "SCANNED_FROM_BYTES", 0)
        patch.setattr(json_text, "LONG_BYTES", 6)  # flags and empty values are not long
        found = read_prompt(path, content, scanned, reads_prompt=reads_prompt)
    expected = read_prompt(path, content)
    for name in ("model_name", "cache_salt", "user", "has_text", "token_count"):
        assert getattr(found, name) == getattr(expected, name), name
    assert needs_one_engine(found.body) == needs_one_engine(expected.body)
    if reads_prompt:
        assert repeat_reason(found.body, path) == repeat_reason(expected.body, path)
        assert asked(found) == asked(expected)


def asked(request: PromptRequest) -> Any:
    """The request to `/tokenize`."""
    try:
        pieces = encode(tokenize_body(request.path, request.body, request.text_prompt))
    except NotTokenizable as error:
        return str(error)
    return json.loads(pieces if isinstance(pieces, bytes) else b"".join(pieces))
