"""Token ids out of JSON."""

from __future__ import annotations

import array

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadTokens

_decoder = msgspec.json.Decoder(list[int])


def token_array(text: msgspec.Raw) -> NDArray[np.int64]:
    """The token ids in a JSON list. Raises `BadTokens` if it is none of integers."""
    try:
        tokens = _decoder.decode(text)
        return np.frombuffer(array.array("q", tokens), dtype=np.int64)
    except (msgspec.DecodeError, OverflowError) as error:
        raise BadTokens(f"tokens must be a list of token ids: {error}") from None
