"""`PromptSelector`, by which requests name the chunks of a prompt (tokens or keys), and the messages of hints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.duration_pb2 import Duration

from lmkv.hints import HintAction, HintOutcome, HintReason, HintResult
from lmkv.v1 import chunk_pb2
from lmkv.v1.prompt_pb2 import KeyPrompt, PromptSelector, TokenPrompt


def by_tokens(
    token_ids: Iterable[int], *, model_name: str = "", cache_salt: str = "", lora_name: str = ""
) -> PromptSelector:
    """Raises `ValueError` or `TypeError` if a token is not an int32."""
    tokens = TokenPrompt(token_ids=token_ids, model_name=model_name, cache_salt=cache_salt, lora_name=lora_name)
    return PromptSelector(tokens=tokens)


def by_keys(chunk_keys: Iterable[bytes], *, fingerprint: bytes = b"") -> PromptSelector:
    """Raises `TypeError` if a key is not `bytes`."""
    return PromptSelector(keys=KeyPrompt(chunk_keys=chunk_keys, fingerprint=fingerprint))


def names_chunks(prompt: PromptSelector) -> bool:
    return bool(prompt.tokens.token_ids or prompt.keys.chunk_keys)


MAX_HINT_KEYS = 32_768
"""Most chunks of one hint: 512 KiB of keys."""

ACTIONS: Mapping[HintAction, chunk_pb2.HintAction.ValueType] = {
    HintAction.SHARE: chunk_pb2.HINT_ACTION_SHARE,
    HintAction.PREFETCH: chunk_pb2.HINT_ACTION_PREFETCH,
    HintAction.PIN: chunk_pb2.HINT_ACTION_PIN,
    HintAction.RETAIN: chunk_pb2.HINT_ACTION_RETAIN,
    HintAction.DEMOTE: chunk_pb2.HINT_ACTION_DEMOTE,
    HintAction.EVICT: chunk_pb2.HINT_ACTION_EVICT,
    HintAction.REPLICATE: chunk_pb2.HINT_ACTION_REPLICATE,
}
"""The number of each action."""
ACTIONS_BY_NUMBER: Mapping[int, HintAction] = {number: action for action, number in ACTIONS.items()}
OUTCOMES: Mapping[HintOutcome, chunk_pb2.HintOutcome.ValueType] = {
    HintOutcome.ACCEPTED: chunk_pb2.HINT_OUTCOME_ACCEPTED,
    HintOutcome.CLIPPED: chunk_pb2.HINT_OUTCOME_CLIPPED,
    HintOutcome.DEFERRED: chunk_pb2.HINT_OUTCOME_DEFERRED,
    HintOutcome.REJECTED: chunk_pb2.HINT_OUTCOME_REJECTED,
    HintOutcome.MISSING: chunk_pb2.HINT_OUTCOME_MISSING,
}
OUTCOMES_BY_NUMBER: Mapping[int, HintOutcome] = {number: outcome for outcome, number in OUTCOMES.items()}

REASONS: Mapping[HintReason, chunk_pb2.HintReason.ValueType] = {
    reason: chunk_pb2.HintReason.Value(f"HINT_REASON_{reason.name}") for reason in HintReason
}
REASONS_BY_NUMBER: Mapping[int, HintReason] = {number: reason for reason, number in REASONS.items()}


def to_proto(result: HintResult) -> chunk_pb2.HintResult:
    """The message of a result."""
    return chunk_pb2.HintResult(
        outcome=OUTCOMES[result.outcome],
        chunk_count=result.chunk_count,
        ttl=Duration(seconds=int(result.ttl_seconds), nanos=int(result.ttl_seconds % 1 * 1e9)),
        reason=REASONS[result.reason] if result.reason else chunk_pb2.HINT_REASON_UNSPECIFIED,
        detail=result.detail,
    )


def from_proto(message: chunk_pb2.HintResult, *, action_id: str, action: HintAction) -> HintResult:
    """The result of an action. One with an unknown outcome counts as rejected."""
    return HintResult(
        action_id=action_id,
        action=action,
        outcome=OUTCOMES_BY_NUMBER.get(message.outcome, HintOutcome.REJECTED),
        reason=REASONS_BY_NUMBER.get(message.reason),
        detail=message.detail,
        chunk_count=message.chunk_count,
        ttl_seconds=message.ttl.ToNanoseconds() / 1e9,
    )
