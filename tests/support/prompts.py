"""Requests of tests that name chunks by keyword: by what `PromptSelector` has, without its nesting."""

from __future__ import annotations

from typing import Any

from lmkv.keys import KEY_BYTES
from lmkv.rpc.messages import by_keys, by_tokens

_OF_TOKENS = ("model_name", "cache_salt", "lora_name")


def with_prompt(**fields: Any) -> dict[str, Any]:
    """The fields of a request, with `tokens` and what belongs to them, or `chunk_keys` (a list, or one
    string), as `prompt`.

    Without either, `model_name` stays: `ClearRequest` has one of its own.
    """
    if "chunk_keys" in fields and not fields.get("tokens"):
        fields.pop("tokens", None)
    if "tokens" in fields:
        named = {name: fields.pop(name) for name in _OF_TOKENS if name in fields}
        prompt = by_tokens(fields.pop("tokens"), **named)
        return fields | {"prompt": prompt}
    if "chunk_keys" in fields:
        keys = fields.pop("chunk_keys")
        if isinstance(keys, bytes):
            keys = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        prompt = by_keys(keys, fingerprint=fields.pop("fingerprint", b""))
        return fields | {"prompt": prompt}
    return fields
