"""Lookups of requests at the node, and the release of the chunks that the node holds for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, join_keys
from lmkv.misses import LossMemory, MissReason, reason_name, reason_to_proto
from lmkv.runtime.patience import Suspicion, worth_seconds
from lmkv.telemetry import SpanKind
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import MISS_REASON_NEVER_STORED, MISS_REASON_SKIPPED, PromptSpan
from lmkv_client.connector.scheduler.request_state import LookupState, PartialChunk, RequestState
from lmkv_client.connector.stats import ConnectorCounters
from lmkv_client.engine.attachment import Send
from lmkv_client.engine.prompts.hit_sources import HitSources
from lmkv_client.engine.prompts.lookup_message import lookup_message
from lmkv_client.engine.prompts.prefill_rate import PrefillRate
from lmkv_client.engine.prompts.prompt_account import failure_reason

HOLD_SECONDS = 10.0
"""A request that waits longer for pages releases its chunks at the node, and is looked up again."""
GRACE_SECONDS = 0.001
"""Time that a step waits for the answer of a lookup: another step may be much later."""
LONE_GRACE_SECONDS = 0.005
"""The same where the request is the only one: the step has nothing else to do."""


class RequestLookups:
    """The lookups of one engine. Each has an id, under which the node holds its chunks."""

    def __init__(
        self,
        config: ConnectorConfig,
        send: Send,
        counters: ConnectorCounters,
        clock: Callable[[], float],
        prefill: PrefillRate,
        skipped: LossMemory,
    ) -> None:
        """`skipped` has the chunks that this engine has computed and not stored."""
        self._config = config
        self._send = send
        self._counters = counters
        self._clock = clock
        self._prefill = prefill
        self._skipped = skipped
        self._states: dict[str, RequestState] = {}
        """By lookup id, as long as an answer may arrive."""
        self._lookup_number = 0
        self._suspicion = Suspicion()

    def __len__(self) -> int:
        return len(self._states)

    def start(self, state: RequestState, reserve_counts: Callable[[], list[int]]) -> None:
        """Looks a request up, and asks for write credits for absent chunks. Sends nothing while the node is suspect."""
        now = self._clock()
        asked = state.asked_keys
        worth = self._worth_seconds(state)
        if not asked or self._suspicion.concerns(worth, now):
            state.account.unanswered(MissReason.NODE_SUSPECT if asked else MissReason.UNCACHEABLE)
            state.end_lookup()
            return
        state.account.unanswered(MissReason.LOOKUP_TIMEOUT)
        self._lookup_number += 1
        state.lookup_id = str(self._lookup_number)
        state.lookup_state = LookupState.ASKED
        state.looked_up_at = now
        self._states[state.lookup_id] = state
        self._counters.add("lookups")
        state.lookup_span = telemetry.begin(
            "lmkv.lookup", parent=state.traceparent, kind=SpanKind.CLIENT, asked_tokens=state.token_count
        )
        state.traceparent = (
            state.traceparent or state.lookup_span.traceparent
        )  # the first span of a request is the root of the others
        wanted = reserve_counts()
        has_tokens = self._config.stores_partial_chunks and not state.has_parts
        lookup = lookup_message(
            state.lookup_id,
            asked,
            tokens=state.tokens if has_tokens else None,
            root=state.chain.root,
            extras=state.extras,
        )
        lookup.reserve_count = wanted[0]
        lookup.part_reserve_counts.extend(wanted[1:])
        lookup.traceparent = state.lookup_span.traceparent
        lookup.handoff_id = state.handoff_id
        if worth:
            lookup.budget.FromNanoseconds(int(worth * 1e9))
        if self._config.refuse_slow_fetches:
            lookup.prefill_tokens_per_second = self._prefill.tokens_per_second
        self._send(pb.Act(lookup=lookup))

    def postpone(self, state: RequestState) -> None:
        """Has the request wait for a lookup that `start` sends later."""
        state.account.unanswered(MissReason.LOOKUP_TIMEOUT)
        state.lookup_id = ""
        state.lookup_state = LookupState.ASKED
        state.looked_up_at = self._clock()

    def handle_found(self, found: pb.FoundChunks) -> None:
        """Handles the answer to a lookup; one that arrives too late is released."""
        self._suspicion.end()
        state = self._states.pop(found.lookup_id, None)
        if state is None or state.lookup_state is not LookupState.ASKED or state.lookup_id != found.lookup_id:
            if state and not state.has_parts:  # too late: it was computed; chunks that are held need not be stored
                state.mark_held(len(found.own) - (bool(found.partial_key) and not found.runs))
            self.release_lookup(found.lookup_id)
            return
        state.waited_seconds = self._clock() - state.looked_up_at
        self._counters.add("lookup_seconds", state.waited_seconds)
        self._counters.add("refused_fetch_tokens", found.refused_chunk_count * state.chunk_size)
        sources = HitSources.of_answer(found)
        partial = _partial(found, sources)
        if found.missed:
            self._refine(state, partial.index if partial else sources.chunk_count, found.missed)
            state.lookup_span.set(miss_reasons=[reason_name(span.reason) for span in found.missed])
        state.set_found(found.own, sources, found.peer_instance_id, self._clock(), partial)
        state.account.answered(state.found_tokens(state.found_chunks()), found.missed)

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
        if state.lookup_state is LookupState.ASKED:
            now, seconds = self._clock(), max(self._config.lookup_timeout, self._worth_seconds(state))
            if now < state.looked_up_at + seconds:
                return True
            self._counters.add("lookup_timeouts")
            self._counters.add("lookup_seconds", now - state.looked_up_at)
            self._suspicion.timed_out(state.looked_up_at, now)
            state.lookup_span.fail("timeout", f"no answer within {seconds:.3g} s (lookup_timeout)")
            state.end_lookup_span(HitSources())
            state.lookup_state = LookupState.OVER  # its id stays known: the answer may still arrive
        elif state.lookup_state is LookupState.FETCHING:
            if self._clock() < state.found_at + state.load_timeout:
                return True
            self._counters.add("load_failures")
            self._fetched(state)
        return False

    def grace_seconds(self, state: RequestState, *, is_alone: bool) -> float:
        """How long this step may still wait for the answer: another step may be much later. 0 or less: not at all."""
        if state.lookup_state is not LookupState.ASKED or not state.lookup_id:
            return 0.0
        return state.looked_up_at + (LONE_GRACE_SECONDS if is_alone else GRACE_SECONDS) - self._clock()

    def is_stale(self, state: RequestState) -> bool:
        """Whether the node has held chunks for this request for too long."""
        return state.lookup_state is LookupState.FOUND and self._clock() > state.found_at + HOLD_SECONDS

    def fetch(self, state: RequestState) -> None:
        """Brings absent chunks into the pool before the request is given pages."""
        state.lookup_state = LookupState.FETCHING
        state.found_at = self._clock()
        self._states[state.lookup_id] = state
        self.request_load(state, len(state.own), state.absent_count, state.traceparent)

    def handle_loaded(self, loaded: pb.LoadedChunks) -> None:
        """Handles chunks of a fetch that have arrived in the pool."""
        state = self._states.get(loaded.lookup_id)
        if state is None or state.lookup_state is not LookupState.FETCHING:
            return
        if loaded.first_chunk == len(state.own):
            state.own.extend(loaded.chunks)
            state.peer_id = loaded.peer_instance_id or state.peer_id
        if loaded.done:
            tier = state.sources.tier_at(state.tokens_in(len(state.own)), state.chunk_size)
            state.account.unused = failure_reason(loaded, tier)
            self._fetched(state)

    def request_load(self, state: RequestState, first_chunk: int, chunk_count: int, traceparent: str) -> None:
        """Asks the node to bring chunks of a request into its pool."""
        load = pb.LoadChunks(
            lookup_id=state.lookup_id, first_chunk=first_chunk, chunk_count=chunk_count, traceparent=traceparent
        )
        load.timeout.FromNanoseconds(int(state.load_timeout * 1e9))
        self._send(pb.Act(load=load))

    def report_damaged(self, keys: Sequence[ChunkKey]) -> None:
        """Asks the node to drop chunks, at least one of which did not match its checksum."""
        self._send(pb.Act(drop_damaged=pb.DropDamagedChunks(chunk_keys=join_keys(keys))))

    def release(self, state: RequestState) -> None:
        """Releases the chunks that the node holds for the request; a pending answer is released when it arrives."""
        if state.lookup_state in (LookupState.FOUND, LookupState.FETCHING):
            self._states.pop(state.lookup_id, None)
            self.release_lookup(state.lookup_id)
        state.end_lookup()

    def release_lookup(self, lookup_id: str, *, loaded_tokens: int = 0, waited_seconds: float = 0.0) -> None:
        """Releases the chunks that the node holds for a lookup.

        After a load, reports the time that it took and that computing would have taken, if a rate was measured.
        """
        release = pb.ReleaseChunks(lookup_id=lookup_id)
        if loaded_tokens and (rate := self._prefill.tokens_per_second):
            avoided_seconds = loaded_tokens / rate
            release.load_duration.FromNanoseconds(int(waited_seconds * 1e9))
            release.avoided_prefill_duration.FromNanoseconds(int(avoided_seconds * 1e9))
            self._counters.add("avoided_prefill_seconds", avoided_seconds)
        self._send(pb.Act(release=release))

    def node_lost(self) -> None:
        """Ends all lookups: the node is lost and answers none. The next one is not suspect."""
        self._suspicion.end()
        for state in self._states.values():
            state.account.node_lost()
            state.end_lookup()
        self._states.clear()

    def _worth_seconds(self, state: RequestState) -> float:
        """The time that a lookup of the prompt is worth: of what vLLM has not computed."""
        unknown_count = state.token_count - state.computed_count
        return worth_seconds(unknown_count, self._prefill.tokens_per_second, self._config.max_lookup_timeout)

    def _fetched(self, state: RequestState) -> None:
        self._states.pop(state.lookup_id, None)
        state.absent_count = 0
        state.mark_held(len(state.own))
        now = self._clock()
        state.waited_seconds += now - state.found_at
        state.found_at = now
        state.lookup_state = LookupState.FOUND


def _partial(found: pb.FoundChunks, sources: HitSources) -> PartialChunk | None:
    """The partial chunk at the end of the hit that is not the prompt's own."""
    if not found.partial_key:
        return None
    index = sources.own + sources.absent_count - 1
    return PartialChunk(key=ChunkKey(found.partial_key), index=index, token_count=found.partial_token_count)
