"""Loads: which extents go into which pages, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.logger import init_logger

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.telemetry import SpanKind
from lmkv.tiers import HANDOFF, OWN, PEERS
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.messages import Load, Loaded
from lmkv_client.connector.scheduler.hit_sources import describe
from lmkv_client.connector.scheduler.load_state import LoadState
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import LookupState, RequestState
from lmkv_client.connector.stats import Counters, tier_tokens

logger = init_logger("vllm.lmkv")


class Loads:
    """The loads of one engine. Every load that was begun ends by a report of the workers, however it went."""

    def __init__(
        self,
        config: ConnectorConfig,
        searches: RequestLookups,
        counters: Counters,
        clock: Callable[[], float],
        *,
        block_size: int,
        rank_count: int,
    ) -> None:
        self._config = config
        self._searches = searches
        self._counters = counters
        self._clock = clock
        self._block_size = block_size
        self._rank_count = rank_count
        self._loadings: dict[str, LoadState] = {}

    def __len__(self) -> int:
        return len(self._loadings)

    def get(self, request_id: str) -> LoadState | None:
        """The running load of a request, if any."""
        return self._loadings.get(request_id)

    def begin(self, prompt: RequestState, token_count: int, block_ids: Sequence[int]) -> None:
        """Loads so many tokens, after those that vLLM has, into the pages of the prompt."""
        now = self._clock()
        loading = LoadState(
            request_id=prompt.request_id,
            ticket=prompt.ticket,
            start=prompt.computed_count,
            end=prompt.computed_count + token_count,
            block_ids=block_ids,
            chunk_size=prompt.chunk_size,
            block_size=self._block_size,
            sync=not self._config.enable_async_loading,
            started_at=now,
            deadline=now + prompt.load_timeout,
            places=prompt.places,
            verify=self._config.verify_loads,
            span=telemetry.follow("lmkv.load", prompt.traceparent, kind=SpanKind.CLIENT, asked_tokens=token_count),
        )
        self._loadings[prompt.request_id] = loading
        loading.peer_id = prompt.peer_id
        loading.arrived(0, prompt.own)
        if prompt.search is not LookupState.FOUND:  # the node was lost between the match and now
            loading.close()
        elif not loading.complete:
            first = max(len(prompt.own), loading.first_chunk)
            self._searches.order(prompt, first, loading.stop_chunk - first, loading.span.traceparent)

    def arrived(self, loaded: pb.LoadedChunks) -> bool:
        """Chunks have been brought in; False if no load waits for them."""
        loading = next((one for one in self._loadings.values() if one.ticket == loaded.request_id), None)
        if loading is None:
            return False
        loading.arrived(loaded.first_chunk, loaded.extents)
        loading.peer_id = loaded.peer_instance_id or loading.peer_id
        if loaded.done:
            loading.close()
        return True

    def plan(self) -> list[Load]:
        """What the workers shall copy in this step. Ends loads whose time is over."""
        now = self._clock()
        for loading in self._loadings.values():
            if now > loading.deadline:
                loading.close()
        return [load for loading in self._loadings.values() if (load := loading.take())]

    def copied(self, request_id: str, loaded: Loaded, prompt: RequestState | None) -> None:
        """Workers are done with a load; until all of them are, the extents must stay where they are."""
        loading = self._loadings.get(request_id)
        if loading is None:
            return
        loading.copied.add(loaded)
        loaded = loading.copied
        if loaded.rank_count < self._rank_count:
            return
        del self._loadings[request_id]
        complete = loading.complete and not loaded.failed
        if prompt:
            if loaded.failed and self._config.verify_loads:
                self._searches.damaged(prompt.keys[loading.first_chunk : loading.stop_chunk])
            prompt.useless |= not complete
            if complete:
                prompt.held(loading.stop_chunk)
            prompt.over()
        self._searches.release_ticket(loading.ticket)
        self._count(loading, loaded, complete=complete)

    def finished(self, prompt: RequestState) -> bool:
        """The request is over; True if its load is still running: then its pages stay until the workers are done."""
        loading = self._loadings.get(prompt.request_id)
        if loading is None:
            return False
        loading.close()
        return True

    def lost(self) -> None:
        """The node is gone: nothing more will arrive. What the workers know of stays readable and is copied."""
        for loading in self._loadings.values():
            loading.lose()

    def _count(self, loading: LoadState, loaded: Loaded, *, complete: bool) -> None:
        seconds = self._clock() - loading.started_at
        tokens = 0 if loaded.failed else loading.arrived_tokens
        self._counters.add("load_failures", int(not complete))
        self._counters.add("loaded_tokens", tokens)
        self._counters.add("loaded_bytes", loaded.size_bytes)
        self._counters.add("load_seconds", seconds)
        brought = loading.tokens_by_tier(tokens)
        del brought[OWN]
        for tier, count in brought.items():
            self._counters.add(tier_tokens(tier), count)
        loading.span.set(
            loaded_tokens=tokens,
            loaded_bytes=loaded.size_bytes,
            peer_instance_id=loading.peer_id if brought.get(PEERS) or brought.get(HANDOFF) else "",
            **{f"{tier}_tokens": count for tier, count in brought.items()},
        )
        if not complete:
            loading.span.fail("incomplete", "less came than was found; the rest is computed")
        loading.span.end()
        logger.info(
            "[%s] Retrieved %d of %d tokens from %s, %s, %s, %s",
            loading.request_id,
            tokens,
            loading.end - loading.start,
            describe(loading.tokens_by_tier(loading.end - loading.start), loading.peer_id),
            format_bytes(loaded.size_bytes),
            format_duration(seconds),
            format_rate(loaded.size_bytes, seconds),
        )
