"""What a request says of a handoff between a prefill and a decode engine: `kv_transfer_params["lmkv"]`. Pure.

The proxy writes it (docs/prefill-decode.md); nothing a client can put there may break an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARAMS = "lmkv"
MAX_NAME = 256
"""Characters of a handoff's name, or of an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """One request's part in a handoff."""

    request_id: str
    """Names the handoff to both engines."""
    decode_address: str = ""
    """In a prefill: `host:port` of the node that the prompt is handed to."""
    prompt_token_count: int = 0
    """In a decode: so many of the request's first tokens are handed to it."""


def is_addressed(params: Mapping[str, Any] | None) -> bool:
    """Whether whoever made the request speaks to lmkv, and wants to know which node answers."""
    return isinstance(params, Mapping) and isinstance(params.get(PARAMS), Mapping)


def handoff_of(params: Mapping[str, Any] | None) -> Handoff | None:
    """What the request says of a handoff; None if it says nothing. Raises `ValueError` if it makes no sense."""
    said = params.get(PARAMS) if isinstance(params, Mapping) else None
    if not isinstance(said, Mapping) or "request_id" not in said:
        return None
    name, address, count = said["request_id"], said.get("decode_address", ""), said.get("prompt_token_count", 0)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError("kv_transfer_params.lmkv.request_id is no name")
    if not isinstance(address, str) or len(address) > MAX_NAME:
        raise ValueError("kv_transfer_params.lmkv.decode_address is no address")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError("kv_transfer_params.lmkv.prompt_token_count is no number of tokens")
    if not address and not count:
        raise ValueError("kv_transfer_params.lmkv needs a decode_address, or a prompt_token_count")
    return Handoff(request_id=name, decode_address=address, prompt_token_count=count)
