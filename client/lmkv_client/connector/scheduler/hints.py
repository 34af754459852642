"""The hints of one engine's requests: each is sent to the node, and has one outcome in the response.

request ──► hint ──► sent, for the prompt ──answer──► outcome: response, counter, span
                      └── the request has ended, and its last chunk is written: sent again, with the answer's chunks

In-process callers of vLLM pass `kv_hints`; clients of vLLM's HTTP API, which has no such field, use
`kv_transfer_params["lmkv"]["kv_hints"]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmkv import hints, telemetry
from lmkv.config import ConnectorConfig
from lmkv.hints import MAX_ACTIONS, Hint, HintOutcome, HintReason, HintResult
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.messages import ACTIONS, MAX_HINT_KEYS, from_proto
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.handoff import PARAMS
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.connector.scheduler.stores import Stores
from lmkv_client.connector.stats import hint_labels
from lmkv_client.connector.vllm_api import Request
from lmkv_client.engine.session import Session

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


@dataclass(kw_only=True, eq=False, slots=True)
class SentHint:
    """A hint that the node was sent."""

    hint: Hint
    hint_id: str
    state: RequestState
    sent_at: float
    result: HintResult | None = None
    """Once the node has answered."""

    @property
    def is_repeated(self) -> bool:
        """Whether it is sent again when the request has ended: it is about the request's own chunks."""
        return self.hint.tokens is None and not self.hint.action.brings_chunks


@dataclass(kw_only=True, eq=False, slots=True)
class HintedRequestState:
    """The hints of one request, until its response is made."""

    sent: list[SentHint] = field(default_factory=list)
    results: list[HintResult] = field(default_factory=list)
    """The outcomes of hints that were not sent."""


class RequestHints:
    """The hints of one engine. A hint that fails costs its request nothing."""

    def __init__(
        self, config: ConnectorConfig, session: Session[RequestLookup], stores: Stores, clock: Callable[[], float]
    ) -> None:
        self._is_enabled = config.accept_hints
        self._session = session
        self._stores = stores
        self._clock = clock
        self._requests: dict[str, HintedRequestState] = {}
        """The key is the request; its entry is removed when its response is made."""
        self._unanswered: dict[str, SentHint] = {}
        """The key is the id of the hint."""
        self._ended: list[SentHint] = []
        """Hints to repeat once all chunks of their finished requests are written."""
        self._hint_number = 0

    def __len__(self) -> int:
        """Hints and requests of which something is still to come."""
        return len(self._requests) + len(self._unanswered) + len(self._ended)

    def begin(self, request_id: str, envelope: object, state: RequestState | None) -> None:
        """Sends the hints of a new request; `state` is None if it is not cached. Raises nothing."""
        parsed = hints.parse(envelope, vocab_size=self._session.spec.vocab_size)
        hinted = self._requests[request_id] = HintedRequestState()
        for result in parsed.rejected:
            self._reject(hinted, result)
        for hint in parsed.hints:
            if not self._is_enabled:
                self._reject(hinted, _rejected(hint, HintReason.DISABLED, "accept_hints is off at this engine"))
            elif state is None:
                self._reject(hinted, _rejected(hint, HintReason.NOT_CACHED, "the request is not cached"))
            elif self._session.attachment is None:
                self._reject(hinted, _rejected(hint, HintReason.NO_NODE, "this engine has no node at the moment"))
            elif not (keys := self._keys(hint, state)):
                self._reject(hinted, _rejected(hint, HintReason.BAD_PAYLOAD, "the tokens are less than a chunk"))
            else:
                if hint.tokens is None and hint.token_count is not None:
                    state.store.expect_end(hint.token_count // self._session.spec.chunk_size)
                self._hint_number += 1
                sent = SentHint(
                    hint=hint,
                    hint_id=str(self._hint_number),
                    state=state,
                    sent_at=self._clock(),
                )
                hinted.sent.append(sent)
                self._unanswered[sent.hint_id] = sent
                self._send_hint(sent, keys, running=sent.is_repeated)

    def handle_answer(self, answer: pb.HintedChunks) -> None:
        """Records the outcome of a hint. The answer to a repeated hint changes nothing."""
        sent = self._unanswered.pop(answer.hint_id, None)
        if sent is None:
            return
        result = from_proto(answer.result, action_id=sent.hint.action_id, action=sent.hint.action)
        self._settle(sent, hints.settle(sent.hint, result))

    def finished(self, state: RequestState) -> None:
        """Handles the end of a request: `settle` repeats its hints once all is written."""
        hinted = self._requests.get(state.request_id)
        if hinted:
            self._ended += [sent for sent in hinted.sent if sent.is_repeated]
            self.settle()

    def settle(self) -> None:
        """Repeats the hints of finished requests of which no chunk will be written any more."""
        if not self._ended:
            return
        due = [sent for sent in self._ended if not self._stores.is_writing(sent.state)]
        self._ended = [sent for sent in self._ended if sent not in due]
        for sent in due:
            is_refused = sent.result is not None and sent.result.outcome is HintOutcome.REJECTED
            if not is_refused and (keys := self._last_keys(sent.hint, sent.state)):
                self._send_hint(sent, keys, running=False)

    def take_report(self, request_id: str) -> list[dict[str, Any]]:
        """The outcome of each action of a finished request, for its response. Empty if it has no hints."""
        hinted = self._requests.pop(request_id, None)
        if hinted is None:
            return []
        for sent in hinted.sent:
            if sent.result is None:
                self._unanswered.pop(sent.hint_id, None)
                self._settle(sent, _result(sent.hint, HintOutcome.DEFERRED))
        results = [*hinted.results, *(sent.result for sent in hinted.sent if sent.result)]
        return [result.to_json() for result in results]

    def node_lost(self) -> None:
        """The node is lost, and with it all that hints have kept there."""
        for sent in self._unanswered.values():
            self._settle(sent, _rejected(sent.hint, HintReason.NO_NODE, "the node was lost"))
        self._unanswered.clear()
        self._ended.clear()

    # --- Keys ----------------------------------------------------------------------------------------------------

    def _keys(self, hint: Hint, state: RequestState) -> Sequence[ChunkKey]:
        """The keys that a hint of a new request is about. Their root is the request's: its salt and its adapter."""
        if hint.tokens is None:
            return self._cut(hint, state.keys, state.token_count)
        chain = state.chain.beginning()
        chain.extend(hint.tokens)
        partial = chain.partial(hint.tokens) if self._session.spec.ends_anywhere else None
        return self._cut(hint, [*chain.keys, partial] if partial else chain.keys, hint.tokens.size)

    def _last_keys(self, hint: Hint, state: RequestState) -> Sequence[ChunkKey]:
        """The keys of a finished request: of prompt and answer, unless the hint is about the prompt's first tokens."""
        keys = list(state.chain.keys)
        if partial := state.store.partials.get(len(keys)):
            keys.append(partial)
        return self._cut(hint, keys, len(state.all_tokens))

    def _cut(self, hint: Hint, keys: Sequence[ChunkKey], token_count: int) -> Sequence[ChunkKey]:
        """The keys of the chunks that the first `Hint.token_count` tokens fill."""
        if hint.token_count is not None and hint.token_count < token_count:
            keys = keys[: hint.token_count // self._session.spec.chunk_size]
        return keys[:MAX_HINT_KEYS]

    # --- Messages ------------------------------------------------------------------------------------------------

    def _send_hint(self, sent: SentHint, keys: Sequence[ChunkKey], *, running: bool) -> None:
        hint = sent.hint
        message = pb.HintChunks(
            hint_id=sent.hint_id,
            action=ACTIONS[hint.action],
            chunk_keys=join_keys(keys),
            priority=hint.priority,
            root_key=sent.state.chain.namespace,
            running=running,
        )
        message.ttl.FromNanoseconds(int(hint.ttl_seconds * 1e9))
        self._session.send(pb.Act(hint=message))

    def _reject(self, hinted: HintedRequestState, result: HintResult) -> None:
        hinted.results.append(result)
        self._session.counters.add("hints", label=hint_labels(result.action, result.outcome))

    def _settle(self, sent: SentHint, result: HintResult) -> None:
        sent.result = result
        self._session.counters.add("hints", label=hint_labels(result.action, result.outcome))
        telemetry.record(
            "lmkv.hint",
            self._clock() - sent.sent_at,
            parent=sent.state.traceparent,
            action=result.action,
            outcome=result.outcome.value,
            reason=result.reason or "",
            chunk_count=result.chunk_count,
        )


def _rejected(hint: Hint, reason: HintReason, detail: str) -> HintResult:
    return hints.reject(hint.action_id, hint.action, reason, detail)


def _result(hint: Hint, outcome: HintOutcome) -> HintResult:
    return HintResult(action_id=hint.action_id, action=hint.action, outcome=outcome)
