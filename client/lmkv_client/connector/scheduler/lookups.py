"""Lookups of requests at the node, and the release of the chunks that the node holds for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import KEY_BYTES, ChunkKey, join_keys
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.telemetry import SpanKind
from lmkv.tiers import Run
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.hit_sources import HitSources
from lmkv_client.connector.scheduler.prefill_rate import PrefillRate
from lmkv_client.connector.scheduler.request_state import LookupState, RequestState
from lmkv_client.connector.stats import ConnectorCounters

HOLD_SECONDS = 10.0
"""A request that waits longer for pages releases its chunks at the node, and is looked up again."""
GRACE_SECONDS = 0.001
"""Time that a step waits for the answer of a lookup: another step may be much later."""
LONE_GRACE_SECONDS = 0.005
"""The same where the request is the only one: the step has nothing else to do."""
MAX_ASKED_KEYS = MAX_MESSAGE_BYTES // 2 // KEY_BYTES
"""Most chunks of a prompt in one lookup, so that it fits into a message; the others are computed."""
TIMEOUTS_UNTIL_SUSPECT = 3
SUSPECT_SECONDS = 1.0
"""After `TIMEOUTS_UNTIL_SUSPECT` lookups in a row without an answer, no lookups are sent for this time."""


class RequestLookups:
    """The lookups of one engine. Each has an id, under which the node holds its chunks."""

    def __init__(
        self,
        config: ConnectorConfig,
        send: Callable[[pb.AttachRequest], None],
        counters: ConnectorCounters,
        clock: Callable[[], float],
        prefill: PrefillRate,
    ) -> None:
        self._config = config
        self._send = send
        self._counters = counters
        self._clock = clock
        self._prefill = prefill
        self._states: dict[str, RequestState] = {}
        """By lookup id, as long as an answer may arrive."""
        self._lookup_number = 0
        self._timeouts = 0
        self._suspect_until = 0.0

    def __len__(self) -> int:
        return len(self._states)

    def start(self, state: RequestState, reserve_counts: Callable[[], list[int]]) -> None:
        """Looks a request up, and asks for write credits for absent chunks. Sends nothing while the node is suspect."""
        now = self._clock()
        asked = state.asked_keys
        if not asked or now < self._suspect_until:
            state.end_lookup()
            return
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
        lookup = pb.LookupChunks(
            request_id=state.lookup_id,
            chunk_keys=join_keys(asked[:MAX_ASKED_KEYS]),
            reserve_count=wanted[0],
            part_reserve_counts=wanted[1:],
            traceparent=state.lookup_span.traceparent,
            prefill_tokens_per_second=self._prefill.tokens_per_second if self._config.refuse_slow_fetches else 0,
            handoff_id=state.handoff_id,
        )
        self._send(pb.AttachRequest(lookups=[lookup]))

    def handle_found(self, found: pb.FoundChunks) -> None:
        """Handles the answer to a lookup; one that arrives too late is released."""
        self._timeouts = 0
        self._suspect_until = 0.0
        state = self._states.pop(found.request_id, None)
        if state is None or state.lookup_state is not LookupState.ASKED or state.lookup_id != found.request_id:
            if state and not state.has_parts:  # too late: it was computed; chunks that are held need not be stored
                state.mark_held(len(found.own))
            self.release_lookup(found.request_id)
            return
        state.waited_seconds = self._clock() - state.looked_up_at
        self._counters.add("lookup_seconds", state.waited_seconds)
        self._counters.add("refused_fetch_tokens", found.refused_chunk_count * state.chunk_size)
        state.set_found(found.own, _sources(found), found.peer_instance_id, self._clock())

    def is_pending(self, state: RequestState) -> bool:
        """Whether the request is to wait for its answer or for chunks that are fetched. Ends waits that time out."""
        if state.lookup_state is LookupState.ASKED:
            if self._clock() < state.looked_up_at + self._config.lookup_timeout:
                return True
            self._counters.add("lookup_timeouts")
            self._counters.add("lookup_seconds", self._clock() - state.looked_up_at)
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_UNTIL_SUSPECT:
                self._suspect_until = self._clock() + SUSPECT_SECONDS
            state.lookup_span.fail("timeout", f"no answer within lookup_timeout ({self._config.lookup_timeout:g} s)")
            state.end_lookup_span(HitSources())
            state.lookup_state = LookupState.OVER  # its id stays known: the answer may still arrive
        elif state.lookup_state is LookupState.FETCHING:
            if self._clock() < state.found_at + state.load_timeout:
                return True
            self._counters.add("load_failures")
            self._fetched(state)
        return False

    def is_fresh(self, state: RequestState, *, is_alone: bool) -> bool:
        """Whether the request was looked up so recently that its answer is worth waiting for in this step."""
        grace = LONE_GRACE_SECONDS if is_alone else GRACE_SECONDS
        return state.lookup_state is LookupState.ASKED and self._clock() < state.looked_up_at + grace

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
        state = self._states.get(loaded.request_id)
        if state is None or state.lookup_state is not LookupState.FETCHING:
            return
        if loaded.first_chunk == len(state.own):
            state.own.extend(loaded.extents)
            state.peer_id = loaded.peer_instance_id or state.peer_id
        if loaded.done:
            self._fetched(state)

    def request_load(self, state: RequestState, first_chunk: int, chunk_count: int, traceparent: str) -> None:
        """Asks the node to bring chunks of a request into its pool."""
        load = pb.LoadChunks(
            request_id=state.lookup_id, first_chunk=first_chunk, chunk_count=chunk_count, traceparent=traceparent
        )
        load.timeout.FromNanoseconds(int(state.load_timeout * 1e9))
        self._send(pb.AttachRequest(loads=[load]))

    def report_damaged(self, keys: Sequence[ChunkKey]) -> None:
        """Asks the node to drop chunks, at least one of which did not match its checksum."""
        self._send(pb.AttachRequest(damaged_keys=keys))

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
        release = pb.ReleaseChunks(request_id=lookup_id)
        if loaded_tokens and (rate := self._prefill.tokens_per_second):
            avoided_seconds = loaded_tokens / rate
            release.load_duration.FromNanoseconds(int(waited_seconds * 1e9))
            release.avoided_prefill_duration.FromNanoseconds(int(avoided_seconds * 1e9))
            self._counters.add("avoided_prefill_seconds", avoided_seconds)
        self._send(pb.AttachRequest(releases=[release]))

    def node_lost(self) -> None:
        """Ends all lookups: the node is lost and answers none."""
        for state in self._states.values():
            state.end_lookup()
        self._states.clear()

    def _fetched(self, state: RequestState) -> None:
        self._states.pop(state.lookup_id, None)
        state.absent_count = 0
        state.mark_held(len(state.own))
        now = self._clock()
        state.waited_seconds += now - state.found_at
        state.found_at = now
        state.lookup_state = LookupState.FOUND


def _sources(found: pb.FoundChunks) -> HitSources:
    runs = tuple(Run(tier=run.tier, chunk_count=run.chunk_count) for run in found.runs)
    return HitSources(own=len(found.own), runs=runs, hit_chunk_count=found.hit_chunk_count)
