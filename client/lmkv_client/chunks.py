"""Names chunks in requests: by a prompt's tokens or by keys. For the SDK and the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from lmkv.errors import BadChunkKey, BadRequest, BadTokens
from lmkv.keys import ChunkKey
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.v1.prompt_pb2 import PromptSelector, TokenPrompt

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
    fingerprint: bytes
    """Fingerprint of the keys' spec; by default that under which the first key that is held was reported."""


class ClearScope(Chunks, total=False):
    """The chunks that `Coordinator.clear` drops, if not those of a prompt: all of an instance, tier or model."""

    instance_id: str
    """The instance that drops them; by default all."""
    tier: str
    """The tier that drops them; by default all."""
    everything: bool
    """Whether all chunks are dropped, without any other name for them."""
    weight_version: str
    """Drops only the chunks that this version of the model's weights has computed."""
    kept_weight_version: str
    """Drops the chunks of all versions of the model's weights but this one."""


def make_request(kind: Callable[..., Request], tokens: Sequence[int], chunks: Chunks, **fields: Any) -> Request:
    """Creates a request for these chunks. Raises `BadTokens` if the tokens are invalid.

    Raises `BadTokens`, `BadChunkKey` or `BadRequest`, by the largest field, if the request is too large: gRPC would end
    the call, and with it a stream that other lookups share.
    """
    request = kind(prompt=selector_of(tokens, chunks), **fields)
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise _too_long(request)
    return request


def selector_of(tokens: Sequence[int], chunks: Chunks) -> PromptSelector | None:
    """The selector of a request; None if the caller names no chunks. Raises `BadTokens` or `BadRequest`."""
    keys = list(chunks.get("keys", ()))
    of_tokens = {name: chunks[name] for name in ("model_name", "cache_salt", "lora_name") if chunks.get(name)}
    if keys and len(tokens):
        raise BadTokens("chunks are named by tokens and by keys; use one of the two")
    if keys and of_tokens:
        raise BadRequest(f"{next(iter(of_tokens))}: keys contain it; leave it out", field=next(iter(of_tokens)))
    if keys:
        return by_keys(keys, fingerprint=chunks.get("fingerprint", b""))
    if not (len(tokens) or of_tokens):
        return None
    try:
        return by_tokens(tokens, **of_tokens)
    except (ValueError, TypeError) as error:  # not in the range of int32
        raise BadTokens(f"tokens must be integers from 0 to 2^31-1: {error}") from None


def _too_long(request: Any) -> BadRequest:
    prompt: PromptSelector = request.prompt
    sizes = {field.name: _size_of(prompt.tokens, field.name) for field in TokenPrompt.DESCRIPTOR.fields}
    sizes["chunk_keys"] = _size_of(prompt.keys, "chunk_keys")
    sizes["tokens"] = sizes.pop("token_ids")
    field = max(sizes, key=lambda name: sizes[name])
    wrong = {"tokens": BadTokens, "chunk_keys": BadChunkKey}.get(field, BadRequest)
    return wrong(
        f"{field} has {sizes[field]:,} bytes; the limit of a request is {MAX_REQUEST_BYTES:,}: use a prefix",
        field=field,
        size_bytes=sizes[field],
        limit_bytes=MAX_REQUEST_BYTES,
    )


def _size_of(message: Message, field: str) -> int:
    """Bytes of one field in a message."""
    whole = message.ByteSize()
    rest = type(message)()
    rest.CopyFrom(message)
    rest.ClearField(field)
    return whole - rest.ByteSize()
