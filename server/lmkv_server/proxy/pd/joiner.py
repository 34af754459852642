"""Joins the prefill engine's first token and a decode engine's continuation into one response. Pure.

The client receives what one engine would send: one id, one creation time, each token counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmkv_server.proxy.openai import CHAT, DONE, Json, event_of
from lmkv_server.proxy.pd.parameters import token_limit, without_handoff

_ABORTED = ("abort", "error")
"""Finish reasons of a response that is incomplete."""
_HITS = ("cached_tokens", "created_cache_tokens")
"""Numbers of prompt tokens that were cached already, and of those that are cached now."""
_encode = msgspec.json.encode


class CannotContinue(ValueError):
    """Two engines' responses cannot be joined."""


class ResponseJoiner:
    """Starts with the response of a prefill engine and adds those of decode engines.

    The constructor raises `CannotContinue` if the response lacks a field or was aborted.
    """

    def __init__(self, path: str, body: Mapping[str, Any], first: Json) -> None:
        self._is_chat = path == CHAT
        self._body = body
        self._first = without_handoff(first)
        try:
            self._choice: Json = first["choices"][0]
            self.prompt: list[int] = (first if self._is_chat else self._choice)["prompt_token_ids"]
            self._ids: list[int] = list(self._choice["token_ids"])
            self._head = {name: first[name] for name in ("id", "created", "model")}
            self._message: Json = self._choice["message"] if self._is_chat else {}
            self.text: str | None = self._message["content"] if self._is_chat else self._choice["text"]
            self._finish_reason: str | None = self._choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise CannotContinue(f"its response has no {error}") from None
        _check_finish_reason(self._finish_reason)
        self.delivered = list(self._ids)
        """Tokens that the client has, up to the last token that ends with a complete character."""
        self._pending: list[int] = []
        self._base_count = len(self._ids)
        self._usage_is_sent = False
        self._has_continued = False
        """Whether a decode engine was asked to continue: it may have computed some of the prompt."""
        limit = token_limit(body, path)
        self.is_complete = self._finish_reason != "length" or limit == 1
        """Whether the response has all its tokens."""
        self._path = path

    @property
    def can_continue(self) -> bool:
        """Whether a decode engine can continue after the first token without a loss of text or structure.

        It cannot if the token ends within a character, since an engine decodes the rest of the character as U+FFFD,
        or if a parser extracted reasoning or a tool call from it.
        """
        message = self._message
        return _ends_with_character(self.text) and not message.get("reasoning") and not message.get("tool_calls")

    def fits(self, max_token_count: int) -> bool:
        """Whether the prompt and the token limit fit into the context; True if `max_token_count` is 0 (unknown)."""
        limit = token_limit(self._body, self._path)
        return not max_token_count or len(self.prompt) + (1 if limit is None else limit) <= max_token_count

    def complete_at(self, max_token_count: int) -> None:
        """Completes the response if it has reached the model's context length."""
        if max_token_count and len(self.prompt) + len(self.delivered) >= max_token_count:
            self.is_complete = True

    def first_events(self) -> list[bytes]:
        """The events of the stream with the first token."""
        if self._is_chat:
            role = {"index": 0, "delta": {"role": self._message.get("role", "assistant"), "content": ""}}
            role |= {"logprobs": None, "finish_reason": None}
            ids = self.prompt if self._wants_ids else None
            events = [self._event([role], prompt_token_ids=ids, prompt_text=None)]
            choice: Json = {"index": 0, "delta": {"content": self.text or ""}, "logprobs": None}
            choice["finish_reason"] = self._finish_reason if self.is_complete else None
            if self.is_complete:
                choice["stop_reason"] = self._choice.get("stop_reason")
            choice["token_ids"] = self._ids if self._wants_ids else None
        else:
            events = []
            choice = {"index": 0, "text": self.text, "logprobs": None}
            choice["finish_reason"] = self._finish_reason if self.is_complete else None
            choice["stop_reason"] = self._choice.get("stop_reason") if self.is_complete else None
            choice["prompt_token_ids"] = self.prompt if self._wants_ids else None
            choice["token_ids"] = self._ids if self._wants_ids else None
        last = self.is_complete and not self._wants_usage and self._first.get("system_fingerprint")
        events.append(self._event([choice], **({"system_fingerprint": last} if last else {})))
        return events

    def rewrite(self, chunk: Json) -> bytes:
        """Rewrites an event of a decode engine for the client; empty if the client does not receive it.

        Raises `CannotContinue` if the engine did not continue after the given tokens.
        """
        choices = chunk.get("choices") or []
        for choice in choices:
            delta = choice.get("delta")
            _check_finish_reason(choice.get("finish_reason"))
            self._check_prompt((chunk if self._is_chat else choice).get("prompt_token_ids"))
            if delta is not None and "role" in delta and not delta.get("content"):
                return b""  # starts a response; this one has started
            text = choice.get("text") if delta is None else delta.get("content")
            self._pending += choice.get("token_ids") or []
            if _ends_with_character(text):
                self.delivered += self._pending
                self._pending = []
            if choice.get("finish_reason") is not None:
                self.is_complete = True
            if not self._wants_ids and "token_ids" in choice:
                choice["token_ids"] = None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
        if chunk.get("usage"):
            chunk["usage"] = self._usage(chunk["usage"])
            self._usage_is_sent = self._usage_is_sent or not choices
        chunk |= self._head
        return event_of(_encode(chunk))

    def restart(self) -> None:
        """Prepares for a decode engine that continues after `delivered`. Discards tokens that arrived later."""
        self._has_continued = True
        self._pending = []
        self._base_count = len(self.delivered)

    def last_events(self) -> list[bytes]:
        """The events that end the stream: the usage, unless an engine has sent it, and `[DONE]`."""
        if not self._wants_usage or self._usage_is_sent:
            return [DONE]
        count = len(self.delivered) + len(self._pending)
        usage: Json = {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + count}
        usage["completion_tokens"] = count
        if not self._has_continued and (details := _details(self._first)):
            usage["prompt_tokens_details"] = _without_nulls(details)
        chunk = {**self._chunk([]), "usage": usage}
        if fingerprint := self._first.get("system_fingerprint"):
            chunk["system_fingerprint"] = fingerprint
        return [event_of(_encode(chunk)), DONE]

    def merge(self, continuation: Json | None) -> bytes:
        """The response to a request that is not streamed. `continuation` is None if the first token completes it.

        Raises `CannotContinue`.
        """
        response = self._first if continuation is None else without_handoff(continuation) | self._head
        try:
            choice = response["choices"][0]
            if continuation is not None:
                self._join(choice, continuation)
                response["usage"] = self._usage(response["usage"])
            if self._wants_ids:
                (response if self._is_chat else choice)["prompt_token_ids"] = self.prompt
            else:
                choice["token_ids"] = None
                (response if self._is_chat else choice)["prompt_token_ids"] = None
        except (KeyError, IndexError, TypeError) as error:
            raise CannotContinue(f"its response has no {error}") from None
        return _encode(response)

    def _join(self, choice: Json, continuation: Json) -> None:
        """Inserts the first token before the tokens of the decode engine's only choice."""
        self._check_prompt((continuation if self._is_chat else choice).get("prompt_token_ids"))
        _check_finish_reason(choice["finish_reason"])
        if self._is_chat:
            choice["message"]["content"] = f"{self.text}{choice['message']['content'] or ''}"
        else:
            choice["text"] = f"{self.text}{choice['text']}"
        if choice.get("token_ids") is not None:
            choice["token_ids"] = self._ids + choice["token_ids"]

    def _check_prompt(self, tokens: list[int] | None) -> None:
        if tokens is not None and len(tokens) != len(self.prompt) + len(self.delivered):
            raise CannotContinue("it did not continue after the first token")

    def _usage(self, usage: Json) -> Json:
        """The usage as one engine would report it. A decode engine counts the delivered tokens as prompt."""
        count = self._base_count + usage["completion_tokens"]
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        counts["total_tokens"] = len(self.prompt) + count
        return with_common_hits(self._first, usage) | counts

    @property
    def _wants_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    @property
    def _wants_usage(self) -> bool:
        return bool((self._body.get("stream_options") or {}).get("include_usage"))

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": head["model"],
            "choices": choices,
        }

    def _event(self, choices: list[Json], **more: object) -> bytes:
        return event_of(_encode(self._chunk(choices) | more))


def with_common_hits(first: Mapping[str, Any], usage: Json) -> Json:
    """The usage of a decode engine's response, without the tokens that it counts as cached but `first` has computed.

    `first` is the prefill engine's response. A prompt token is cached if neither engine has computed it; hits are
    prefixes, so that these are the fewer hits of both. If one engine reports no hits, their number is unknown.
    """
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict):
        return usage
    before = _details(first)
    if _hit_count(before) is None or _hit_count(details) is None:
        fewer = {name: value for name, value in details.items() if name not in _HITS}
    else:
        fewer = min(before, details, key=lambda one: _hit_count(one) or 0)
    joined = dict.fromkeys(details) | _without_nulls(fewer)
    return {**usage, "prompt_tokens_details": joined if _without_nulls(joined) else None}


def _details(response: Mapping[str, Any]) -> Json:
    """Returns a response's details of its prompt's tokens; empty without `--enable-prompt-tokens-details`."""
    usage = response.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details if isinstance(details, dict) else {}


def _hit_count(details: Json) -> int | None:
    count = details.get("cached_tokens")
    return count if isinstance(count, int) else None


def _without_nulls(details: Json) -> Json:
    return {name: value for name, value in details.items() if value is not None}


def _check_finish_reason(finish_reason: str | None) -> None:
    if finish_reason in _ABORTED:
        raise CannotContinue(f"it aborted its response ({finish_reason})")


def _ends_with_character(text: str | None) -> bool:
    """Whether the text ends with a complete character. Else engines hold it back or show U+FFFD."""
    return bool(text) and not text.endswith("\N{REPLACEMENT CHARACTER}")  # type: ignore[union-attr]
