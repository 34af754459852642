"""One answer, made of the prefill engine's first token and of what a decode engine goes on with. No IO.

To the client it looks as if one engine had given it: one id, one time of creation, tokens counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmkv_server.proxy.pd.parameters import CHAT, token_limit, without_hand_over
from lmkv_server.proxy.upstream.events import DONE, event_of

Json = dict[str, Any]

_GIVEN_UP = ("abort", "error")
"""Reasons to finish that are no end of an answer."""
_encode = msgspec.json.encode


class NotContinued(ValueError):
    """An engine's answer is not one that another's can be joined to."""


class ResponseJoiner:
    """Begins with the answer of a prefill engine, and takes what decode engines say. Raises `NotContinued`."""

    def __init__(self, path: str, body: Mapping[str, Any], first: Json) -> None:
        self._is_chat = path == CHAT
        self._body = body
        self._first = without_hand_over(first)
        try:
            self._choice: Json = first["choices"][0]
            self.prompt: list[int] = (first if self._is_chat else self._choice)["prompt_token_ids"]
            self._ids: list[int] = list(self._choice["token_ids"])
            self._head = {name: first[name] for name in ("id", "created", "model")}
            self._message: Json = self._choice["message"] if self._is_chat else {}
            self.text: str | None = self._message["content"] if self._is_chat else self._choice["text"]
            self._finish_reason: str | None = self._choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise NotContinued(f"its answer has no {error}") from None
        _refuse_given_up(self._finish_reason)
        self.taken = list(self._ids)
        """Tokens that the client has, up to the last at which its text was whole."""
        self._pending: list[int] = []
        self._base_count = len(self._ids)
        self._usage_is_sent = False
        limit = token_limit(body, path)
        self.is_over = self._finish_reason != "length" or limit == 1
        """Whether the answer has all its tokens."""
        self._path = path

    @property
    def is_seamless(self) -> bool:
        """Whether a decode engine can go on behind the first token with neither text nor meaning lost.

        Text that ends within a character comes out wrong in an engine that takes it for prompt, and what a parser
        took for reasoning or for a call is not content.
        """
        message = self._message
        return _is_whole(self.text) and not message.get("reasoning") and not message.get("tool_calls")

    def fits(self, max_token_count: int) -> bool:
        """Whether prompt and answer are within what the model can; 0: nobody knows. The engine has its own words."""
        limit = token_limit(self._body, self._path)
        return not max_token_count or len(self.prompt) + (1 if limit is None else limit) <= max_token_count

    def fill(self, max_token_count: int) -> None:
        """Ends the answer if no further token fits into the model."""
        if max_token_count and len(self.prompt) + len(self.taken) >= max_token_count:
            self.is_over = True

    def opening(self) -> list[bytes]:
        """The first events of the stream."""
        if self._is_chat:
            role = {"index": 0, "delta": {"role": self._message.get("role", "assistant"), "content": ""}}
            role |= {"logprobs": None, "finish_reason": None}
            ids = self.prompt if self._wants_ids else None
            events = [self._event([role], prompt_token_ids=ids, prompt_text=None)]
            choice: Json = {"index": 0, "delta": {"content": self.text or ""}, "logprobs": None}
            choice["finish_reason"] = self._finish_reason if self.is_over else None
            if self.is_over:
                choice["stop_reason"] = self._choice.get("stop_reason")
            choice["token_ids"] = self._ids if self._wants_ids else None
        else:
            events = []
            choice = {"index": 0, "text": self.text, "logprobs": None}
            choice["finish_reason"] = self._finish_reason if self.is_over else None
            choice["stop_reason"] = self._choice.get("stop_reason") if self.is_over else None
            choice["prompt_token_ids"] = self.prompt if self._wants_ids else None
            choice["token_ids"] = self._ids if self._wants_ids else None
        last = self.is_over and not self._wants_usage and self._first.get("system_fingerprint")
        events.append(self._event([choice], **({"system_fingerprint": last} if last else {})))
        return events

    def follow(self, chunk: Json) -> bytes:
        """An event of a decode engine's stream as the client sees it; empty if it sees none of it.

        Raises `NotContinued` if the engine did not go on behind the tokens it was given.
        """
        choices = chunk.get("choices") or []
        for choice in choices:
            delta = choice.get("delta")
            _refuse_given_up(choice.get("finish_reason"))
            self._refuse_other_prompt((chunk if self._is_chat else choice).get("prompt_token_ids"))
            if delta is not None and "role" in delta and not delta.get("content"):
                return b""  # it begins an answer; this one has begun
            text = choice.get("text") if delta is None else delta.get("content")
            self._pending += choice.get("token_ids") or []
            if _is_whole(text):
                self.taken += self._pending
                self._pending = []
            if choice.get("finish_reason") is not None:
                self.is_over = True
            if not self._wants_ids and "token_ids" in choice:
                choice["token_ids"] = None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
        if chunk.get("usage"):
            chunk["usage"] = self._usage(chunk["usage"])
            self._usage_is_sent = self._usage_is_sent or not choices
        chunk |= self._head
        return event_of(_encode(chunk))

    def go_on(self) -> None:
        """A decode engine, the first or another, goes on behind `taken`: what came later is generated anew."""
        self._pending = []
        self._base_count = len(self.taken)

    def ending(self) -> list[bytes]:
        """What ends the stream: the usage, unless an engine has told it, and the mark."""
        if not self._wants_usage or self._usage_is_sent:
            return [DONE]
        count = len(self.taken) + len(self._pending)
        usage = {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + count}
        usage["completion_tokens"] = count
        chunk = {**self._chunk([]), "usage": usage}
        if fingerprint := self._first.get("system_fingerprint"):
            chunk["system_fingerprint"] = fingerprint
        return [event_of(_encode(chunk)), DONE]

    def whole(self, rest: Json | None) -> bytes:
        """The answer to a request that is not streamed. `rest` is the decode engine's; None if the answer is over.

        Raises `NotContinued`.
        """
        answer = self._first if rest is None else without_hand_over(rest) | self._head
        try:
            choice = answer["choices"][0]
            if rest is not None:
                self._join(choice, rest)
                answer["usage"] = self._usage(answer["usage"])
            if self._wants_ids:
                (answer if self._is_chat else choice)["prompt_token_ids"] = self.prompt
            else:
                choice["token_ids"] = None
                (answer if self._is_chat else choice)["prompt_token_ids"] = None
        except (KeyError, IndexError, TypeError) as error:
            raise NotContinued(f"its answer has no {error}") from None
        return _encode(answer)

    def _join(self, choice: Json, rest: Json) -> None:
        """Puts the first token before those of the decode engine's only choice."""
        self._refuse_other_prompt((rest if self._is_chat else choice).get("prompt_token_ids"))
        _refuse_given_up(choice["finish_reason"])
        if self._is_chat:
            choice["message"]["content"] = f"{self.text}{choice['message']['content'] or ''}"
        else:
            choice["text"] = f"{self.text}{choice['text']}"
        if choice.get("token_ids") is not None:
            choice["token_ids"] = self._ids + choice["token_ids"]

    def _refuse_other_prompt(self, tokens: list[int] | None) -> None:
        if tokens is not None and len(tokens) != len(self.prompt) + len(self.taken):
            raise NotContinued("it did not go on behind the first token")

    def _usage(self, usage: Json) -> Json:
        """A decode engine's count of tokens, in which the first ones are prompt, as one engine would count them."""
        count = self._base_count + usage["completion_tokens"]
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        counts["total_tokens"] = len(self.prompt) + count
        return usage | counts

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


def _refuse_given_up(finish_reason: str | None) -> None:
    if finish_reason in _GIVEN_UP:
        raise NotContinued(f"it gave its answer up ({finish_reason})")


def _is_whole(text: str | None) -> bool:
    """Whether a token's text ends where a character ends: else engines hold it back, or show U+FFFD."""
    return bool(text) and not text.endswith("\N{REPLACEMENT CHARACTER}")  # type: ignore[union-attr]
