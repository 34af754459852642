"""Token ids out of JSON."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadTokens
from lmkv_kernels import token_ids


def token_array(text: msgspec.Raw) -> NDArray[np.uint32]:
    """The token ids in a JSON list. Raises `BadTokens` if it is none."""
    try:
        return token_ids(bytes(text))
    except ValueError as error:
        raise BadTokens(f"tokens must be a list of token ids: {error}") from None
