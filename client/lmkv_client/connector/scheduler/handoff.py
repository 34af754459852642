"""The parameters of a handoff between a prefill and a decode engine: `kv_transfer_params["lmkv"]`. Pure.

The proxy writes it (docs/guides/disaggregated-prefill.md). Clients may write anything there: a handoff without a valid
proof of a proxy of the fleet is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmkv.auth.handoff import HandoffKeys

PARAMS = "lmkv"
MAX_NAME = 256
"""Characters of a handoff's name, or of an instance's."""


class HandoffRefused(ValueError):
    """The request's handoff is refused; the request itself is served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffParams:
    """One request's part in a handoff."""

    handoff_id: str
    """Names the handoff to both engines."""
    decode_instance: str
    """The instance of the decode engine's node."""
    prompt_token_count: int | None = None
    """The number of the request's first tokens that the handoff covers, in a decode; 0 ends a handoff that no request
    will load. None in a prefill."""

    @property
    def is_prefill(self) -> bool:
        """Whether the engine is to send the prompt."""
        return self.prompt_token_count is None


def is_addressed(params: Mapping[str, Any] | None) -> bool:
    """Whether the request has parameters for lmkv, so that the answer says which node is beside the engine."""
    return isinstance(params, Mapping) and isinstance(params.get(PARAMS), Mapping)


def wants_explanation(params: Mapping[str, Any] | None) -> bool:
    """Whether the answer is to say where the prompt came from, and why the rest was computed."""
    fields = params.get(PARAMS) if isinstance(params, Mapping) else None
    return isinstance(fields, Mapping) and fields.get("explain") is True


def audit_of(params: Mapping[str, Any] | None) -> str:
    """The name of the audit that the request asks for; empty if it asks for none, or if the name is malformed."""
    fields = params.get(PARAMS) if isinstance(params, Mapping) else None
    name = fields.get("audit") if isinstance(fields, Mapping) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() else ""


def handoff_of(params: Mapping[str, Any] | None, keys: HandoffKeys) -> HandoffParams | None:
    """The handoff that the request names; None if it names none.

    Raises `HandoffRefused` if it is malformed, or not proven although there are keys to prove it with.
    """
    fields = params.get(PARAMS) if isinstance(params, Mapping) else None
    if not isinstance(fields, Mapping) or "handoff_id" not in fields:
        return None
    name, instance = (_name(fields, field) for field in ("handoff_id", "decode_instance"))
    count = fields.get("prompt_token_count")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise HandoffRefused("kv_transfer_params.lmkv.prompt_token_count must be a number of tokens")
    if refusal := keys.refusal(name, instance, fields.get("expire_time"), fields.get("mac")):
        raise HandoffRefused(refusal)
    return HandoffParams(handoff_id=name, decode_instance=instance, prompt_token_count=count)


def _name(fields: Mapping[str, Any], field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isascii() or not value.isprintable():
        raise HandoffRefused(f"kv_transfer_params.lmkv.{field} must be 1 to {MAX_NAME} printable characters")
    return value
