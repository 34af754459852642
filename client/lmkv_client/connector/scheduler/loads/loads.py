"""Loads: plans the copies of extents into pages, and accounts for their results."""

from __future__ import annotations

from collections.abc import Callable

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey
from lmkv.telemetry import SpanKind
from lmkv.tiers import DISK, HANDOFF, OWN, PEERS
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.messages import LoadPlan, LoadResult
from lmkv_client.connector.scheduler.block_copies import BlockIds, BlockMap
from lmkv_client.connector.scheduler.loads.items import load_items
from lmkv_client.connector.scheduler.loads.state import LoadState
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import LookupState, RequestState
from lmkv_client.connector.scheduler.speeds import LoadCosts
from lmkv_client.connector.stats import ConnectorCounters, tier_tokens
from lmkv_client.connector.vllm_api import CacheHitSource, init_logger
from lmkv_client.engine.prompts.hit_sources import describe
from lmkv_client.engine.prompts.prompt_account import failure_reason

logger = init_logger("vllm.lmkv")


HIT_SOURCES = {OWN: "HOST", DISK: "DISK", PEERS: "P2P", HANDOFF: "P2P"}
"""vLLM's name of each tier; it counts all others as `EXTERNAL_UNSPECIFIED`."""


class Loads:
    """The loads of one engine. Every load ends with a report of the workers, successful or not."""

    def __init__(
        self,
        config: ConnectorConfig,
        lookups: RequestLookups,
        counters: ConnectorCounters,
        clock: Callable[[], float],
        *,
        blocks: BlockMap,
        rank_count: int,
    ) -> None:
        self._config = config
        self._lookups = lookups
        self._counters = counters
        self._clock = clock
        self._blocks = blocks
        self._rank_count = rank_count
        self.costs = LoadCosts()
        self._load_states: dict[str, LoadState] = {}

    def __len__(self) -> int:
        return len(self._load_states)

    def get(self, request_id: str) -> LoadState | None:
        """The running load of a request, if any."""
        return self._load_states.get(request_id)

    def begin(self, state: RequestState, token_count: int, block_ids: BlockIds) -> None:
        """Begins to load `token_count` tokens, behind those that vLLM has computed, into the pages of the request."""
        now = self._clock()
        end = state.computed_count + token_count
        planned = state.sources.tokens(state.computed_count, end, state.chunk_size)
        load_state = LoadState(
            request_id=state.request_id,
            lookup_id=state.lookup_id,
            start=state.computed_count,
            end=end,
            items=load_items(self._blocks, block_ids, state.computed_count, end),
            chunk_size=state.chunk_size,
            sync=state.loads_in_step,
            started_at=now,
            deadline=now + state.load_timeout,
            waited_seconds=state.waited_seconds,
            sources=state.sources,
            verify=self._config.verify_loads,
            span=telemetry.follow("lmkv.load", state.traceparent, kind=SpanKind.CLIENT, asked_tokens=token_count),
            account=state.account if state.account.take(state.computed_count, planned) else None,
        )
        self._load_states[state.request_id] = load_state
        load_state.peer_id = state.peer_id
        load_state.add_chunks(0, state.own)
        if state.lookup_state is not LookupState.FOUND:  # the node was lost since the match
            load_state.close()
        elif load_state.waits:
            wanted = load_state.items.wanted
            first = max(len(state.own), wanted.start)
            self._lookups.request_load(state, first, wanted.stop - first, load_state.span.traceparent)

    def handle_loaded(self, loaded: pb.LoadedChunks) -> bool:
        """Handles chunks that have arrived in the pool; returns False if no load waits for them."""
        load_state = next((one for one in self._load_states.values() if one.lookup_id == loaded.lookup_id), None)
        if load_state is None:
            return False
        load_state.add_chunks(loaded.first_chunk, loaded.chunks)
        load_state.peer_id = loaded.peer_instance_id or load_state.peer_id
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
        """The copies of this step for the workers. Ends loads that have reached their deadline."""
        now = self._clock()
        for load_state in self._load_states.values():
            if now > load_state.deadline:
                load_state.close()
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
                self._lookups.report_damaged(self._keys(load_state, state))
            state.load_failed |= not complete
            if complete:
                state.mark_loaded(load_state.items.chunk_count)
            state.end_lookup()
        if complete and is_alone:
            self._measure(load_state, loaded)
        self._end(load_state, loaded, complete=complete)
        return complete

    def _measure(self, load_state: LoadState, loaded: LoadResult) -> None:
        """Records the time of a load. That of a synchronous one is the workers': its step computes tokens, too."""
        tokens = load_state.tokens_by_tier(load_state.end - load_state.start)
        if tokens.get(HANDOFF):
            return
        times = self.costs.own if load_state.end - load_state.start == tokens[OWN] else self.costs.fetched
        seconds = self._clock() - load_state.started_at
        if load_state.sync:
            seconds = loaded.seconds + (load_state.waited_seconds if times is self.costs.fetched else 0)
        times.add(load_state.end - load_state.start, seconds)

    def _keys(self, load_state: LoadState, state: RequestState) -> list[ChunkKey]:
        """The keys of what a load was to bring."""
        wanted, spec = load_state.items.wanted, self._blocks.spec
        if spec.has_plain_parts:
            return state.hit_keys[wanted.start : wanted.stop]
        return spec.item_keys(spec.items(load_state.items.chunk_count)[wanted.start :], state.keys)

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
        is_handoff = bool(load_state.tokens_by_tier(tokens).get(HANDOFF))  # a prefill engine computed the tokens
        self._lookups.release_lookup(
            load_state.lookup_id,
            loaded_tokens=0 if is_handoff else tokens,
            waited_seconds=load_state.waited_seconds + seconds,
        )
        self._counters.add("load_failures", int(not complete))
        self._counters.add("loaded_tokens", tokens)
        self._counters.add("loaded_bytes", loaded.size_bytes)
        self._counters.add("load_seconds", seconds)
        brought = load_state.tokens_by_tier(tokens)
        if load_state.account and not complete:
            load_state.account.correct(dict(brought), load_state.failure)
        del brought[OWN]
        for tier, count in brought.items():
            self._counters.add(tier_tokens(tier), count)
        load_state.span.set(
            loaded_tokens=tokens,
            loaded_bytes=loaded.size_bytes,
            peer_instance_id=load_state.peer_id if brought.get(PEERS) or brought.get(HANDOFF) else "",
            **{f"{tier}_tokens": count for tier, count in brought.items()},
        )
        if not complete:
            load_state.span.fail("incomplete", "fewer chunks arrived than were found; the others are computed")
        load_state.span.end()
        logger.info(
            "[%s] Retrieved %d of %d tokens from %s, %s, %s, %s",
            load_state.request_id,
            tokens,
            load_state.end - load_state.start,
            describe(load_state.tokens_by_tier(load_state.end - load_state.start), load_state.peer_id),
            format_bytes(loaded.size_bytes),
            format_duration(seconds),
            format_rate(loaded.size_bytes, seconds),
        )
