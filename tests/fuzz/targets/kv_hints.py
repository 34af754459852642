"""`kv_hints` of clients: any JSON is answered action by action, within bounds; results pass through their message."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec

from lmkv.hints import (
    MAX_ACTIONS,
    MAX_ID_LENGTH,
    MAX_PRIORITY,
    MAX_TOKENS,
    MAX_TTL_SECONDS,
    HintOutcome,
    HintReason,
    HintResult,
    parse,
    reject,
    settle,
)
from lmkv.rpc.messages import from_proto, to_proto

COVERS = ("lmkv.hints", "lmkv.rpc.messages", "lmkv.safe_text", "lmkv.keys")


def _envelope(*actions: object, **fields: object) -> bytes:
    return json.dumps({"protocol_version": "1.0", "message_id": "m", "actions": actions} | fields).encode()


def _action(kind: str, **payload: object) -> dict[str, object]:
    return {"action_id": kind, "action_type": f"kv.{kind}", "action_version": "1.0", "payload": payload}


SEEDS = [
    _envelope(_action("pin", ttl=60, tokens=[1, 2, 3]), _action("retain", ttl=1e9, priority=200)),
    _envelope(_action("share", token_count=10), _action("evict"), _action("demote"), _action("prefetch")),
    _envelope(_action("pin", ttl=True), _action("pin", tokens=[-1]), _action("x"), [], protocol_version="9"),
    b'{"protocol_version":"0.1","actions":[{"action_id":"\\u0000"},{"action_id":"a","action_type":5}]}',
    b'{"protocol_version":[],"actions":{}}',
]


def run(data: bytes) -> None:
    """Parses an envelope as the proxy's and as the engine's JSON decoder read it."""
    for decode in (json.loads, msgspec.json.decode):
        with suppress(ValueError, RecursionError):  # not JSON: refused before
            _check(decode(data))


def _check(envelope: object) -> None:
    parsed = parse(envelope, vocab_size=1000)
    assert len(parsed.hints) + len(parsed.rejected) <= max(MAX_ACTIONS, 1)
    if isinstance(envelope, dict) and isinstance(actions := envelope.get("actions"), list) and len(actions) > 0:
        is_whole = len(parsed.rejected) == 1 and not parsed.rejected[0].action_id
        assert is_whole or len(parsed.hints) + len(parsed.rejected) == len(actions), "an action without an outcome"
    ids = [hint.action_id for hint in parsed.hints]
    assert len(set(ids)) == len(ids)
    assert sum(hint.tokens.size for hint in parsed.hints if hint.tokens is not None) <= MAX_TOKENS
    for hint in parsed.hints:
        assert 0 < len(hint.action_id) <= MAX_ID_LENGTH
        assert 0 <= hint.ttl_seconds <= MAX_TTL_SECONDS
        assert 0 <= hint.priority <= MAX_PRIORITY
        assert hint.token_count is None or hint.token_count > 0
        assert hint.tokens is None or hint.tokens.max() < 1000
        accepted = HintResult(
            action_id=hint.action_id, action=hint.action, outcome=HintOutcome.ACCEPTED, ttl_seconds=hint.ttl_seconds
        )
        result = settle(hint, accepted)
        assert (result.outcome is HintOutcome.CLIPPED) == hint.is_clipped
        message = to_proto(result)
        back = from_proto(message, action_id=hint.action_id, action=hint.action)
        assert back.outcome is result.outcome
        assert abs(back.ttl_seconds - result.ttl_seconds) < 1e-6
    for rejected in parsed.rejected:
        assert rejected.outcome is HintOutcome.REJECTED
        assert rejected.reason in set(HintReason)
        assert (rejected.action_id + rejected.action).isprintable()
        assert len(json.dumps(rejected.to_json())) <= 4096, "an unbounded answer"
        to_proto(reject(rejected.action_id, rejected.action, rejected.reason, rejected.detail))
