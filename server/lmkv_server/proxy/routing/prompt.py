"""Reads what routing needs of a request's body, also while its parts arrive. Pure.

Token ids become one array, without a Python object per id. How a body was split makes no difference: what it is by its
end is what `read_prompt` finds in the whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import token_ids
from lmkv_server.http.json_text import JsonText, LongValue, decode_object
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Json

PROMPT_NAME = b'"prompt"'
TOKENS_BEGIN = re.compile(rb'"prompt"\s*:\s*(?:\[\s*)?(?=\[\s*\d)')
"""Matches the text before the token ids of `"prompt": [1, 2]` and `"prompt": [[1, 2]]`."""
_MARK = secrets.token_hex(16)
"""Replaces token ids that are cut out, to show where the list was. Bodies cannot contain it."""
_LIFTED: tuple[Any, ...] = (_MARK, [_MARK])


READ_FIELDS = frozenset(
    {
        *("model", "user", "metadata", "cache_salt", "kv_transfer_params", "stream_options"),
        *("chat_template_kwargs", "truncate_prompt_tokens", "truncation", "truncation_side"),
    }
)
"""Fields that proxy and picker look into, besides numbers and flags."""
PROMPT_FIELDS: Mapping[str, frozenset[str]] = {
    CHAT: frozenset({"messages"}),
    RESPONSES: frozenset({"input", "instructions", "previous_input_messages", "prompt", "reasoning", "tools"}),
    MESSAGES: frozenset({"messages", "output_config", "system", "thinking", "tools"}),
}
"""Fields that are rewritten for `/tokenize`, by path. A completion's prompt is not."""


def needed_fields(path: str, *, reads_prompt: bool) -> frozenset[str]:
    """The fields that must be decoded however long they are."""
    return READ_FIELDS | PROMPT_FIELDS.get(path, frozenset()) if reads_prompt else READ_FIELDS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRequest:
    """The body of a request for tokens."""

    path: str
    body: Json
    """The body without the token ids, if the prompt consists of them."""
    id_parts: Sequence[NDArray[np.uint32]] = ()
    """Parts of the prompt, if it was sent as token ids."""

    @property
    def tokens(self) -> NDArray[np.uint32] | None:
        """The prompt, if it was sent as token ids. Joins the parts."""
        if len(self.id_parts) == 1:
            return self.id_parts[0]
        return np.concatenate(self.id_parts) if self.id_parts else None

    @property
    def token_count(self) -> int:
        """Number of token ids."""
        return sum(part.size for part in self.id_parts)

    @property
    def model_name(self) -> str:
        """The model or LoRA adapter; empty if the body names none."""
        return _text(self.body.get("model"))

    @property
    def cache_salt(self) -> str:
        """The cache salt; empty if there is none."""
        return _text(self.body.get("cache_salt"))

    @property
    def user(self) -> str:
        """OpenAI's `user`; empty if the body names none."""
        return _text(self.body.get("user"))

    @property
    def has_text(self) -> bool:
        """Whether an engine can tokenize it: a chat, or one prompt."""
        if self.path in (CHAT, MESSAGES):
            messages = self.body.get("messages")
            return isinstance(messages, list) or (isinstance(messages, LongValue) and messages.is_list)
        if self.path == RESPONSES:
            return bool(self.body.get("input"))
        return self.path == COMPLETIONS and bool(self.text_prompt)

    @property
    def text_prompt(self) -> str | LongValue:
        """The prompt of a completion, if it is one text; otherwise empty."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, LongValue):
            return prompt.only if prompt.only.is_text else ""
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        return _text(prompt)


def read_prompt(path: str, body: bytes, json: JsonText | None = None, *, reads_prompt: bool = True) -> PromptRequest:
    """Reads a request's body, which `json` has scanned if it is large. Raises `NotJson`.

    Without `reads_prompt`, long prompts that are not token ids are not decoded.
    """
    opening = TOKENS_BEGIN.match(body, begin) if (begin := body.find(PROMPT_NAME)) >= 0 else None
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is not None and end >= 0:
        ids = memoryview(body)[opening.end() : end + 1]
        if found := lifted(path, body[: opening.end()], lambda: [token_ids(ids)], body[end + 1 :]):
            return found
    if json is None:
        return PromptRequest(path=path, body=decode_object(body))
    json.text = body
    return PromptRequest(path=path, body=json.fields(needed_fields(path, reads_prompt=reads_prompt)))


def lifted(
    path: str, head: bytes, id_parts: Callable[[], Sequence[NDArray[np.uint32]]], rest: bytes
) -> PromptRequest | None:
    """The request of a body without the list of token ids, which was between `head` and `rest`.

    None if that list was not the prompt, which only completions have, or has other values: the whole body must be
    decoded.
    """
    if path != COMPLETIONS:
        return None
    try:
        body = msgspec.json.decode(b'%b"%b"%b' % (head, _MARK.encode(), rest))
        if isinstance(body, dict) and body.get("prompt") in _LIFTED:
            return PromptRequest(path=path, body={**body, "prompt": []}, id_parts=id_parts())
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


MAX_HEAD_BYTES = 64 << 10
"""Token ids that begin later are read at the end, from the whole body."""
MIN_TEXT_BYTES = 8 << 10
"""Shorter parts are read together."""
MAX_GAP_BYTES = 8 << 10
"""Maximum size of white space that separates token ids; with more, the whole body is read at the end."""
_MAYBE_TOKENS = re.compile(rb'"prompt"\s*(?::\s*(?:\[\s*){0,2})?\Z')
"""Matches text that further text could make a beginning of token ids."""
_NO_TOKENS = np.empty(0, np.uint32)


class ArrivingPrompt:
    """The body of one request, of which more parts may arrive. Keeps the parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._is_plain = True
        """Whether what has arrived may be a body with token ids."""
        self._head = b""
        """The body up to the token ids."""
        self._is_in_list = False
        self._text = b""
        """Text of the list that has not been read."""
        self._ids: list[NDArray[np.uint32]] = []
        self._rest: list[bytes] | None = None
        """The body after the token ids, once these are complete."""
        self.has_returned_tokens = False
        """Whether `add` and `end` have returned the prompt; known after `read`."""

    @property
    def fields(self) -> Json:
        """The fields before the token ids; empty before these begin, or if they are not the prompt."""
        closing = b"0]}" if self._head.rstrip().endswith(b"[") else b"0}"
        try:
            found = msgspec.json.decode(self._head + closing)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return found if isinstance(found, dict) and "prompt" in found else {}

    def add(self, part: bytes, *, is_last: bool = False) -> NDArray[np.uint32]:
        """Takes a part of the body. Returns the next token ids, which may turn out not to be the prompt.

        `is_last` is a hint: that no more parts follow may also be known later.
        """
        if is_last and not self._parts:
            self._is_plain = False  # `read_prompt` reads it without a copy
        self._parts.append(part)
        if not self._is_plain:
            return _NO_TOKENS
        if self._rest is not None:
            self._rest.append(part)
            return _NO_TOKENS
        self._text += part
        if not self._is_in_list:
            self._look_for_list()
        return self._read() if self._is_in_list and len(self._text) >= MIN_TEXT_BYTES else _NO_TOKENS

    def end(self) -> NDArray[np.uint32]:
        """Must be called once all parts were taken. Returns the token ids that `add` has not returned."""
        return self._read() if self._is_in_list and self._rest is None else _NO_TOKENS

    def read(self, path: str, json: JsonText | None = None, *, reads_prompt: bool = True) -> PromptRequest:
        """The request, after `end`. Raises `NotJson`. Arguments as for `read_prompt`."""
        if self._rest is not None and (found := lifted(path, self._head, lambda: self._ids, b"".join(self._rest))):
            self.has_returned_tokens = True
            return found
        return read_prompt(path, b"".join(self._parts), json, reads_prompt=reads_prompt)

    def _look_for_list(self) -> None:
        text = self._text
        begin = text.find(PROMPT_NAME)
        opening = TOKENS_BEGIN.match(text, begin) if begin >= 0 else None
        if opening is not None:
            self._is_in_list = True
            self._head, self._text = text[: opening.end()], text[opening.end() + 1 :]
        elif len(text) > MAX_HEAD_BYTES or (begin >= 0 and not _MAYBE_TOKENS.match(text, begin)):
            self._end_reading()

    def _read(self) -> NDArray[np.uint32]:
        """Reads the text up to the last comma, or to the end of the list."""
        text = self._text
        end = text.find(b"]")
        if end >= 0:
            self._rest = [text[end + 1 :]]
        else:
            end = text.rfind(b",")
            if end < 0:
                if len(text) > MAX_GAP_BYTES:
                    self._end_reading()
                return _NO_TOKENS
        self._text = text[end + 1 :] if self._rest is None else b""
        try:
            ids = token_ids(b"[" + text[:end] + b"]")
        except ValueError:
            ids = _NO_TOKENS
        if not ids.size:  # nothing between two commas, or between comma and end
            self._end_reading()
            return _NO_TOKENS
        self._ids.append(ids)
        return ids

    def _end_reading(self) -> None:
        """Leaves the rest to `read`."""
        self._is_plain = self._is_in_list = False
        self._text, self._ids, self._rest = b"", [], None
