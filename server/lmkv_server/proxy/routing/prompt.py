"""What routing needs of a request's body. Token ids become one array, without a Python object per id. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv_kernels import token_ids
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, Json

_NAME = b'"prompt"'
_TOKENS = re.compile(rb'"prompt"\s*:\s*(?:\[\s*)?(?=\[\s*\d)')
"""Where the token ids of `"prompt": [1, 2]` and `"prompt": [[1, 2]]` begin."""
_LIFTED: tuple[Any, ...] = ([], [[]])
"""What `prompt` is once its token ids are cut out."""


class NotJson(ValueError):
    """The body is not a JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRequest:
    """The body of a request for tokens."""

    path: str
    body: Json
    """Without the token ids, if the prompt consists of them."""
    tokens: NDArray[np.uint32] | None = None
    """The prompt, if it was sent as token ids."""

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
        if self.path == CHAT:
            return isinstance(self.body.get("messages"), list)
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
    opening = _TOKENS.match(body, begin) if (begin := body.find(_NAME)) >= 0 else None
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is not None and end >= 0 and body.find(_NAME, end) < 0:  # no other `prompt` that could be the one
        try:
            rest = msgspec.json.decode(body[: opening.end()] + b"[]" + body[end + 1 :])
            if isinstance(rest, dict) and rest.get("prompt") in _LIFTED:
                return PromptRequest(path=path, body=rest, tokens=token_ids(memoryview(body)[opening.end() : end + 1]))
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass  # this `prompt` was not the prompt, or its list has other values: decoded as a whole
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(str(error)) from None
    if not isinstance(content, dict):
        raise NotJson("it is not an object")
    return PromptRequest(path=path, body=content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
