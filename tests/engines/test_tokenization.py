"""The proxy's lookup of a prompt has the tokens that the engine computes, whatever field of a request changes them.

vLLM's own prefix cache is the witness: under a salt that no other request has, it holds the blocks of these tokens.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lmkv.rpc.endpoints import PLAINTEXT
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.model import BOS_TOKEN_ID, EOS_TOKEN_ID
from lmkv_server.proxy.engine import BOTH, Engine, EngineModel
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lmkv_server.proxy.routing import lookup
from lmkv_server.proxy.upstream.client import Upstream, UpstreamClient, open_session
from lmkv_server.proxy.upstream.tokenization import NotTokenizable

BLOCK_TOKENS = 32
CONTEXT_TOKENS = 2048
TEMPLATE = """\
{% if reasoning_effort %}effort: {{ reasoning_effort }}
{% endif %}{% if enable_thinking is defined %}thinks: {{ enable_thinking }}
{% endif %}{% if extra is defined %}extra: {{ extra }}
{% endif %}{% for document in documents or [] %}{{ document.title }}: {{ document.text }}
{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}{{ " " ~ message.name if message.name }}: \
{{ message.reasoning or "" }}{{ message.content or "" }}{{ message.tool_call_id or "" }}\
{% for call in message.tool_calls or [] %}{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}\
{% endfor %}{{ "\n" if not loop.last or not \
continue_final_message }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""Shows everything that a chat template can see."""

USER = {"role": "user", "content": "Write about the following matter, please. " * 4}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
ASKED = [
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
]
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "model": {"model": "nickname"},
    "documents": {"documents": [{"title": "a", "text": "Once upon a time."}]},
    "no documents": {"documents": []},
    "documents again": {
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"documents": [{"title": "c", "text": "d"}]},
    },
    **{f"effort {effort}": {"reasoning_effort": effort} for effort in ("none", "minimal", "low", "high", "max", None)},
    "effort and thinking": {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    "effort twice": {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": False, "extra": {"a": [1, None, "é"]}}},
    "template": {"chat_template": "X{% for message in messages %}{{ message.content }}{% endfor %}"},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "none"},
    "strict tools": {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}], "tool_choice": "none"},
    "no generation prompt": {"add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It was"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "special tokens": {"add_special_tokens": True},
    "old name of reasoning": {"messages": ASKED},
    "parts": {"messages": [{"role": "user", "name": "me", "content": [{"type": "text", "text": "One. "}] * 2}]},
    "echo": {"echo": True},
    "tokens beside it": {"kv_transfer_params": {"prompt_token_ids": list(range(300, 340))}},
    "a prompt beside it": {"prompt": [5, 6, 7]},
    "cut": {"truncate_prompt_tokens": 50},
    "cut left": {"truncate_prompt_tokens": 50, "truncation_side": "left"},
    "cut right": {"truncate_prompt_tokens": 50, "truncation_side": "right"},
    "cut with special tokens": {"truncate_prompt_tokens": 50, "add_special_tokens": True},
    "cut left with special tokens": {
        "truncate_prompt_tokens": 50,
        "truncation_side": "left",
        "add_special_tokens": True,
    },
    "not long enough to be cut": {"truncate_prompt_tokens": 1000},
    "cut to the context": {"messages": [USER | {"content": "long " * 500}], "truncate_prompt_tokens": -1},
    "cut to the context of an answer": {
        "messages": [USER | {"content": "long " * 500}],
        "truncate_prompt_tokens": -1,
        "max_tokens": None,
        "max_completion_tokens": 1,
    },
}
COMPLETED: dict[str, dict[str, Any]] = {
    "plain": {},
    "one in a list": {"prompt": ["Write about it. " * 5]},
    "no special tokens": {"add_special_tokens": False},
    "ids": {"prompt": list(range(300, 400))},
    "ids in a list": {"prompt": [list(range(300, 400))]},
    **{
        f"cut {what} {side}": {"prompt": prompt, "truncate_prompt_tokens": 40, "truncation_side": side, **more}
        for what, prompt, more in (
            ("text", "Write about it. " * 5, {}),
            ("text without special tokens", "Write about it. " * 5, {"add_special_tokens": False}),
            ("ids", list(range(300, 400)), {}),
        )
        for side in (None, "left", "right")
    },
    "cut to the context": {"prompt": "long " * 500, "truncate_prompt_tokens": -1},
    "ids cut to the context": {"prompt": [300, 301] * 1200, "truncate_prompt_tokens": -1},
}
CALLED = [
    {"role": "user", "content": "Write about it. " * 4},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]},
    {"type": "function_call", "call_id": "call-1", "name": "weather", "arguments": '{"city": "Bern"}'},
    {"type": "function_call", "call_id": "call-2", "name": "weather", "arguments": '{"city": "Basel"}'},
    {"type": "function_call_output", "call_id": "call-1", "output": "rain"},
    {"type": "function_call_output", "call_id": "call-2", "output": "sun"},
]
SAID = [{"type": "output_text", "text": "It was"}]
RESPONDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "Be brief."},
    "messages": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Write. "}] * 2},
            {"role": "assistant", "content": "Yes."},
            {"type": "message", "role": "assistant", "content": SAID},
            {"role": "user", "content": "More, please. " * 4},
        ]
    },
    "unfinished": {
        "input": [
            {"role": "user", "content": "Write about it. " * 4},
            {"type": "message", "role": "assistant", "status": "incomplete", "content": SAID},
        ]
    },
    "calls": {"input": CALLED, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"},
    "effort": {"reasoning": {"effort": "low"}},
    "no effort": {"reasoning": {}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "cut to the context": {"input": "long " * 500, "truncation": "auto"},
}
BLOCKS = [
    {"role": "user", "content": "Write about it. " * 4},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look it up.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Zürich", "days": [1, 2.0]}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "rain"}] * 2},
            {"type": "text", "text": "And then?"},
            {"type": "text", "text": "Say it."},
        ],
    },
]
MESSAGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": "Be brief."},
    "blocks of system": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be brief."},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        ]
    },
    "calls": {
        "messages": BLOCKS,
        "tools": [{"name": "weather", "input_schema": {"properties": PARAMETERS["properties"]}}],
        "tool_choice": {"type": "none"},
    },
    "prefilled": {"messages": [*BLOCKS[:1], {"role": "assistant", "content": "It was"}]},
    "effort": {"output_config": {"effort": "low"}},
    "adaptive": {"thinking": {"type": "adaptive"}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}},
}
PLAIN: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Write about the following matter, please. " * 2, "max_tokens": 1},
    CHAT: {"messages": [USER], "max_tokens": 1},
    RESPONSES: {"input": USER["content"], "max_output_tokens": 1, "enable_response_messages": True},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
}
CASES = [
    pytest.param(path, more, id=f"{path} {name}")
    for path, cases in ((COMPLETIONS, COMPLETED), (CHAT, CHATS), (RESPONSES, RESPONDED), (MESSAGES, MESSAGED))
    for name, more in cases.items()
]
UNKNOWN = [
    pytest.param(path, more, id=f"{path} {name}")
    for path, name, more in (
        (COMPLETIONS, "embeddings", {"prompt_embeds": "AAAA"}),
        (RESPONSES, "earlier turns", {"previous_response_id": "resp_1"}),
        (RESPONSES, "an image", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        (RESPONSES, "a tool of the engine", {"tools": [{"type": "web_search"}]}),
        (RESPONSES, "an unknown item", {"input": [{"type": "item_reference", "id": "1"}]}),
        (MESSAGES, "disabled thinking", {"thinking": {"type": "disabled"}}),
        (MESSAGES, "inline system messages", {"messages": [USER, {"role": "system", "content": "Be brief."}]}),
        (MESSAGES, "an image", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (MESSAGES, "no list", {"messages": 1}),
    )
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose tokenizer adds special tokens at both ends, and whose template shows all that it can see."""
    folder = tmp_path_factory.mktemp("tokenization")
    model = Path(shutil.copytree(tiny_model, folder / "model"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS_TOKEN_ID), ("<eos>", EOS_TOKEN_ID)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    process = EngineProcess(
        model,
        folder,
        transfer_config=None,
        block_size=BLOCK_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        kv_cache_bytes=64 << 20,
        extra_arguments=("--served-model-name", model.name, "nickname", "--trust-request-chat-template"),
    )
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes tokenization slow."""
    monkeypatch.setattr(lookup, "TOKENIZE_TIMEOUT_SECONDS", 60.0)


def tokens_of(engine: EngineProcess, path: str, body: dict[str, Any]) -> list[int]:
    """What the proxy looks up."""
    known = Engine(f"http://127.0.0.1:{engine.port}", BOTH)
    known.models = (EngineModel(name=engine.model_name, max_token_count=CONTEXT_TOKENS),)

    async def ask() -> list[int]:
        async with open_session() as session:
            client = UpstreamClient(known, Upstream(session, PLAINTEXT.client_contexts()))
            return await lookup.tokens_of(client, path, body, {})

    return asyncio.run(ask())


def computed(engine: EngineProcess, path: str, body: dict[str, Any]) -> tuple[int, list[int] | None]:
    """The number of tokens that the engine computes, and the tokens if it returns them."""
    response = httpx.post(f"http://127.0.0.1:{engine.port}{path}", json=body, timeout=60.0)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    if path == MESSAGES:
        return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"], None
    count = usage["input_tokens" if path == RESPONSES else "prompt_tokens"]
    if path == COMPLETIONS:
        return count, answer["choices"][0]["prompt_token_ids"]
    return count, answer.get("prompt_token_ids")


@pytest.mark.parametrize(("path", "more"), CASES)
def test_the_proxy_looks_up_what_the_engine_computes(engine: EngineProcess, path: str, more: dict[str, Any]) -> None:
    salt = secrets.token_hex()
    body = {"model": engine.model_name, "temperature": 0, **PLAIN[path], **more}
    looked_up = tokens_of(engine, path, body)
    returns_ids = {"return_token_ids": True} if path in (COMPLETIONS, CHAT) else {}
    count, tokens = computed(engine, path, body | returns_ids | {"cache_salt": salt})
    assert (len(looked_up), looked_up) == (count, tokens or looked_up)
    assert count >= BLOCK_TOKENS
    held = engine.complete([*looked_up[: CONTEXT_TOKENS - 1]], 1, extra={"cache_salt": salt}).cached_tokens
    assert held == (min(count, CONTEXT_TOKENS - 1) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(("path", "more"), UNKNOWN)
def test_a_prompt_whose_tokens_the_proxy_cannot_know_is_not_looked_up(
    engine: EngineProcess, path: str, more: dict[str, Any]
) -> None:
    with pytest.raises(NotTokenizable):
        tokens_of(engine, path, {"model": engine.model_name, **PLAIN[path], **more})
