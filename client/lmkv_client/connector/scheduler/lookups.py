"""Lookups of requests at the node, and the chunks that are fetched before a step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmkv.config import ConnectorConfig
from lmkv.misses import LossMemory, MissReason, reason_to_proto
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import MISS_REASON_NEVER_STORED, MISS_REASON_SKIPPED, PromptSpan
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.engine.hit_sources import HitSources
from lmkv_client.engine.prompt_account import failure_reason
from lmkv_client.engine.session import LookupState, Session
from lmkv_client.engine.speeds import is_too_late

HOLD_SECONDS = 10.0
"""A request that waits longer for pages releases its chunks at the node, and is looked up again."""
GRACE_SECONDS = 0.001
"""Time that a step waits for the answer of a lookup: another step may be much later."""
LONE_GRACE_SECONDS = 0.005
"""The same where the request is the only one: the step has nothing else to do."""


class RequestLookups:
    """The lookups of one engine's requests."""

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session[RequestLookup],
        clock: Callable[[], float],
        skipped: LossMemory,
    ) -> None:
        """`skipped` has the chunks that this engine has computed and not stored."""
        self._config = config
        self._session = session
        self._clock = clock
        self._skipped = skipped

    def start(self, state: RequestState, wanted: Sequence[int]) -> None:
        """Looks a request up, and asks for write credits for absent chunks: `wanted` are to be available, by part."""
        session = self._session
        lookup = state.lookup = RequestLookup(
            request=state,
            account=state.account,
            keys=state.asked_keys,
            tokens=state.asked_tokens if state.has_tails else None,
            root=state.chain.root,
            extras=state.extras,
            handoff_id=state.handoff_id,
            worth_seconds=self._worth_seconds(state),
            prefill_tokens_per_second=self._tokens_per_second(state),
        )
        if session.look_up(lookup, self._clock(), traceparent=state.traceparent, wanted=wanted):
            session.counters.add("lookups")
            # The first span of a request is the root of the others.
            state.traceparent = state.traceparent or lookup.span.traceparent

    def _tokens_per_second(self, state: RequestState) -> int:
        """The rate at which the engine would compute the prompt, the wait for the prompts before it and of those behind
        it included: what is loaded meanwhile is free. 0 if that is not known, or does not matter."""
        if not self._config.refuse_slow_fetches:
            return 0
        return self._session.computing_rate(state.request_id, state.token_count, self._clock())

    def postpone(self, state: RequestState) -> None:
        """Has the request wait for a lookup that `start` sends later."""
        state.account.unanswered(MissReason.LOOKUP_TIMEOUT)
        state.lookup = RequestLookup(
            request=state, account=state.account, state=LookupState.ASKED, asked_at=self._clock()
        )

    def found(self, lookup: RequestLookup, found: pb.FoundChunks) -> None:
        """Handles the answer to a lookup."""
        state, counters = lookup.request, self._session.counters
        lookup.waited_seconds = self._clock() - lookup.asked_at
        counters.add("lookup_seconds", lookup.waited_seconds)
        counters.add("refused_fetch_tokens", found.refused_chunk_count * state.chunk_size)
        state.mark_held(lookup.hit_count(pool_only=True))
        state.store.expect_end(found.prefix_chunk_count)
        self._session.queue.expect(state.request_id, state.token_count - lookup.tokens_in(lookup.sources.chunk_count))
        hit_count = lookup.sources.chunk_count
        self._refine(state, lookup.partial.index if lookup.partial else hit_count, found.missed)
        state.account.answered(lookup.tokens_in(hit_count), found.missed)

    def late(self, lookup: RequestLookup, found: pb.FoundChunks) -> None:
        """Handles an answer that arrives too late: the prompt was computed; chunks that are held need not be stored."""
        held = lookup.request.items.chunks_of(len(found.own), HitSources.of_answer(found))
        ends_in_partial = bool(found.partial_key) and not found.runs
        lookup.request.mark_held(max(0, held - ends_in_partial))

    def _refine(self, state: RequestState, index: int, missed: Iterable[PromptSpan]) -> None:
        """Adds what only this engine knows of chunks that were never stored; `missed` begins with chunk `index`."""
        for span in missed:
            if span.reason == MISS_REASON_NEVER_STORED and index < len(state.keys):
                if self._skipped.get(state.keys[index]):
                    span.reason = MISS_REASON_SKIPPED
                elif index == 0 and state.account.seen_elsewhere:
                    span.reason = reason_to_proto(state.account.seen_elsewhere)
            index += span.chunk_count

    def is_pending(self, state: RequestState) -> bool:
        """Whether the request is to wait for its answer or for chunks that are fetched. Ends waits that time out."""
        lookup, now = state.lookup, self._clock()
        if lookup.state is LookupState.ASKED:
            seconds = max(self._config.lookup_timeout, self._worth_seconds(state))
            if now < lookup.asked_at + seconds:
                return True
            self._session.counters.add("lookup_seconds", now - lookup.asked_at)
            self._session.time_out(lookup, seconds, now)
        elif lookup.state is LookupState.LOADING:
            if now < lookup.found_at + state.load_timeout:
                if not (absent_count := self._absent_if_too_late(state, now)):
                    return True
                self._session.counters.add("abandoned_tokens", absent_count)
                lookup.account.unused = MissReason.SLOWER
            else:
                self._session.counters.add("load_failures")
            lookup.state = LookupState.FOUND  # what arrives later is not used
            self._fetched(lookup)
        return False

    def _absent_if_too_late(self, state: RequestState, now: float) -> int:
        """The tokens of a fetch that are computed faster than they come; 0: the request waits for it."""
        lookup = state.lookup
        if not self._config.refuse_slow_fetches or state.handoff_id:
            return 0
        held_count = len(lookup.chunks)
        absent_count = lookup.tokens_in(held_count + lookup.absent_count) - lookup.tokens_in(held_count)
        seconds = self._session.computing_seconds(state.request_id, absent_count, now)
        is_late = seconds > 0 and is_too_late(now - lookup.found_at, 0, absent_count, seconds)
        return absent_count if is_late else 0

    def grace_seconds(self, state: RequestState, *, is_alone: bool) -> float:
        """Returns how long this step may wait for the answer, 0 or less: not at all. The next step may be far away."""
        lookup = state.lookup
        if lookup.state is not LookupState.ASKED or not lookup.lookup_id:
            return 0.0
        return lookup.asked_at + (LONE_GRACE_SECONDS if is_alone else GRACE_SECONDS) - self._clock()

    def is_stale(self, state: RequestState) -> bool:
        """Whether the node has held chunks for this request for too long."""
        return state.lookup.state is LookupState.FOUND and self._clock() > state.lookup.found_at + HOLD_SECONDS

    def fetch(self, state: RequestState) -> None:
        """Brings absent chunks into the pool before the request is given pages."""
        lookup = state.lookup
        lookup.found_at = self._clock()
        first, count = len(lookup.chunks), lookup.absent_count
        self._session.load(lookup, first, count, state.load_timeout, traceparent=state.traceparent)

    def loaded(self, lookup: RequestLookup, loaded: pb.LoadedChunks) -> None:
        """Handles the end of a fetch."""
        if loaded.done:
            size = lookup.account.chunk_size
            tier = lookup.sources.tier_at(lookup.request.tokens_in(len(lookup.chunks)), size)
            lookup.account.unused = failure_reason(loaded, tier)
            self._fetched(lookup)

    def _fetched(self, lookup: RequestLookup) -> None:
        lookup.absent_count = 0
        lookup.request.mark_held(len(lookup.chunks))
        now = self._clock()
        lookup.waited_seconds += now - lookup.found_at
        lookup.found_at = now

    def _worth_seconds(self, state: RequestState) -> float:
        """The time that a lookup of the prompt is worth: of what vLLM has not computed."""
        return self._session.worth_of(state.token_count - state.computed_count)
