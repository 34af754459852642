"""How callers name chunks: by a prompt's tokens or by keys, the same in every request. For the SDK and the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from lmkv.errors import BadChunkKey, BadRequest, BadTokens
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES

Request = TypeVar("Request", bound=Message)

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 64
"""Most that a request may have: a stream wraps it into a message of its own."""


class Chunks(TypedDict, total=False):
    """What names chunks besides tokens; all of it may be left out."""

    keys: Iterable[ChunkKey]
    """Keys of the chunks in prompt order, instead of tokens."""
    model_name: str
    """Model whose tokens these are, or a LoRA adapter of it, as served; needed only if the fleet serves several."""
    cache_salt: str
    """Cache salt that the prompt was sent with."""
    lora_name: str
    """LoRA adapter that the prompt was sent with: its served name, or its identity `name@digest`."""


def make_request(kind: Callable[..., Request], tokens: Sequence[int], chunks: Chunks, **fields: Any) -> Request:
    """A request about these chunks. Raises `BadTokens` if the tokens are none.

    Raises `BadTokens`, `BadChunkKey` or `BadRequest`, by the field that takes most, if it is too long to be sent: gRPC
    would end the call, and with it a stream that others ask on, too.
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
    except (ValueError, TypeError) as error:  # they do not fit into int32
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
        f"{field} takes {sizes[field]:,} bytes, and a request may have {MAX_REQUEST_BYTES:,}: ask for the first part",
        field=field,
        size_bytes=sizes[field],
        limit_bytes=MAX_REQUEST_BYTES,
    )
