"""What routing needs of a request's body. Token ids become one array, without a Python object per id. Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import token_ids
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Json

PROMPT_NAME = b'"prompt"'
TOKENS_BEGIN = re.compile(rb'"prompt"\s*:\s*(?:\[\s*)?(?=\[\s*\d)')
"""Where the token ids of `"prompt": [1, 2]` and `"prompt": [[1, 2]]` begin."""
_MARK = secrets.token_hex(16)
"""What replaces token ids that are cut out. Bodies cannot have it: it shows where the list was."""
_LIFTED: tuple[Any, ...] = (_MARK, [_MARK])


class NotJson(ValueError):
    """The body is not a JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRequest:
    """The body of a request for tokens."""

    path: str
    body: Json
    """Without the token ids, if the prompt consists of them."""
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
            return isinstance(self.body.get("messages"), list)
        if self.path == RESPONSES:
            return bool(self.body.get("input"))
        return self.path == COMPLETIONS and bool(self.text_prompt)

    @property
    def text_prompt(self) -> str:
        """The prompt of a completion, if it is one text; otherwise empty."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        return _text(prompt)


def read_prompt(path: str, body: bytes) -> PromptRequest:
    """Reads a request's body. Raises `NotJson`."""
    opening = TOKENS_BEGIN.match(body, begin) if (begin := body.find(PROMPT_NAME)) >= 0 else None
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is not None and end >= 0:
        ids = memoryview(body)[opening.end() : end + 1]
        if found := lifted(path, body[: opening.end()], lambda: [token_ids(ids)], body[end + 1 :]):
            return found
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(str(error)) from None
    if not isinstance(content, dict):
        raise NotJson("it is not an object")
    return PromptRequest(path=path, body=content)


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
