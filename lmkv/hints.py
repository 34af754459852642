"""Hints about prompts (`kv_hints`): parses and bounds them, and names the outcome of each. Pure; used by connector,
node and coordinator.

An envelope is data of a client. Nothing in it raises: an action that cannot be carried out is rejected with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lmkv.errors import BadTokens
from lmkv.safe_text import safe_text

if TYPE_CHECKING:
    from lmkv.keys import Tokens

PROTOCOL_VERSIONS = ("0.1", "1.0")
"""Supported versions of the envelope."""
ACTION_VERSIONS = ("1.0",)
"""Supported versions of each action."""
TYPE_PREFIX = "kv."
"""Optional prefix of action types."""
MAX_ACTIONS = 16
"""Most actions in one envelope."""
MAX_ID_LENGTH = 128
"""Most characters of an action's id."""
MAX_TOKENS = 262_144
"""Most token ids in all actions of one envelope."""
MAX_TTL_SECONDS = 86_400.0
DEFAULT_TTL_SECONDS = 300.0
MAX_PRIORITY = 100
DEFAULT_PRIORITY = 50


class HintAction(StrEnum):
    """The action that a hint asks for."""

    SHARE = "share"
    """Write the chunks to the store that other instances read."""
    PREFETCH = "prefetch"
    """Bring the chunks into the pool."""
    PIN = "pin"
    """Keep the chunks in the pool."""
    RETAIN = "retain"
    """Evict the chunks after others."""
    DEMOTE = "demote"
    """Keep the chunks on disk or in the remote store, and evict them from the pool before others."""
    EVICT = "evict"
    """Drop the chunks."""
    REPLICATE = "replicate"
    """Bring a few chunks into the pool, while the node loads nothing else."""

    @property
    def brings_chunks(self) -> bool:
        """Whether chunks enter the pool, after the answer."""
        return self in (HintAction.PREFETCH, HintAction.REPLICATE)


class HintOutcome(StrEnum):
    """The end of an action. Each action has exactly one."""

    ACCEPTED = "accepted"
    """It was carried out, or has begun, for all chunks."""
    CLIPPED = "clipped"
    """The hint was accepted with a shorter time, a lower priority or fewer chunks than requested."""
    DEFERRED = "deferred"
    """It will be carried out for chunks that are not stored yet, or that a request uses."""
    REJECTED = "rejected"
    """It was not carried out; the reason says why."""
    MISSING = "missing"
    """None of the chunks is held."""


class HintReason(StrEnum):
    """Why an action was rejected."""

    MALFORMED = "malformed"
    """The envelope or the action lacks a field, or a field has another type."""
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_ACTION = "unknown_action"
    BAD_PAYLOAD = "bad_payload"
    """A field of the payload is unknown, or its value is out of range."""
    TOO_LARGE = "too_large"
    """The envelope has too many actions or tokens."""
    DUPLICATE_ID = "duplicate_id"
    DISABLED = "disabled"
    """The engine accepts no hints."""
    NOT_CACHED = "not_cached"
    """The request is not cached."""
    NO_NODE = "no_node"
    """The node is not reachable."""
    NO_TIER = "no_tier"
    """The node has no tier that the action needs."""
    IN_USE = "in_use"
    """Other prompts continue all of the chunks, or they are pinned."""
    QUOTA = "quota"
    """The share of the pool, or the number of hints, that the caller may have is in use."""
    FAILED = "failed"
    """The node could not carry it out; the detail says why."""
    BUSY = "busy"
    """The node loads other chunks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hint:
    """One valid action. What the envelope left out has its default."""

    action_id: str
    action: HintAction
    ttl_seconds: float = 0.0
    """`PIN` and `RETAIN` last for this time, at most `MAX_TTL_SECONDS`."""
    priority: int = 0
    """`RETAIN` has a priority of 1 to `MAX_PRIORITY`; chunks with lower ones are evicted first."""
    token_count: int | None = None
    """Only the prompt's first tokens; None: all."""
    tokens: Tokens | None = None
    """Another prompt than that of the request."""
    is_clipped: bool = False
    """Whether less is granted than was requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HintResult:
    """The result of one action, or of all in an envelope if `action_id` is empty."""

    action_id: str
    action: str
    """The action, or the first characters of an unknown type."""
    outcome: HintOutcome
    reason: HintReason | None = None
    """Why the action was rejected; None if it was not."""
    detail: str = ""
    """Says for people what was wrong."""
    chunk_count: int = 0
    """Chunks for which it was carried out by the time of the answer."""
    ttl_seconds: float = 0.0
    """Granted time."""

    def to_json(self) -> dict[str, Any]:
        """The result as a part of a response, without empty fields."""
        fields = {
            "action_id": self.action_id,
            "action": self.action,
            "outcome": self.outcome.value,
            "reason": self.reason and self.reason.value,
            "detail": self.detail,
            "chunk_count": self.chunk_count,
            "ttl": self.ttl_seconds,
        }
        return {name: value for name, value in fields.items() if value or name in ("action_id", "action", "outcome")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedHints:
    """The actions of one envelope: each is a hint or a rejected action."""

    hints: Sequence[Hint] = field(default=())
    rejected: Sequence[HintResult] = field(default=())


class _Refused(Exception):
    def __init__(self, reason: HintReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse(envelope: object, *, vocab_size: int = 0) -> ParsedHints:
    """Parses an envelope: `protocol_version`, `message_id` and `actions`, each a mapping. Raises nothing.

    An envelope that cannot be used is rejected as a whole: one result with an empty `action_id`.
    """
    try:
        actions = _actions(envelope)
    except _Refused as refused:
        return ParsedHints(rejected=[reject("", "", refused.reason, str(refused))])
    hints: list[Hint] = []
    rejected: list[HintResult] = []
    seen: set[str] = set()
    room = MAX_TOKENS
    for action in actions:
        try:
            hint = _hint(action, seen, room, vocab_size)
        except _Refused as refused:
            named = _text(action, "action_id"), _text(action, "action_type").removeprefix(TYPE_PREFIX)
            rejected.append(reject(*named, refused.reason, str(refused)))
            continue
        room -= hint.tokens.size if hint.tokens is not None else 0
        hints.append(hint)
    return ParsedHints(hints=hints, rejected=rejected)


def reject(action_id: str, action: str, reason: HintReason, detail: str = "") -> HintResult:
    """The result of an action that is not carried out."""
    return HintResult(action_id=action_id, action=action, outcome=HintOutcome.REJECTED, reason=reason, detail=detail)


def settle(hint: Hint, result: HintResult) -> HintResult:
    """The result of a hint that the parser may have clipped."""
    is_clipped = hint.is_clipped and result.outcome is HintOutcome.ACCEPTED
    return replace(result, outcome=HintOutcome.CLIPPED) if is_clipped else result


def _actions(envelope: object) -> Sequence[object]:
    if not isinstance(envelope, Mapping):
        raise _Refused(HintReason.MALFORMED, "kv_hints must be an object with protocol_version, message_id and actions")
    version, message_id, actions = (envelope.get(name) for name in ("protocol_version", "message_id", "actions"))
    if version not in PROTOCOL_VERSIONS:
        raise _Refused(
            HintReason.UNKNOWN_VERSION,
            f"protocol_version is {_shown(version)}; supported: {', '.join(PROTOCOL_VERSIONS)}",
        )
    if message_id is not None and not isinstance(message_id, str):
        raise _Refused(HintReason.MALFORMED, "message_id must be a string")
    if not isinstance(actions, list):
        raise _Refused(HintReason.MALFORMED, "actions must be a list")
    if len(actions) > MAX_ACTIONS:
        raise _Refused(HintReason.TOO_LARGE, f"more than {MAX_ACTIONS} actions")
    return actions


def _hint(action: object, seen: set[str], token_room: int, vocab_size: int) -> Hint:
    if not isinstance(action, Mapping):
        raise _Refused(HintReason.MALFORMED, "an action must be an object")
    action_id, kind, version, payload = (
        action.get(name) for name in ("action_id", "action_type", "action_version", "payload")
    )
    if not isinstance(action_id, str) or not 0 < len(action_id) <= MAX_ID_LENGTH or not action_id.isprintable():
        raise _Refused(HintReason.MALFORMED, f"action_id must be 1 to {MAX_ID_LENGTH} printable characters")
    if action_id in seen:
        raise _Refused(HintReason.DUPLICATE_ID, "an earlier action of the envelope has this action_id")
    seen.add(action_id)
    name = kind.removeprefix(TYPE_PREFIX) if isinstance(kind, str) else None
    if name is None or name not in _READERS:
        raise _Refused(HintReason.UNKNOWN_ACTION, f"action_type is {_shown(kind)}; supported: {', '.join(_READERS)}")
    if version not in ACTION_VERSIONS:
        raise _Refused(
            HintReason.UNKNOWN_VERSION, f"action_version is {_shown(version)}; supported: {', '.join(ACTION_VERSIONS)}"
        )
    if payload is None:
        payload = {}
    if not isinstance(payload, Mapping):
        raise _Refused(HintReason.MALFORMED, "payload must be an object")
    return _read(action_id, HintAction(name), payload, token_room, vocab_size)


_PROMPT = ("token_count", "tokens")
_READERS: Mapping[str, tuple[str, ...]] = {
    HintAction.SHARE.value: _PROMPT,
    HintAction.PREFETCH.value: _PROMPT,
    HintAction.PIN.value: (*_PROMPT, "ttl"),
    HintAction.RETAIN.value: (*_PROMPT, "ttl", "priority"),
    HintAction.DEMOTE.value: _PROMPT,
    HintAction.EVICT.value: _PROMPT,
    HintAction.REPLICATE.value: _PROMPT,
}
"""Fields of the payload, by action."""


def _read(action_id: str, action: HintAction, payload: Mapping[Any, Any], token_room: int, vocab_size: int) -> Hint:
    allowed = _READERS[action.value]
    if len(payload) > len(allowed) or any(name not in allowed for name in payload):
        unknown = next(name for name in payload if name not in allowed)
        raise _Refused(HintReason.BAD_PAYLOAD, f"unknown field {_shown(unknown)}; {action} has {', '.join(allowed)}")
    ttl, is_short = bounded_ttl(payload.get("ttl")) if "ttl" in allowed else (0.0, False)
    priority, is_low = _priority(payload.get("priority")) if "priority" in allowed else (0, False)
    return Hint(
        action_id=action_id,
        action=action,
        ttl_seconds=ttl,
        priority=priority,
        token_count=_token_count(payload.get("token_count")),
        tokens=_tokens(payload.get("tokens"), token_room, vocab_size),
        is_clipped=is_short or is_low,
    )


def bounded_ttl(value: object) -> tuple[float, bool]:
    """The granted seconds of a requested number of them, or the default; and whether it was clipped."""
    if value is None:
        return DEFAULT_TTL_SECONDS, False
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refused(HintReason.BAD_PAYLOAD, "ttl must be a number of seconds")
    if isinstance(value, float) and math.isnan(value):
        raise _Refused(HintReason.BAD_PAYLOAD, "ttl must be a number of seconds")
    if value <= 0:
        raise _Refused(HintReason.BAD_PAYLOAD, "ttl must be positive")
    return (MAX_TTL_SECONDS, True) if value > MAX_TTL_SECONDS else (float(value), False)


def _priority(value: object) -> tuple[int, bool]:
    if value is None:
        return DEFAULT_PRIORITY, False
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Refused(HintReason.BAD_PAYLOAD, f"priority must be a whole number from 1 to {MAX_PRIORITY}")
    return (MAX_PRIORITY, True) if value > MAX_PRIORITY else (value, False)


def _token_count(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Refused(HintReason.BAD_PAYLOAD, "token_count must be a positive number of tokens")
    return value


def _tokens(value: object, room: int, vocab_size: int) -> Tokens | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise _Refused(HintReason.BAD_PAYLOAD, "tokens must be a list of token ids")
    if len(value) > room:
        raise _Refused(HintReason.TOO_LARGE, f"all tokens of an envelope together may be at most {MAX_TOKENS}")
    from lmkv.keys import as_tokens  # it imports NumPy, which `lmkv hint --help` can do without

    try:
        return as_tokens(value, vocab_size)
    except BadTokens as error:
        raise _Refused(HintReason.BAD_PAYLOAD, _cut(str(error))) from None


def _text(action: object, name: str) -> str:
    value = action.get(name) if isinstance(action, Mapping) else None
    return _cut(value) if isinstance(value, str) else ""


def _shown(value: object) -> str:
    return repr(_cut(value)) if isinstance(value, str) else "missing" if value is None else "not a string"


def _cut(text: str) -> str:
    return safe_text(text[:MAX_ID_LENGTH], MAX_ID_LENGTH)
