"""Lookups: asking the node what it has of each prompt, and giving back what it holds in place for us."""

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
from lmkv_client.connector.stats import Counters

HOLD_SECONDS = 10.0
"""A request that waits longer for pages gives up what the node holds for it, and asks again."""
GRACE_SECONDS = 0.001
"""So long after its lookup a prompt is worth waiting for inside the step: another step may come much later."""
LONE_GRACE_SECONDS = 0.005
"""The same for a prompt that is the only one: the step has nothing else to do, and another would sleep as well."""
MAX_ASKED_KEYS = MAX_MESSAGE_BYTES // 2 // KEY_BYTES
"""Chunks of a prompt that a lookup asks for at most, so that it fits into a message; the rest is computed."""
TIMEOUTS_UNTIL_SUSPECT = 3
SUSPECT_SECONDS = 1.0
"""After so many lookups in a row without answer the node is left alone for a while."""


class RequestLookups:
    """The lookups of one engine. Each has a ticket, which names it to the node and all that follows from it."""

    def __init__(
        self,
        config: ConnectorConfig,
        send: Callable[[pb.AttachRequest], None],
        counters: Counters,
        clock: Callable[[], float],
        prefill: PrefillRate,
    ) -> None:
        self._config = config
        self._send = send
        self._counters = counters
        self._clock = clock
        self._prefill = prefill
        self._prompts: dict[str, RequestState] = {}
        """By ticket, for as long as the node may say something about it."""
        self._ticket_number = 0
        self._timeouts = 0
        self._suspect_until = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def ask(self, prompt: RequestState, reserve_count: Callable[[], int]) -> None:
        """Looks a prompt up, and asks for write credits for what nobody holds; not while the node seems stuck."""
        now = self._clock()
        if not prompt.keys or now < self._suspect_until:
            prompt.over()
            return
        self._ticket_number += 1
        prompt.ticket = str(self._ticket_number)
        prompt.search = LookupState.ASKED
        prompt.asked_at = now
        self._prompts[prompt.ticket] = prompt
        self._counters.add("lookups")
        prompt.asking = telemetry.begin(
            "lmkv.lookup", parent=prompt.traceparent, kind=SpanKind.CLIENT, asked_tokens=prompt.token_count
        )
        prompt.traceparent = prompt.traceparent or prompt.asking.traceparent  # the first of its spans is their root
        lookup = pb.LookupChunks(
            request_id=prompt.ticket,
            chunk_keys=join_keys(prompt.keys[:MAX_ASKED_KEYS]),
            reserve_count=reserve_count(),
            traceparent=prompt.asking.traceparent,
            prefill_tokens_per_second=self._prefill.tokens_per_second if self._config.refuse_slow_fetches else 0,
            handoff_id=prompt.handoff_id,
        )
        self._send(pb.AttachRequest(lookups=[lookup]))

    def found(self, found: pb.FoundChunks) -> None:
        """The node has answered a lookup."""
        self._timeouts = 0
        self._suspect_until = 0.0
        prompt = self._prompts.pop(found.request_id, None)
        if prompt is None or prompt.search is not LookupState.ASKED or prompt.ticket != found.request_id:
            if prompt:  # too late: the request went on without us; but what is held need not be stored
                prompt.held(len(found.own))
            self.release_ticket(found.request_id)
            return
        self._counters.add("lookup_seconds", self._clock() - prompt.asked_at)
        self._counters.add("refused_fetch_tokens", found.refused_chunk_count * prompt.chunk_size)
        prompt.found(found.own, _sources(found), found.peer_instance_id, self._clock())

    def waits(self, prompt: RequestState) -> bool:
        """Whether the prompt should go on waiting, for its answer or for chunks that are brought in."""
        if prompt.search is LookupState.ASKED:
            if self._clock() < prompt.asked_at + self._config.lookup_timeout:
                return True
            self._counters.add("lookup_timeouts")
            self._counters.add("lookup_seconds", self._clock() - prompt.asked_at)
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_UNTIL_SUSPECT:
                self._suspect_until = self._clock() + SUSPECT_SECONDS
            prompt.asking.fail("timeout", f"no answer within lookup_timeout ({self._config.lookup_timeout:g} s)")
            prompt.answered(HitSources())
            prompt.search = LookupState.OVER  # its ticket stays known, for the answer may still come
        elif prompt.search is LookupState.FETCHING:
            if self._clock() < prompt.found_at + prompt.load_timeout:
                return True
            self._counters.add("load_failures")
            self._fetched(prompt)
        return False

    def is_fresh(self, prompt: RequestState, *, is_alone: bool) -> bool:
        """Whether the prompt was looked up so lately that its answer may come any moment."""
        grace = LONE_GRACE_SECONDS if is_alone else GRACE_SECONDS
        return prompt.search is LookupState.ASKED and self._clock() < prompt.asked_at + grace

    def is_stale(self, prompt: RequestState) -> bool:
        """Whether the node has held chunks for this prompt for too long already."""
        return prompt.search is LookupState.FOUND and self._clock() > prompt.found_at + HOLD_SECONDS

    def fetch(self, prompt: RequestState) -> None:
        """Brings what is not there yet into the pool before any pages are asked for."""
        prompt.search = LookupState.FETCHING
        prompt.found_at = self._clock()
        self._prompts[prompt.ticket] = prompt
        self.order(prompt, len(prompt.own), prompt.absent_count, prompt.traceparent)

    def arrived(self, loaded: pb.LoadedChunks) -> None:
        """Chunks of a fetch are in the pool."""
        prompt = self._prompts.get(loaded.request_id)
        if prompt is None or prompt.search is not LookupState.FETCHING:
            return
        if loaded.first_chunk == len(prompt.own):
            prompt.own.extend(loaded.extents)
            prompt.peer_id = loaded.peer_instance_id or prompt.peer_id
        if loaded.done:
            self._fetched(prompt)

    def order(self, prompt: RequestState, first_chunk: int, chunk_count: int, traceparent: str) -> None:
        """Has the node bring chunks of a prompt into its pool."""
        load = pb.LoadChunks(
            request_id=prompt.ticket, first_chunk=first_chunk, chunk_count=chunk_count, traceparent=traceparent
        )
        load.timeout.FromNanoseconds(int(prompt.load_timeout * 1e9))
        self._send(pb.AttachRequest(loads=[load]))

    def damaged(self, keys: Sequence[ChunkKey]) -> None:
        """Has the node forget chunks of which at least one did not match its checksum."""
        self._send(pb.AttachRequest(damaged_keys=keys))

    def release(self, prompt: RequestState) -> None:
        """Ends what the node holds for the prompt; an answer that is still to come is ended when it comes."""
        if prompt.search in (LookupState.FOUND, LookupState.FETCHING):
            self._prompts.pop(prompt.ticket, None)
            self.release_ticket(prompt.ticket)
        prompt.over()

    def release_ticket(self, ticket: str) -> None:
        """Ends what the node holds under a ticket."""
        self._send(pb.AttachRequest(releases=[pb.ReleaseChunks(request_id=ticket)]))

    def lost(self) -> None:
        """The node is gone: no answer will come."""
        for prompt in self._prompts.values():
            prompt.over()
        self._prompts.clear()

    def _fetched(self, prompt: RequestState) -> None:
        self._prompts.pop(prompt.ticket, None)
        prompt.absent_count = 0
        prompt.held(len(prompt.own))
        prompt.found_at = self._clock()
        prompt.search = LookupState.FOUND


def _sources(found: pb.FoundChunks) -> HitSources:
    runs = tuple(Run(tier=run.tier, chunk_count=run.chunk_count) for run in found.runs)
    return HitSources(own=len(found.own), runs=runs)
