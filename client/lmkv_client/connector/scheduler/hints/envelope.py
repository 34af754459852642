"""The envelope of a request's hints, as `lmkv.hints` reads it.

In-process callers of vLLM pass `kv_hints`; clients of vLLM's HTTP API, which has no such field, use
`kv_transfer_params["lmkv"]["kv_hints"]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkv.hints import MAX_ACTIONS
from lmkv_client.connector.scheduler.handoff import PARAMS
from lmkv_client.connector.vllm_api import Request

HINTS = "kv_hints"
"""Name of the envelope in parameters and in responses."""
ENVELOPE_FIELDS = ("protocol_version", "message_id")
ACTION_FIELDS = ("action_id", "action_type", "action_version", "payload")


def envelope_of(request: Request) -> object | None:
    """The envelope of the request, or what it has in its place; None if it has no hints."""
    hints = getattr(request, HINTS, None)  # vLLM has it since 0.32
    if hints is not None:
        return _as_mapping(hints)
    params = request.kv_transfer_params
    fields = params.get(PARAMS) if isinstance(params, Mapping) else None
    return fields.get(HINTS) if isinstance(fields, Mapping) else None


def _as_mapping(envelope: object) -> object:
    """vLLM's `KvHintsEnvelope` as a mapping, with no more actions than are needed to see that there are too many."""
    if isinstance(envelope, Mapping):
        return envelope
    actions = getattr(envelope, "actions", None)
    if isinstance(actions, list):
        actions = [_fields(action, ACTION_FIELDS) for action in actions[: MAX_ACTIONS + 1]]
    return _fields(envelope, ENVELOPE_FIELDS) | {"actions": actions}


def _fields(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(value, name, None) for name in names}
