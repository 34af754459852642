"""The seam between two engines, with the detokenizer that vLLM uses, and in the shapes that vLLM has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmkv_server.proxy.openai import CHAT, COMPLETIONS, data_of
from lmkv_server.proxy.pd.joiner import CannotContinue, ResponseJoiner
from lmkv_server.proxy.pd.parameters import decode_body, prefill_body
from tests.server.proxy.scripted_engine import MODEL

COMPLETION = {"model": MODEL, "prompt": "p", "max_tokens": 9, "temperature": 0}
CONVERSATION = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


def bytes_tokenizer() -> Tokenizer:
    """One token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = bytes_tokenizer()


def texts(prompt: list[int], tokens: list[int]) -> list[str]:
    """The text of each token, as vLLM's detokenizer makes it."""
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return [stream.step(TOKENIZER, token) or "" for token in tokens]


def first_answer(path: str, prompt: list[int], token: int, text: str | None) -> dict[str, Any]:
    """The response of a prefill engine."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": [token]}
    answer: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": MODEL, "choices": [choice]}
    if path == CHAT:
        choice["message"] = {"role": "assistant", "content": text}
        return answer | {"prompt_token_ids": prompt}
    return answer | {"choices": [choice | {"text": text, "prompt_token_ids": prompt}]}


@given(asked=st.text("aé漢🎉", min_size=1, max_size=5), said=st.text("aé漢🎉", min_size=1, max_size=6))
def test_where_it_is_seamless_no_text_is_lost_or_doubled(asked: str, said: str) -> None:
    prompt, tokens = TOKENIZER.encode(asked).ids, TOKENIZER.encode(said).ids
    (first,) = texts(prompt, tokens[:1])
    joiner = ResponseJoiner(COMPLETIONS, COMPLETION, first_answer(COMPLETIONS, prompt, tokens[0], first))
    rest = "".join(texts([*prompt, *tokens[:1]], tokens[1:]))
    assert joiner.can_continue == (first + rest == said), "it continues exactly where that is correct"


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(said=st.text("aé漢🎉", min_size=2, max_size=6), cut=st.integers(0, 20))
def test_wherever_a_decode_engine_dies_the_next_one_continues_at_a_complete_character(said: str, cut: int) -> None:
    prompt, tokens = TOKENIZER.encode("ask").ids, TOKENIZER.encode(said).ids
    spoken = texts(prompt, tokens)
    assume(spoken[0])
    joiner = ResponseJoiner(COMPLETIONS, COMPLETION, first_answer(COMPLETIONS, prompt, tokens[0], spoken[0]))
    shown = spoken[0]
    for token, text in list(zip(tokens, spoken, strict=True))[1 : 1 + cut]:
        chunk = {"choices": [{"index": 0, "text": text, "finish_reason": None, "token_ids": [token]}]}
        shown += json.loads(data_of(joiner.rewrite(chunk)))["choices"][0]["text"]
    joiner.restart()
    taken = joiner.delivered
    assert taken == tokens[: len(taken)]
    assert shown + "".join(texts([*prompt, *taken], tokens[len(taken) :])) == said


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # a first token often has no whole character
@given(said=st.text("aé漢🎉", min_size=2, max_size=6), cuts=st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_after_any_number_of_decode_engines_each_token_was_taken_once(said: str, cuts: list[int]) -> None:
    prompt, tokens = TOKENIZER.encode("ask").ids, TOKENIZER.encode(said).ids
    (first,) = texts(prompt, tokens[:1])
    assume(first)
    joiner = ResponseJoiner(COMPLETIONS, COMPLETION, first_answer(COMPLETIONS, prompt, tokens[0], first))
    for cut in (*cuts, len(tokens)):  # the last engine says all that is left
        joiner.restart()
        begin = len(joiner.delivered)
        rest = zip(tokens[begin:], texts([*prompt, *tokens[:begin]], tokens[begin:]), strict=True)
        for token, text in list(rest)[:cut]:
            joiner.rewrite({"choices": [{"index": 0, "text": text, "finish_reason": None, "token_ids": [token]}]})
    assert joiner.delivered == tokens


def test_an_engine_that_did_not_continue_after_the_tokens_is_detected() -> None:
    joiner = ResponseJoiner(COMPLETIONS, COMPLETION, first_answer(COMPLETIONS, [1, 2], 3, "x"))
    choice = {"index": 0, "text": "y", "finish_reason": None, "token_ids": [4], "prompt_token_ids": [1, 2]}
    with pytest.raises(CannotContinue):
        joiner.rewrite({"choices": [choice]})
    with pytest.raises(CannotContinue):
        joiner.merge({"choices": [choice], "usage": {"completion_tokens": 1}})


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"token_ids": None}]}, {"choices": None}])
def test_an_answer_without_tokens_cannot_be_continued(answer: dict[str, Any]) -> None:
    for path in (COMPLETIONS, CHAT):
        with pytest.raises(CannotContinue):
            ResponseJoiner(path, COMPLETION, answer)


@pytest.mark.timeout(600)  # vLLM takes long to import
def test_vllm_accepts_the_requests_of_engines_and_the_responses_of_clients() -> None:
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    handoff = {"handoff_id": "r", "decode_instance": "d-1"}
    shapes = (
        (COMPLETIONS, COMPLETION, completion.CompletionRequest, completion.CompletionStreamResponse),
        (CHAT, CONVERSATION, chat.ChatCompletionRequest, chat.ChatCompletionStreamResponse),
    )
    for path, body, request_type, event_type in shapes:
        asked = body | {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2}
        first = request_type.model_validate(prefill_body(asked, handoff, with_tokens=True))
        understood = first.model_dump()
        expected = {"max_tokens": 1, "min_tokens": 1, "stream": False, "return_token_ids": True}
        assert expected.items() <= understood.items()
        assert understood["kv_transfer_params"] == {"lmkv": handoff}
        rest = request_type.model_validate(decode_body(asked, path, [1, 2], [3], {"handoff_id": "r"}))
        assert {"max_tokens": 8, "min_tokens": 1, "return_token_ids": True}.items() <= rest.model_dump().items()
        assert not (unknown := set(rest.model_extra or {}) | set(first.model_extra or {})), unknown
        joiner = ResponseJoiner(path, asked | {"max_tokens": 1}, first_answer(path, [1, 2], 3, "x"))
        for event in [*joiner.first_events(), *joiner.last_events()[:-1]]:
            parsed = json.loads(data_of(event))
            assert not event_type.model_validate(parsed).model_extra
