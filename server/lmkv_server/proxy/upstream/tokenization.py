"""Requests to an engine's `/tokenize` that return the tokens that the engine computes for a request. Pure.

`/tokenize` lacks some parameters of requests, and knows chats only: this follows vLLM's own conversions. A request
whose tokens would be others is `NotTokenizable`: it is routed without a lookup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmkv_server.proxy.openai import CHAT, COMPLETIONS, DEFAULT_COMPLETION_TOKENS, MESSAGES, RESPONSES, Json

Tokens = TypeVar("Tokens", list[int], NDArray[np.uint32])

FOR_COMPLETION: Final = ("model", "add_special_tokens")
FOR_CHAT: Final = (
    *("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tools"),
)
"""Parameters of a request that an engine's `/tokenize` accepts."""
FOR_TEMPLATE: Final = ("documents", "reasoning_effort")
"""Parameters of a chat that vLLM passes to the chat template."""
_UNSET: Final = (None, "auto")
"""Values that vLLM takes as missing when it merges arguments of chat templates."""
_BILLING = "x-anthropic-billing-header"
"""Begins a text that vLLM removes, since it differs in each request."""
_UNFINISHED = ("in_progress", "incomplete")
_OWN_FIELDS = {"type", "id", "status", "role", "content"}
"""Fields of an item of the Responses API that are a message's."""


class NotTokenizable(ValueError):
    """The tokens that an engine computes for the request cannot be known from its `/tokenize`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """The tokens of a prompt that an engine keeps."""

    limit: int
    """Maximum number of tokens; below 0: as many as the model's context has, less `-1 - limit`."""
    side: str
    """`right`: the first ones are kept; `left`: the last ones. Empty: the engine's tokenizer cuts text on the left.

    A tokenizer that cuts keeps the special tokens that it adds.
    """

    def token_count(self, max_model_len: int) -> int:
        """Maximum number of tokens, if the model's context has `max_model_len`."""
        return self.limit if self.limit >= 0 else max_model_len + 1 + self.limit

    def cut(self, tokens: Tokens, max_model_len: int) -> Tokens:
        """The tokens that the engine keeps, of those that a client sent or that a tokenizer returned without a cut."""
        count = self.token_count(max_model_len)
        if count < 0:
            raise NotTokenizable("the length of the model's context is unknown")
        if count >= len(tokens):
            return tokens
        kept = slice(count) if self.side == "right" else slice(len(tokens) - count, None)
        return tokens[kept]

    def cut_between(
        self, tokens: NDArray[np.uint32], plain: NDArray[np.uint32], max_model_len: int
    ) -> NDArray[np.uint32]:
        """The tokens that the engine's tokenizer keeps of a text if it cuts.

        `plain` are its tokens without special ones. Raises `NotTokenizable` if these are not within `tokens`.
        """
        added = tokens.size - plain.size
        first = next((at for at in range(added + 1) if (tokens[at : at + plain.size] == plain).all()), None)
        count = self.token_count(max_model_len) - added
        if first is None or count <= 0:
            raise NotTokenizable("the tokenizer adds special tokens within the text, or there is room for no others")
        return np.concatenate((tokens[:first], plain[plain.size - count :], tokens[first + plain.size :]))


def truncation(path: str, body: Mapping[str, Any]) -> Truncation | None:
    """Returns the engine's truncation of the prompt; None if it does not cut it."""
    if path == RESPONSES:
        limit = None if body.get("truncation", "disabled") == "disabled" else -1
        max_tokens = body.get("max_output_tokens")
    elif path == MESSAGES:
        return None
    else:
        limit = body.get("truncate_prompt_tokens")
        max_tokens = body.get("max_tokens", DEFAULT_COMPLETION_TOKENS if path == COMPLETIONS else None)
        if path == CHAT and body.get("max_completion_tokens") is not None:
            max_tokens = body["max_completion_tokens"]
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < -1:
        raise NotTokenizable("truncate_prompt_tokens is not a number of tokens")
    if limit == -1 and max_tokens:
        limit = -2  # one token of the context is left for the answer
    return Truncation(limit=limit, side=_text(body.get("truncation_side")))


def tokenize_body(path: str, body: Mapping[str, Any], prompt: object = None) -> Json:
    """The body of a request to `/tokenize` that returns a request's tokens. Raises `NotTokenizable`.

    `prompt` is the text of a completion.
    """
    if path == COMPLETIONS:
        if body.get("prompt_embeds") is not None:
            raise NotTokenizable("its prompt consists of embeddings")
        return {name: body[name] for name in FOR_COMPLETION if name in body} | {"prompt": prompt}
    try:
        if path == RESPONSES:
            return _for_chat(_chat_of_responses(body))
        return _for_chat(_chat_of_messages(body) if path == MESSAGES else body)
    except (AttributeError, KeyError, IndexError, TypeError) as error:  # the engine answers with its error
        raise NotTokenizable(f"it lacks a field, or has one of another type: {error!r}") from None


def forwarded_tokens(path: str, body: Mapping[str, Any]) -> list[int] | None:
    """The tokens that a client sends beside the messages of a chat, and which the engine takes instead of these."""
    parameters = body.get("kv_transfer_params")
    if path != CHAT or not isinstance(parameters, dict) or body.get("echo"):
        return None
    tokens = parameters.get("prompt_token_ids")
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def _for_chat(chat: Mapping[str, Any]) -> Json:
    """The parameters of a chat that `/tokenize` has, and in `chat_template_kwargs` those that it lacks."""
    asked = {name: chat[name] for name in FOR_CHAT if name in chat}
    asked["messages"] = [_with_reasoning(message) for message in chat["messages"]]
    own = chat.get("chat_template_kwargs") or {}
    merged = own | {name: chat[name] for name in FOR_TEMPLATE if chat.get(name) not in _UNSET}
    if chat.get("reasoning_effort") is not None and "enable_thinking" not in own:
        merged["enable_thinking"] = chat["reasoning_effort"] != "none"
    return asked | ({"chat_template_kwargs": merged} if merged else {})


def _with_reasoning(message: Json) -> Json:
    """A message with the current name of its reasoning, as vLLM renames it in requests for tokens only."""
    if "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    old = message["reasoning_content"]
    return rest | ({"reasoning": old} if old is not None and message.get("reasoning") is None else {})


# --- Responses --------------------------------------------------------------------------------------------------------


def _chat_of_responses(body: Mapping[str, Any]) -> Json:
    """A request of the Responses API as the chat that vLLM renders for it."""
    for name in ("previous_response_id", "previous_input_messages", "prompt"):
        if body.get(name):
            raise NotTokenizable(f"{name}: the engine has a part of the prompt")
    given = body["input"]
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        given = []
    for item in given:
        _add_item(messages, item)
    last = given[-1] if given else {}
    is_open = last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED
    chat = {name: body[name] for name in ("model", "chat_template_kwargs", "media_io_kwargs") if name in body}
    chat |= {"messages": messages, "add_generation_prompt": not is_open, "continue_final_message": is_open}
    chat |= {"reasoning_effort": (body.get("reasoning") or {}).get("effort"), "add_special_tokens": True}
    if body.get("mm_processor_kwargs"):
        chat["mm_processor_kwargs"] = body["mm_processor_kwargs"]
    return chat | ({"tools": [_response_tool(tool) for tool in body["tools"]]} if body.get("tools") else {})


def _add_item(messages: list[Json], item: Json) -> None:
    """Adds an item of the input: parts of one turn of the assistant become one message."""
    previous = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "function_call_output":
        messages.append({"role": "tool", "content": _string(item["output"]), "tool_call_id": item["call_id"]})
        return
    if kind == "function_call":
        if item.get("namespace"):
            raise NotTokenizable("a function of a namespace")
        function = {"name": item["name"], "arguments": _string(item["arguments"])}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if previous is not None:
            previous.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
        return
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise NotTokenizable("encrypted reasoning")
        parts = item.get("content") or item.get("summary") or [{"text": ""}]
        name, content = "reasoning", parts[0]["text"]
    elif kind != "message" or item.keys() - _OWN_FIELDS:
        raise NotTokenizable(f"an item of type {kind}, or with further fields")
    elif item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _text_parts(item["content"])})
        return
    else:
        name, content = "content", item["content"]
        content = content if isinstance(content, str) else content[0]["text"]
    if previous is not None and previous.get(name) is None:
        previous[name] = content
    else:
        messages.append({"role": "assistant", name: content})


def _text_parts(content: Any) -> str | list[Json]:
    """The text of a message of the Responses API, in the form of a chat's."""
    if isinstance(content, str):
        return content
    if any(part["type"] not in ("input_text", "text") for part in content):
        raise NotTokenizable("content other than text")
    return [{"type": "text", "text": part["text"]} for part in content]


def _response_tool(tool: Json) -> Json:
    if tool["type"] != "function" or tool.get("defer_loading"):
        raise NotTokenizable(f"a tool of type {tool['type']}, or a deferred one")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


# --- Messages ---------------------------------------------------------------------------------------------------------


def _chat_of_messages(body: Mapping[str, Any]) -> Json:
    """A request of Anthropic's Messages API as the chat that vLLM renders for it."""
    if (body.get("thinking") or {}).get("type") == "disabled":
        raise NotTokenizable("disabled thinking: its effort is an option of the engine")
    messages: list[Json] = []
    if system := _system_text(body.get("system") or ""):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        if message["role"] == "system":
            raise NotTokenizable("inline system messages: their place depends on the engine's chat template")
        _add_message(messages, message)
    chat = {name: body[name] for name in ("model", "chat_template_kwargs") if name in body}
    chat |= {"messages": messages, "reasoning_effort": (body.get("output_config") or {}).get("effort")}
    tools = body.get("tools")
    return chat if tools is None else chat | {"tools": [_message_tool(tool) for tool in tools]}


def _system_text(system: Any) -> str:
    """The system prompt. A block of its own may be a header that vLLM leaves out."""
    if isinstance(system, str):
        return system
    texts = [block["text"] for block in system if block["type"] == "text" and block.get("text")]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _add_message(messages: list[Json], message: Json) -> None:
    """Adds a message, after the results of tools that it contains."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    texts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in content:
        kind = block["type"]
        if kind == "text":
            texts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
        elif kind == "thinking":
            thoughts += [block["thinking"]] if block.get("thinking") is not None else []
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            if not block["id"]:
                raise NotTokenizable("a call without an id")
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _tool_result(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": result})
        elif kind != "redacted_thinking":
            raise NotTokenizable(f"a block of type {kind}")
    made: Json = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if texts:
        made["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if role != "user" or "content" in made:
        messages.append(made)


def _tool_result(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise NotTokenizable("the result of a tool is more than text")
    return "\n".join(part.get("text", "") for part in content)


def _message_tool(tool: Json) -> Json:
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": function | {"parameters": {**tool["input_schema"], **_type_of(tool)}}}


def _type_of(tool: Json) -> Json:
    """The type that vLLM adds to a schema without one."""
    return {} if "type" in tool["input_schema"] else {"type": "object"}


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise NotTokenizable("content other than text")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
