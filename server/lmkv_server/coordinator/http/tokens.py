"""Reads token ids from JSON: in one pass over the body, with one copy."""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadTokens
from lmkv_kernels import token_ids

_OPENING = re.compile(rb'\s*\{\s*"tokens"\s*:\s*(?=\[)')


def token_array(text: msgspec.Raw | memoryview | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The token ids of a JSON list, if they are not read yet. Other threads run meanwhile. Raises `BadTokens`."""
    if isinstance(text, np.ndarray):
        return text
    try:
        return token_ids(memoryview(text))
    except ValueError as error:
        raise BadTokens(f"tokens must be a list of token ids: {error}") from None


def lift_tokens(body: bytes) -> tuple[bytes, memoryview | None]:
    """Splits a body that begins with `tokens` into the body with an empty list instead, and the text of the list.

    The decoder of the rest then does not parse the tokens. The second value is None if the body begins otherwise.
    """
    opening = _OPENING.match(body)
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is None or end < 0:
        return body, None
    return b'{"tokens":[]' + body[end + 1 :], memoryview(body)[opening.end() : end + 1]
