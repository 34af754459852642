"""How callers name chunks: by a prompt's tokens or by keys, the same in every request. For the SDK and the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, TypeVar

from lmkv.errors import BadTokens
from lmkv.keys import ChunkKey, join_keys

Request = TypeVar("Request")


class Chunks(TypedDict, total=False):
    """What names chunks besides tokens; all of it may be left out."""

    keys: Iterable[ChunkKey]
    """Keys of the chunks in prompt order, instead of tokens."""
    model_name: str
    """Model whose tokens these are; needed only if the fleet serves several."""
    cache_salt: str
    """Cache salt that the prompt was sent with."""
    lora_name: str
    """LoRA adapter that the prompt was sent with."""


def make_request(kind: Callable[..., Request], tokens: Sequence[int], chunks: Chunks, **fields: Any) -> Request:
    """A request about these chunks. Raises `BadTokens` if the tokens are none."""
    try:
        return kind(
            tokens=tokens,
            chunk_keys=join_keys(chunks.get("keys", ())),
            model_name=chunks.get("model_name", ""),
            cache_salt=chunks.get("cache_salt", ""),
            lora_name=chunks.get("lora_name", ""),
            **fields,
        )
    except (ValueError, TypeError) as error:  # they do not fit into int32
        raise BadTokens(f"tokens must be integers from 0 to 2^31-1: {error}") from None
