"""Every field of vLLM's requests is part of what the proxy looks up, or changes no token of the prompt for a reason.

The tables have the fields of all supported versions of vLLM. A field that a new version adds fails the test until it is
decided what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lmkv_server.proxy.upstream.tokenization import FOR_CHAT, FOR_COMPLETION, FOR_TEMPLATE
from tests.engines.test_tokenization import CHATS, COMPLETED, MESSAGED, PLAIN, RESPONDED

TOKENS = "tokens: "
"""Begins the text of a field that changes the tokens of a prompt: how the proxy follows."""
SAMPLED = "of sampling"
ANSWER = "the form of the answer"
NAME = "a name"
RENDERED = "of answers of /render"
CACHE = "of caches; the salt is looked up apart"
MEDIA = TOKENS + "of media, which /tokenize reads as well; a lookup ends before the first"

COMMON = {
    "model": TOKENS + "passed on: an adapter may have a tokenizer of its own",
    **dict.fromkeys(
        (
            *("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "n", "presence_penalty", "seed", "stop"),
            *("temperature", "top_p", "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking"),
            *("length_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"),
            *("logprob_token_ids", "structured_outputs", "repetition_detection", "thinking_token_budget"),
            *("prompt_logprobs", "vllm_xargs"),
        ),
        SAMPLED,
    ),
    **dict.fromkeys(
        (
            *("stream", "stream_options", "stream_interval", "include_stop_str_in_output", "skip_special_tokens"),
            *("spaces_between_special_tokens", "return_tokens_as_token_ids", "return_token_ids", "include_reasoning"),
            *("return_prompt_text", "routed_experts_prompt_start"),
        ),
        ANSWER,
    ),
    **dict.fromkeys(("user", "request_id", "session_id", "metadata"), NAME),
    **dict.fromkeys(("mm_payload", "return_mm_kwargs", "return_token_offsets"), RENDERED),
    **dict.fromkeys(("cache_salt", "ec_transfer_params"), CACHE),
    "priority": "an order",
}
TRUNCATED = {
    "truncate_prompt_tokens": TOKENS + "Truncation",
    "truncation_side": TOKENS + "Truncation",
    "max_tokens": TOKENS + "decides what a truncation to the context leaves",
}
COMPLETION: Mapping[str, str] = {
    **COMMON,
    **TRUNCATED,
    "prompt": TOKENS + "passed on, or looked up itself",
    "add_special_tokens": TOKENS + "passed on",
    "prompt_embeds": TOKENS + "not looked up",
    "kv_transfer_params": "completions have no tokens in it",
    "echo": ANSWER,
    "suffix": "refused by the engine",
    "response_format": SAMPLED,
}
CONVERSATION: Mapping[str, str] = {
    **COMMON,
    **TRUNCATED,
    "messages": TOKENS + "passed on, with the current names of their fields",
    "max_completion_tokens": TOKENS + "decides what a truncation to the context leaves",
    **dict.fromkeys(
        (
            *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template"),
            *("chat_template_kwargs", "tools"),
        ),
        TOKENS + "passed on",
    ),
    **dict.fromkeys(("documents", "reasoning_effort"), TOKENS + "passed on in chat_template_kwargs"),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), MEDIA),
    "kv_transfer_params": TOKENS + "its prompt_token_ids are looked up",
    "tool_choice": "changes no template but with --exclude-tools-when-tool-choice-none, and that of Kimi K3",
    "response_format": "changes no template but that of Kimi K3",
    "parallel_tool_calls": "of the answer",
    "echo": ANSWER,
}
RESPONSE: Mapping[str, str] = {
    **COMMON,
    "input": TOKENS + "converted as vLLM does",
    "instructions": TOKENS + "converted as vLLM does",
    "tools": TOKENS + "converted as vLLM does; those of the engine are not looked up",
    "reasoning": TOKENS + "its effort is passed on in chat_template_kwargs",
    "chat_template_kwargs": TOKENS + "passed on",
    "truncation": TOKENS + "Truncation",
    "max_output_tokens": TOKENS + "decides what a truncation to the context leaves",
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), MEDIA),
    **dict.fromkeys(("previous_response_id", "previous_input_messages"), TOKENS + "not looked up"),
    "prompt": TOKENS + "not looked up; refused by the engine",
    "tool_choice": CONVERSATION["tool_choice"],
    "text": SAMPLED,
    "kv_transfer_params": "its prompt_token_ids are for engines of P/D",
    **dict.fromkeys(("include", "enable_response_messages"), ANSWER),
    **dict.fromkeys(("background", "store", "service_tier"), "when the answer is made, and whether it is kept"),
    **dict.fromkeys(("parallel_tool_calls", "max_tool_calls"), "of the answer"),
    "prompt_cache_key": "ignored by vLLM",
}
MESSAGE: Mapping[str, str] = {
    **COMMON,
    **dict.fromkeys(("messages", "system", "tools"), TOKENS + "converted as vLLM does"),
    "output_config": TOKENS + "its effort is passed on in chat_template_kwargs",
    "thinking": TOKENS + "not looked up if it is disabled",
    "chat_template_kwargs": TOKENS + "passed on",
    "tool_choice": CONVERSATION["tool_choice"],
    "max_tokens": "of the answer: prompts are not truncated",
    "stop_sequences": SAMPLED,
    "kv_transfer_params": "its prompt_token_ids are for engines of P/D",
}
REQUESTS: Mapping[str, tuple[str, str, Mapping[str, str], Mapping[str, dict[str, Any]]]] = {
    COMPLETIONS: ("openai.completion.protocol", "CompletionRequest", COMPLETION, COMPLETED),
    CHAT: ("openai.chat_completion.protocol", "ChatCompletionRequest", CONVERSATION, CHATS),
    RESPONSES: ("openai.responses.protocol", "ResponsesRequest", RESPONSE, RESPONDED),
    MESSAGES: ("anthropic.protocol", "AnthropicMessagesRequest", MESSAGE, MESSAGED),
}
WITHOUT_CASE = {"media_io_kwargs", "mm_processor_kwargs"}
"""Of media, which the model of the cases lacks."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, which vLLM imports
@pytest.mark.timeout(600)  # vLLM takes long to import
@pytest.mark.parametrize("path", REQUESTS)
def test_it_is_decided_of_each_field_whether_it_changes_tokens(path: str) -> None:
    module, name, table, _ = REQUESTS[path]
    pytest.importorskip("vllm")
    fields = getattr(import_module(f"vllm.entrypoints.{module}"), name).model_fields.keys()
    assert "model" in fields
    unknown = sorted(fields - table.keys())
    assert not unknown, f"{name}: decide of {unknown} whether they change tokens: follow them in tokenization.py"


@pytest.mark.parametrize("path", REQUESTS)
def test_each_field_that_changes_tokens_has_a_case_with_a_real_engine(path: str) -> None:
    *_, table, cases = REQUESTS[path]
    followed = {name for name, how in table.items() if how.startswith(TOKENS) and "not looked up" not in how}
    tried = PLAIN[path].keys() | {"model"} | {name for case in cases.values() for name in case}
    assert followed - tried - WITHOUT_CASE == set()


def test_the_tables_are_those_of_the_code() -> None:
    def passed_on(table: Mapping[str, str]) -> set[str]:
        return {name for name, how in table.items() if "passed on" in how or how == MEDIA}

    assert passed_on(COMPLETION) == {*FOR_COMPLETION, "prompt"}
    assert passed_on(CONVERSATION) == {*FOR_CHAT, *FOR_TEMPLATE}
