"""Names chunks in requests: by a prompt's tokens or by keys. For the SDK and the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from lmkv.errors import BadChunkKey, BadRequest, BadTokens
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES

Request = TypeVar("Request", bound=Message)

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 64
"""Maximum size of a request, with room for the message that wraps it in a stream."""


class Chunks(TypedDict, total=False):
    """Names chunks besides tokens. All fields are optional."""

    keys: Iterable[ChunkKey]
    """Keys of the chunks in prompt order, instead of tokens."""
    model_name: str
    """Model whose tokens these are, or a LoRA adapter of it, as served; needed only if the fleet serves several."""
    cache_salt: str
    """Cache salt of the prompt."""
    lora_name: str
    """LoRA adapter of the prompt: its served name, or its identity `name@digest`."""


def make_request(kind: Callable[..., Request], tokens: Sequence[int], chunks: Chunks, **fields: Any) -> Request:
    """Creates a request for these chunks. Raises `BadTokens` if the tokens are invalid.

    Raises `BadTokens`, `BadChunkKey` or `BadRequest`, by the largest field, if the request is too large: gRPC would end
    the call, and with it a stream that other lookups share.
    """
    try:
        request = kind(
            tokens=tokens,
            chunk_keys=join_keys(chunks.get("keys", ())),
            model_name=chunks.get("model_name", ""),
            cache_salt=chunks.get("cache_salt", ""),
            lora_name=chunks.get("lora_name", ""),
            **fields,
        )
    except (ValueError, TypeError) as error:  # not in the range of int32
        raise BadTokens(f"tokens must be integers from 0 to 2^31-1: {error}") from None
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise _too_long(kind, request)
    return request


def _too_long(kind: Callable[..., Request], request: Request) -> BadRequest:
    names = ("tokens", "chunk_keys", "model_name", "cache_salt", "lora_name")
    sizes = {name: kind(**{name: getattr(request, name)}).ByteSize() for name in names}
    field = max(names, key=lambda name: sizes[name])
    wrong = {"tokens": BadTokens, "chunk_keys": BadChunkKey}.get(field, BadRequest)
    return wrong(
        f"{field} has {sizes[field]:,} bytes; the limit of a request is {MAX_REQUEST_BYTES:,}: use a prefix",
        field=field,
        size_bytes=sizes[field],
        limit_bytes=MAX_REQUEST_BYTES,
    )
