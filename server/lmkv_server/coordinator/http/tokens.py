"""Token ids out of JSON: a hundred thousand of them are read in one pass over the body, and copied once."""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadTokens
from lmkv_kernels import token_ids

_OPENING = re.compile(rb'\s*\{\s*"tokens"\s*:\s*(?=\[)')


def token_array(text: msgspec.Raw | memoryview) -> NDArray[np.uint32]:
    """The token ids in a JSON list. Raises `BadTokens` if it is none."""
    try:
        return token_ids(memoryview(text))
    except ValueError as error:
        raise BadTokens(f"tokens must be a list of token ids: {error}") from None


def lift_tokens(body: bytes) -> tuple[bytes, memoryview | None]:
    """A body that begins with its `tokens`, with an empty list in their place, and their text.

    So that whoever reads the rest need not go through them too. None if the body begins otherwise.
    """
    opening = _OPENING.match(body)
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is None or end < 0:
        return body, None
    return b'{"tokens":[]' + body[end + 1 :], memoryview(body)[opening.end() : end + 1]
