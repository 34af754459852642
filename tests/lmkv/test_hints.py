"""Hints of clients: what is accepted, and that nothing a client sends does more than being rejected."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv import hints
from lmkv.hints import Hint, HintAction, HintOutcome, HintReason, HintResult


def action(kind: object = "pin", payload: object = None, **fields: object) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload} | fields


def envelope(*actions: object, **fields: object) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)} | fields


def parsed(kind: str, payload: object = None) -> Hint:
    found = hints.parse(envelope(action(kind, payload)))
    assert not found.rejected
    (hint,) = found.hints
    return hint


def rejected(message: object) -> HintResult:
    found = hints.parse(message)
    assert not found.hints
    (result,) = found.rejected
    assert result.outcome is HintOutcome.REJECTED
    assert result.detail
    return result


@pytest.mark.parametrize("name", list(HintAction))
@pytest.mark.parametrize("prefix", ["", "kv."])
def test_each_action_is_known_with_and_without_the_prefix(name: HintAction, prefix: str) -> None:
    hint = parsed(prefix + name, {"token_count": 7, "tokens": [1, 2, 3]})
    assert (hint.action_id, hint.action, hint.token_count, hint.is_clipped) == ("a", name, 7, False)
    assert hint.tokens is not None
    assert hint.tokens.tolist() == [1, 2, 3]


def test_what_a_payload_leaves_out_has_its_default() -> None:
    assert parsed("pin").ttl_seconds == hints.DEFAULT_TTL_SECONDS
    assert parsed("pin").tokens is None
    assert parsed("pin").token_count is None
    assert (parsed("retain").ttl_seconds, parsed("retain").priority) == (
        hints.DEFAULT_TTL_SECONDS,
        hints.DEFAULT_PRIORITY,
    )
    assert (parsed("evict").ttl_seconds, parsed("evict").priority) == (0, 0)


@pytest.mark.parametrize("ttl", [10**18, 10**400, math.inf, 86_400.5])
def test_a_long_ttl_is_clipped(ttl: float) -> None:
    hint = parsed("retain", {"ttl": ttl})
    assert (hint.ttl_seconds, hint.is_clipped) == (hints.MAX_TTL_SECONDS, True)
    accepted = HintResult(action_id="a", action="retain", outcome=HintOutcome.ACCEPTED)
    assert hints.settle(hint, accepted).outcome is HintOutcome.CLIPPED
    deferred = HintResult(action_id="a", action="retain", outcome=HintOutcome.DEFERRED)
    assert hints.settle(hint, deferred) is deferred


def test_a_ttl_and_a_priority_in_range_are_granted() -> None:
    hint = parsed("retain", {"ttl": 86_400, "priority": 100})
    assert (hint.ttl_seconds, hint.priority, hint.is_clipped) == (86_400.0, 100, False)
    result = HintResult(action_id="a", action="retain", outcome=HintOutcome.ACCEPTED)
    assert hints.settle(hint, result) is result


def test_a_high_priority_is_clipped() -> None:
    hint = parsed("retain", {"priority": 10**30})
    assert (hint.priority, hint.is_clipped) == (hints.MAX_PRIORITY, True)


@pytest.mark.parametrize(
    ("kind", "payload", "named"),
    [
        ("pin", {"ttl": -(2**63)}, "ttl"),
        ("pin", {"ttl": 0}, "ttl"),
        ("pin", {"ttl": math.nan}, "ttl"),
        ("pin", {"ttl": "300"}, "ttl"),
        ("pin", {"ttl": True}, "ttl"),
        ("retain", {"priority": 0}, "priority"),
        ("retain", {"priority": 1.5}, "priority"),
        ("pin", {"priority": 1}, "'priority'"),
        ("evict", {"ttl": 5}, "'ttl'"),
        ("pin", {"token_count": 0}, "token_count"),
        ("pin", {"token_count": True}, "token_count"),
        ("pin", {"tokens": []}, "tokens"),
        ("pin", {"tokens": "1,2"}, "tokens"),
        ("pin", {"tokens": [1, -2]}, "-2"),
        ("pin", {"tokens": [1, [2]]}, "tokens"),
        ("pin", {"tokens": [1, 2**70]}, "tokens"),
        ("pin", {"tokens": [1.5]}, "tokens"),
        ("pin", {1: 1}, "field"),
        ("pin", {"x" * 10**6: 1}, "x"),
    ],
)
def test_a_payload_out_of_range_is_rejected_and_its_field_named(kind: str, payload: object, named: str) -> None:
    result = rejected(envelope(action(kind, payload)))
    assert result.reason == HintReason.BAD_PAYLOAD
    assert named in result.detail
    assert len(result.detail) < 400


def test_tokens_beyond_the_vocabulary_are_rejected() -> None:
    found = hints.parse(envelope(action("pin", {"tokens": [5, 99]})), vocab_size=99)
    assert found.rejected[0].reason == HintReason.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"action_type": "kv.fetch"}, HintReason.UNKNOWN_ACTION),
        ({"action_type": "kv.kv.pin"}, HintReason.UNKNOWN_ACTION),
        ({"action_type": None}, HintReason.UNKNOWN_ACTION),
        ({"action_type": ["pin"]}, HintReason.UNKNOWN_ACTION),
        ({"action_version": "2.0"}, HintReason.UNKNOWN_VERSION),
        ({"action_version": 1.0}, HintReason.UNKNOWN_VERSION),
        ({"action_version": None}, HintReason.UNKNOWN_VERSION),
        ({"action_id": ""}, HintReason.MALFORMED),
        ({"action_id": 7}, HintReason.MALFORMED),
        ({"action_id": "x" * 10**6}, HintReason.MALFORMED),
        ({"action_id": "a\ud800"}, HintReason.MALFORMED),
        ({"action_id": "a\n"}, HintReason.MALFORMED),
        ({"payload": []}, HintReason.MALFORMED),
    ],
)
def test_an_action_that_cannot_be_used_is_rejected_alone(change: dict[str, object], reason: HintReason) -> None:
    good = action("evict", action_id="good")
    found = hints.parse(envelope(action() | change, good))
    assert [hint.action_id for hint in found.hints] == ["good"]
    (result,) = found.rejected
    assert result.reason == reason
    json.dumps(result.to_json()).encode()
    f"{result.to_json()}".encode()
    assert len(f"{result.to_json()}") < 1000


def test_a_rejected_type_and_version_are_named() -> None:
    assert "'kv.fetch'" in rejected(envelope(action("kv.fetch"))).detail
    assert "'2.0'" in rejected(envelope(action(action_version="2.0"))).detail
    assert "'9.9'" in rejected(envelope(action(), protocol_version="9.9")).detail


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, HintReason.MALFORMED),
        ([], HintReason.MALFORMED),
        ("pin", HintReason.MALFORMED),
        ({}, HintReason.UNKNOWN_VERSION),
        (envelope(protocol_version=["0.1"]), HintReason.UNKNOWN_VERSION),
        (envelope(actions={"a": 1}), HintReason.MALFORMED),
        (envelope(message_id=3), HintReason.MALFORMED),
        (envelope(*[action(action_id=str(at)) for at in range(hints.MAX_ACTIONS + 1)]), HintReason.TOO_LARGE),
        (envelope(*[None] * 10**5), HintReason.TOO_LARGE),
    ],
)
def test_an_envelope_that_cannot_be_used_is_rejected_once_as_a_whole(message: object, reason: HintReason) -> None:
    result = rejected(message)
    assert (result.action_id, result.reason) == ("", reason)


def test_as_many_actions_as_are_allowed_are_taken() -> None:
    found = hints.parse(envelope(*[action(action_id=str(at)) for at in range(hints.MAX_ACTIONS)]))
    assert len(found.hints) == hints.MAX_ACTIONS


def test_an_id_counts_once() -> None:
    found = hints.parse(envelope(action("pin"), action("evict")))
    assert [hint.action for hint in found.hints] == [HintAction.PIN]
    assert [result.reason for result in found.rejected] == [HintReason.DUPLICATE_ID]


def test_the_tokens_of_all_actions_together_are_bounded() -> None:
    most = [1] * hints.MAX_TOKENS
    found = hints.parse(
        envelope(
            action("pin", {"tokens": [*most, 1]}, action_id="more"),
            action("pin", {"tokens": most}, action_id="all"),
            action("pin", {"tokens": [1]}, action_id="one"),
        )
    )
    assert [hint.action_id for hint in found.hints] == ["all"]
    assert {result.action_id: result.reason for result in found.rejected} == {
        "more": HintReason.TOO_LARGE,
        "one": HintReason.TOO_LARGE,
    }


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(("ttl", "priority", "token_count", "tokens", "other"), JSON)
ACTIONS = st.fixed_dictionaries(
    {},
    optional={
        "action_id": st.text(max_size=3) | JSON,
        "action_type": st.sampled_from([*HintAction, "kv.pin", "fetch"]) | JSON,
        "action_version": st.just("1.0") | JSON,
        "payload": st.fixed_dictionaries({}, optional=FIELDS) | JSON,
    },
)


@given(actions=st.lists(ACTIONS | JSON, max_size=hints.MAX_ACTIONS))
def test_each_action_of_any_envelope_has_exactly_one_place(actions: list[Any]) -> None:
    found = hints.parse(envelope(*actions))
    assert len(found.hints) + len(found.rejected) == len(actions)
    assert len({hint.action_id for hint in found.hints}) == len(found.hints)
    for hint in found.hints:
        assert 0 <= hint.ttl_seconds <= hints.MAX_TTL_SECONDS
        assert 0 <= hint.priority <= hints.MAX_PRIORITY
    for result in found.rejected:
        assert result.outcome is HintOutcome.REJECTED
        f"{result.to_json()}".encode()


def test_a_result_in_json_leaves_out_what_is_empty() -> None:
    result = HintResult(action_id="a", action="pin", outcome=HintOutcome.ACCEPTED, chunk_count=3, ttl_seconds=1.5)
    assert result.to_json() == {"action_id": "a", "action": "pin", "outcome": "accepted", "chunk_count": 3, "ttl": 1.5}


def test_bounds_belong_to_what_is_accepted() -> None:
    assert parsed("retain", {"priority": 1}).priority == 1
    above = parsed("retain", {"priority": hints.MAX_PRIORITY + 1})
    assert (above.priority, above.is_clipped) == (hints.MAX_PRIORITY, True)
    assert parsed("pin", {"token_count": 1}).token_count == 1
    assert parsed("pin", {"ttl": 0.001}).ttl_seconds == 0.001
    longest = "x" * hints.MAX_ID_LENGTH
    assert [hint.action_id for hint in hints.parse(envelope(action(action_id=longest))).hints] == [longest]
    assert rejected(envelope(action(action_id=f"{longest}x"))).reason == HintReason.MALFORMED


@pytest.mark.parametrize("version", hints.PROTOCOL_VERSIONS)
def test_each_supported_version_is_accepted_with_or_without_a_message_id(version: str) -> None:
    for message_id in ("m", None):
        found = hints.parse(envelope(action(), protocol_version=version, message_id=message_id))
        assert (len(found.hints), found.rejected) == (1, [])


def test_a_rejected_action_is_named_by_its_id_and_its_type_without_the_prefix() -> None:
    result = rejected(envelope(action("kv.fetch")))
    assert (result.action_id, result.action) == ("a", "fetch")
    result = rejected(envelope({"action_id": 7}))
    assert (result.action_id, result.action) == ("", "")
    result = rejected(envelope(action("x" * 1000)))
    assert result.action == "x" * hints.MAX_ID_LENGTH


def test_what_is_missing_or_no_string_is_said_in_words() -> None:
    assert "action_type is missing" in rejected(envelope(action(None))).detail
    assert "action_type is not a string" in rejected(envelope(action(7))).detail
    assert "protocol_version is missing" in rejected({"actions": []}).detail


def test_a_payload_with_as_many_fields_as_are_known_is_accepted() -> None:
    assert parsed("pin", {"tokens": [1], "token_count": 1, "ttl": 1}).ttl_seconds == 1
    assert rejected(envelope(action("share", {"tokens": [1], "token_count": 1, "x": 1}))).detail.startswith(
        "unknown field 'x'; share has token_count, tokens"
    )


def test_rejected_tokens_leave_room_for_others() -> None:
    most = [1] * hints.MAX_TOKENS
    found = hints.parse(envelope(action("pin", {"tokens": [*most, 1]}), action("pin", {"tokens": most}, action_id="b")))
    assert [hint.action_id for hint in found.hints] == ["b"]


def test_only_an_accepted_result_of_a_clipped_hint_is_clipped() -> None:
    hint = parsed("retain", {"priority": 1000})
    for outcome in set(HintOutcome) - {HintOutcome.ACCEPTED}:
        result = HintResult(action_id="a", action="retain", outcome=outcome)
        assert hints.settle(hint, result) is result


def test_what_a_hint_and_a_result_are_made_without_is_nothing() -> None:
    hint = Hint(action_id="a", action=HintAction.PIN)
    assert (hint.ttl_seconds, hint.priority, hint.token_count, hint.tokens, hint.is_clipped) == (
        0,
        0,
        None,
        None,
        False,
    )
    rejection = {"action_id": "a", "action": "pin", "outcome": "rejected", "reason": "quota"}
    assert hints.reject("a", "pin", HintReason.QUOTA).to_json() == rejection
