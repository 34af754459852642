"""Loads of hits into the engine's pages: what each copies, as its chunks arrive, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.telemetry import NO_SPAN, Span, SpanKind
from lmkv.tiers import DISK, HANDOFF, OWN, PEERS
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.messages import ExtentChecksum, LoadPlan, LoadResult
from lmkv_client.connector.scheduler.block_copies import BlockIds, BlockMap, LoadItems
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.connector.vllm_api import CacheHitSource, init_logger
from lmkv_client.engine.hit_sources import describe
from lmkv_client.engine.prompt_account import PromptAccount, failure_reason
from lmkv_client.engine.session import LookupState, Session
from lmkv_client.engine.speeds import LoadCosts, is_too_late, seconds_left
from lmkv_kernels import ChunkCopy

POOL = 0
"""The region of extents in the pool; other regions are in the device buffer, where chunks were verified on arrival."""


class LoadState:
    """Tokens `[start, end)` of a request, going into the pages of that request.

    "Items" are here its chunks, or the items of its hit where chunks have several parts.
    """

    def __init__(
        self,
        lookup: RequestLookup,
        items: LoadItems,
        started_at: float,
        *,
        verify: bool = False,
        account: PromptAccount | None = None,
    ) -> None:
        """`account` is corrected if the load brings less than asked for; None if it is fixed already."""
        self.lookup = lookup
        self.items = items
        self.started_at = started_at
        self.deadline = started_at + lookup.request.load_timeout
        self.sync = lookup.loads_in_step
        self.account = account
        self.span: Span = NO_SPAN
        """The span of the load; `Loads` begins and ends it."""
        self.failure = MissReason.LOAD_FAILED
        """The reason why items have not arrived."""
        self.expected_seconds = 0.0
        """Expected duration; 0 if that was not known."""
        self.is_abandoned = False
        """Whether its rest is computed because that is faster than to wait for it."""
        self.arrived_tokens = 0
        self._awaited_count = 0
        """Items that were not there at the beginning."""
        self._first_arrival: tuple[float, int] | None = None
        """When the first of these arrived, and how many they were."""
        self.final_sent = False
        self.copied = LoadResult()
        """The summed results of the ranks that are done."""
        self._missing = set(items.wanted)
        self._verify = verify
        self._ready: dict[int, tuple[list[ChunkCopy], HeldChunk]] = {}
        """The items that have arrived and are not in a plan yet, by index."""
        self._closed = False

    @property
    def request_id(self) -> str:
        return self.lookup.request.request_id

    @property
    def token_count(self) -> int:
        return self.items.end - self.items.start

    def add_chunks(self, first: int, chunks: Sequence[HeldChunk]) -> None:
        """Adds arrived items, from `first` on. A chunk that does not fit its item ends the load."""
        for index, chunk in enumerate(chunks, first):
            if index in self._missing and not self._closed:
                copies = self.items.copies(index, chunk)
                if copies is None:
                    self.close()
                    return
                self._missing.discard(index)
                self._ready[index] = copies, chunk
                self.arrived_tokens += self.items.token_count(index, chunk)

    def begin_wait(self) -> None:
        """Begins to wait for the missing items, which are fetched. The pace of the load counts only these."""
        self._awaited_count = len(self._missing)

    def note_arrival(self, now: float) -> None:
        """Begins to measure the pace of arrivals."""
        self._first_arrival = self._first_arrival or (now, self._fetched_count)

    @property
    def tokens_to_compute(self) -> int:
        """The tokens that are computed if nothing more is waited for."""
        return self.token_count - (0 if self.items.all_or_none else self.arrived_tokens)

    def seconds_left(self, now: float) -> float:
        """The expected seconds until the rest is there."""
        return seconds_left(now - self.started_at, self._fetched_count, len(self._missing))

    def is_too_late(self, now: float, computing_seconds: float) -> bool:
        """Whether `tokens_to_compute`, which costs `computing_seconds`, is better than to wait."""
        first_at, first_count = self._first_arrival or (now, self._fetched_count)
        count, missing_count = self._fetched_count - first_count, len(self._missing)
        steady_seconds = seconds_left(now - first_at, count, missing_count) if count else 0.0
        waited_seconds = now - self.started_at
        return is_too_late(waited_seconds, self._fetched_count, missing_count, computing_seconds, steady_seconds)

    @property
    def _fetched_count(self) -> int:
        return self._awaited_count - len(self._missing)

    def tokens_by_tier(self, token_count: int) -> dict[str, int]:
        """Counts the load's first `token_count` tokens, which arrive first, by the tier that had them at the lookup."""
        start, size = self.items.start, self.lookup.account.chunk_size
        return self.lookup.sources.tokens(start, start + token_count, size)

    @property
    def tier_behind(self) -> str:
        """The tier that had the token behind those that have arrived; empty if there is none."""
        position = self.items.start + self.arrived_tokens
        return self.lookup.sources.tier_at(position, self.lookup.account.chunk_size)

    def close(self) -> None:
        """Ends the wait: what has not arrived counts as lost."""
        self._closed = True

    def abandon(self) -> None:
        """Ends the wait, because computing what has not arrived is faster."""
        self.failure, self.is_abandoned = MissReason.SLOWER, True
        self.close()

    def node_lost(self) -> None:
        """Ends the wait, and discards extents that are not yet in a plan: they are not valid in the next pool."""
        self._missing |= self._ready.keys()
        self.arrived_tokens -= sum(self.items.token_count(index, chunk) for index, (_, chunk) in self._ready.items())
        self._ready.clear()
        self.failure = MissReason.NODE_LOST
        self.close()

    def discard(self) -> None:
        """Ends the wait; nothing that was or will be copied is of use."""
        self._missing.update(self.items.wanted)
        self.arrived_tokens = 0
        self._ready.clear()
        self.close()

    @property
    def waits(self) -> bool:
        """Whether items may still arrive."""
        return not self._closed and not self.complete

    @property
    def complete(self) -> bool:
        """Whether every wanted item has arrived."""
        return not self._missing

    def take(self) -> LoadPlan | None:
        """The next plan for the workers; None if there is nothing new."""
        final = not self.final_sent and (self._closed or self.complete)
        if not self._ready and not final:
            return None
        ready, self._ready = list(self._ready.values()), {}
        pooled = [one for one in ready if one[1].extent.region == POOL]
        self.final_sent |= final
        return LoadPlan(
            request_id=self.request_id,
            copies=[copy for copies, _ in pooled for copy in copies],
            buffered=[copy for copies, chunk in ready if chunk.extent.region != POOL for copy in copies],
            sync=self.sync,
            final=final,
            checks=[check(chunk) for _, chunk in pooled] if self._verify else [],
            failed_blocks=self.items.blocks(self._missing) if final else [],
            all_or_none=self.items.all_or_none,
            failed=final and self.items.all_or_none and bool(self._missing),
        )


def check(chunk: HeldChunk) -> ExtentChecksum:
    """The checksum to compare a chunk's extent with."""
    extent = chunk.extent
    return ExtentChecksum(offset=extent.offset, size_bytes=extent.size_bytes, checksum=chunk.checksum)


logger = init_logger("vllm.lmkv")


HIT_SOURCES = {OWN: "HOST", DISK: "DISK", PEERS: "P2P", HANDOFF: "P2P"}
"""vLLM's name of each tier; it counts all others as `EXTERNAL_UNSPECIFIED`."""


class Loads:
    """The loads of one engine. Every load ends with a report of the workers, successful or not."""

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session[RequestLookup],
        blocks: BlockMap,
        clock: Callable[[], float],
        *,
        rank_count: int,
    ) -> None:
        self._config = config
        self._session = session
        self._blocks = blocks
        self._clock = clock
        self._rank_count = rank_count
        self.costs = LoadCosts()
        self._load_states: dict[str, LoadState] = {}

    def __len__(self) -> int:
        return len(self._load_states)

    def get(self, request_id: str) -> LoadState | None:
        """The running load of a request, if any."""
        return self._load_states.get(request_id)

    def choose(self, state: RequestState, own_count: int, fetched_count: int) -> int:
        """Tokens to load of a hit whose first `own_count` are in the pool and whose others are to be fetched."""
        rate = self._session.computing_rate(state.request_id, own_count + fetched_count, self._clock())
        return self.costs.choose(own_count, fetched_count, rate)

    def begin(self, state: RequestState, token_count: int, block_ids: BlockIds) -> None:
        """Begins to load `token_count` tokens, behind those that vLLM has computed, into the pages of the request."""
        lookup, start = state.lookup, state.computed_count
        end = start + token_count
        planned = lookup.sources.tokens(start, end, state.chunk_size)
        load_state = LoadState(
            lookup,
            state.items(self._blocks, block_ids, start, end),
            self._clock(),
            verify=self._config.verify_loads,
            account=state.account if state.account.take(start, planned) else None,
        )
        load_state.span = telemetry.follow(
            "lmkv.load", state.traceparent, kind=SpanKind.CLIENT, asked_tokens=token_count
        )
        self._load_states[state.request_id] = load_state
        load_state.add_chunks(0, lookup.chunks)
        own_count = planned[OWN]
        load_state.expected_seconds = self.costs.seconds(own_count, token_count - own_count)
        if lookup.state is not LookupState.FOUND:  # the node was lost since the match
            load_state.close()
        elif load_state.waits:
            load_state.begin_wait()
            wanted = load_state.items.wanted
            first = max(len(lookup.chunks), wanted.start)
            traceparent = load_state.span.traceparent
            self._session.load(lookup, first, wanted.stop - first, state.load_timeout, traceparent=traceparent)

    def loaded(self, lookup: RequestLookup, loaded: pb.LoadedChunks) -> bool:
        """Handles chunks that have arrived in the pool; returns False if no load waits for them."""
        load_state = self._load_states.get(lookup.request.request_id)
        if load_state is None or load_state.lookup is not lookup:
            return False
        load_state.add_chunks(loaded.first_chunk, loaded.chunks)
        load_state.note_arrival(self._clock())
        if loaded.done:
            load_state.failure = failure_reason(loaded, load_state.tier_behind)
            load_state.close()
        return True

    def hit_sources(self, request_id: str, token_count: int) -> dict[CacheHitSource, int]:
        """The first `token_count` tokens of a request's load by vLLM's name of their source."""

        load_state = self._load_states.get(request_id)
        if load_state is None:
            return {CacheHitSource.HOST: token_count}
        sources: dict[CacheHitSource, int] = {}
        for tier, count in load_state.tokens_by_tier(token_count).items():
            if count:
                source = CacheHitSource[HIT_SOURCES.get(tier, "EXTERNAL_UNSPECIFIED")]
                sources[source] = sources.get(source, 0) + count
        return sources

    def plan(self) -> list[LoadPlan]:
        """The copies of this step for the workers. Ends loads that have reached their deadline, and those whose rest is
        computed faster than it comes."""
        now = self._clock()
        for load_state in self._load_states.values():
            if now > load_state.deadline:
                load_state.close()
            elif load_state.waits and self._is_too_late(load_state, now):
                self._abandon(load_state, now)
        return [load for load_state in self._load_states.values() if (load := load_state.take())]

    def handle_result(self, request_id: str, loaded: LoadResult, state: RequestState | None, *, is_alone: bool) -> bool:
        """Handles the results of workers; the extents are released when all of them are done. Whether all have loaded.

        `is_alone`: whether the engine has no other request, whose steps the load would have waited for.
        """
        load_state = self._load_states.get(request_id)
        if load_state is None:
            return False
        load_state.copied.add(loaded)
        loaded = load_state.copied
        if loaded.rank_count < self._rank_count:
            return False
        del self._load_states[request_id]
        complete = load_state.complete and not loaded.failed
        if state:
            if loaded.failed and load_state.complete and self._config.verify_loads:
                self._session.drop_damaged(self._keys(load_state, state))
            state.load_failed |= not complete
            if complete:
                state.mark_loaded(load_state.items.chunk_count)
        if complete:
            self._measure(load_state, loaded, is_alone=is_alone)
        self._end(load_state, loaded, complete=complete)
        return complete

    def _is_too_late(self, load_state: LoadState, now: float) -> bool:
        """Whether what has not arrived is to be computed. A handoff is waited for: its prefill engine computes it."""
        lookup = load_state.lookup
        if not self._config.refuse_slow_fetches or load_state.sync or lookup.handoff_id:
            return False
        seconds = self._session.computing_seconds(load_state.request_id, load_state.tokens_to_compute, now)
        return seconds > 0 and load_state.is_too_late(now, seconds)

    def _abandon(self, load_state: LoadState, now: float) -> None:
        """Ends the wait of a load, and records the time that it would have taken: the next one is judged by it."""
        seconds = now - load_state.started_at + load_state.seconds_left(now)
        self.costs.fetched.add(load_state.token_count, seconds)
        self._session.counters.add("abandoned_tokens", load_state.tokens_to_compute)
        load_state.abandon()

    def _measure(self, load_state: LoadState, loaded: LoadResult, *, is_alone: bool) -> None:
        """Records the time of a load. The workers measure synchronous loads: their step computes tokens, too.

        Beside others a load may have waited for their steps, so that its time counts only if it is less than expected:
        else one load that was abandoned would have others refused for as long as no request is alone.
        """
        tokens = load_state.tokens_by_tier(load_state.token_count)
        if tokens.get(HANDOFF):
            return
        times = self.costs.own if load_state.token_count == tokens[OWN] else self.costs.fetched
        seconds = self._clock() - load_state.started_at
        if load_state.sync:
            seconds = loaded.seconds + (load_state.lookup.waited_seconds if times is self.costs.fetched else 0)
        if is_alone or seconds < times.seconds(load_state.token_count):
            times.add(load_state.token_count, seconds)

    def _keys(self, load_state: LoadState, state: RequestState) -> list[ChunkKey]:
        """The keys of what a load was to bring."""
        size, loaded, spec = state.chunk_size, load_state.items, self._blocks.spec
        items = spec.items(loaded.end // size, loaded.end % size)[loaded.wanted.start : loaded.wanted.stop]
        return spec.item_keys(items, state.lookup.hit_keys)

    def finished(self, state: RequestState) -> bool:
        """Ends the load of a finished request; True if it still runs: its pages stay until the workers are done."""
        load_state = self._load_states.get(state.request_id)
        if load_state is None:
            return False
        load_state.close()
        return True

    def node_lost(self) -> None:
        """Ends the wait for chunks: the node is lost. Copies that the workers were given are still made."""
        for load_state in self._load_states.values():
            load_state.node_lost()

    def discard(self) -> None:
        """Fails all loads: what they bring is of no use any more."""
        for load_state in self._load_states.values():
            load_state.discard()

    def _end(self, load_state: LoadState, loaded: LoadResult, *, complete: bool) -> None:
        """Releases the extents, and counts the load."""
        seconds = loaded.seconds if load_state.sync else self._clock() - load_state.started_at
        tokens = 0 if loaded.failed else load_state.arrived_tokens
        lookup, counters, session = load_state.lookup, self._session.counters, self._session
        brought = load_state.tokens_by_tier(tokens)
        avoided_seconds = 0.0
        if not brought.get(HANDOFF) and (rate := session.prefill.tokens_per_second):
            avoided_seconds = tokens / rate  # of a handoff, a prefill engine has computed the tokens
        counters.add("avoided_prefill_seconds", avoided_seconds)
        session.release(lookup, load_seconds=lookup.waited_seconds + seconds, avoided_seconds=avoided_seconds)
        counters.add("load_failures", int(not complete and not load_state.is_abandoned))
        if load_state.expected_seconds:
            took = lookup.waited_seconds + seconds if load_state.sync else seconds
            counters.add("expected_load_seconds", load_state.expected_seconds)
            counters.add("load_error_seconds", abs(took - load_state.expected_seconds))
        counters.add("loaded_tokens", tokens)
        counters.add("loaded_bytes", loaded.size_bytes)
        counters.add("load_seconds", seconds)
        if load_state.account and not complete:
            load_state.account.correct(dict(brought), load_state.failure)
        del brought[OWN]
        for tier, count in brought.items():
            counters.add("tier_tokens", count, label=tier)
        load_state.span.set(
            loaded_tokens=tokens,
            loaded_bytes=loaded.size_bytes,
            peer_instance_id=lookup.peer_id if brought.get(PEERS) or brought.get(HANDOFF) else "",
            **{f"{tier}_tokens": count for tier, count in brought.items()},
        )
        if not complete:
            load_state.span.fail("incomplete", "fewer chunks arrived than were found; the others are computed")
        load_state.span.end()
        logger.info(
            "[%s] Retrieved %d of %d tokens from %s, %s, %s, %s",
            load_state.request_id,
            tokens,
            load_state.token_count,
            describe(load_state.tokens_by_tier(load_state.token_count), lookup.peer_id),
            format_bytes(loaded.size_bytes),
            format_duration(seconds),
            format_rate(loaded.size_bytes, seconds),
        )
