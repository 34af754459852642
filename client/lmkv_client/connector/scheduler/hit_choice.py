"""Chooses how much of a hit is loaded, and whether in the step that computes the rest of the prompt or beside it.

Beside a load of its own, an "asynchronous" one, other requests run; but the request then waits for further steps of the
engine, which cost more than to copy some megabytes. So what is in the pool is copied in the step if it is little, or if
no other request waits meanwhile."""

from __future__ import annotations

from lmkv.config import ConnectorConfig
from lmkv.misses import MissReason
from lmkv_client.connector.scheduler.audits import Audits
from lmkv_client.connector.scheduler.block_copies import items_of
from lmkv_client.connector.scheduler.loads import Loads
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import FetchChoice, RequestLookup, RequestState
from lmkv_client.connector.vllm_api import Request
from lmkv_client.engine.session import Session

ALONE_BYTES = 256 << 20
"""Most bytes of a load in the step of a request that is alone: a request that arrives meanwhile waits some 25 ms."""
SHARED_BYTES = 4 << 20
"""Most bytes of all loads in a step with other requests: it takes a millisecond longer at worst."""


class StepLoads:
    """Decides which loads may be part of the next step, by their bytes."""

    def __init__(self, alone_bytes: int = ALONE_BYTES, shared_bytes: int = SHARED_BYTES) -> None:
        self._alone_bytes = alone_bytes
        self._shared_bytes = shared_bytes
        self._taken_bytes = 0
        self._workers_copy = False
        """Whether all workers have copied between pages and the pool of this attachment: before, it may not be mapped,
        for which only loads beside the steps wait."""

    def workers_copy(self) -> None:
        """All workers have copied between pages and the pool."""
        self._workers_copy = True

    def node_lost(self) -> None:
        """The pool is gone; the next one is not mapped yet."""
        self._workers_copy = False

    def have_room(self, size_bytes: int, *, is_alone: bool) -> bool:
        """Whether a load of this size may be in the step; `is_alone`: its request is the only one."""
        if not self._workers_copy:
            return False
        return self._taken_bytes + size_bytes <= (self._alone_bytes if is_alone else self._shared_bytes)

    def take(self, size_bytes: int) -> None:
        self._taken_bytes += size_bytes

    def end_step(self) -> None:
        """The step is planned."""
        self._taken_bytes = 0


class HitChoice:
    """Chooses what of the chunks that a lookup has found is loaded. Only what is faster to load than to compute is
    fetched, and nothing below the configured minima."""

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session[RequestLookup],
        lookups: RequestLookups,
        loads: Loads,
        step_loads: StepLoads,
        audits: Audits,
    ) -> None:
        self._audits = audits
        self._config = config
        self._session = session
        self._lookups = lookups
        self._loads = loads
        self._step_loads = step_loads
        self._may_be_in_step = not items_of(session.spec).all_or_none
        """Whether a load may be part of a step: vLLM can compute what such a load fails to bring."""

    def choose(
        self, state: RequestState, request: Request, computed_count: int, *, is_alone: bool
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond those computed, and whether beside the steps; None while chunks are fetched first."""
        lookup = state.lookup
        sync = lookup.loads_in_step = self._is_in_step(state, computed_count, is_alone=is_alone)
        here = max(computed_count, lookup.hit_tokens(lookup.hit_count(pool_only=True), request.num_tokens, sync=sync))
        hit = lookup.hit_tokens(lookup.hit_count(), request.num_tokens, sync=sync)
        if self._config.refuse_slow_fetches and not state.handoff_id:
            hit = self._worthwhile(state, computed_count, here, max(here, hit))
        hit = self._audits.cut(state, computed_count, hit)
        here = min(here, hit)
        if hit - here < max(1, self._config.min_fetch_tokens):
            if hit > here:
                state.account.unused = MissReason.BELOW_MINIMUM
            hit = here
        elif sync:
            self._lookups.fetch(state)
            return None, False
        if hit - computed_count < max(1, self._config.min_retrieve_tokens):
            if hit > computed_count:
                state.account.unused = MissReason.BELOW_MINIMUM
            return 0, False
        return hit - computed_count, not sync

    def begin(self, state: RequestState) -> None:
        """The chosen load begins: if it is part of the step, it takes room there."""
        if state.lookup.loads_in_step:
            self._step_loads.take(self._load_bytes(state, state.computed_count))

    def _is_in_step(self, state: RequestState, computed_count: int, *, is_alone: bool) -> bool:
        """Whether the load is part of the step: as configured, or if its whole hit is in the pool and fits the step."""
        if not self._may_be_in_step:
            return False
        if not self._config.enable_async_loading:
            return True
        if state.lookup.absent_count or state.handoff_id:
            return False
        return self._step_loads.have_room(self._load_bytes(state, computed_count), is_alone=is_alone)

    def _load_bytes(self, state: RequestState, computed_count: int) -> int:
        token_count = max(0, state.lookup.tokens_in(len(state.lookup.chunks)) - computed_count)
        return token_count * self._session.spec.chunk_bytes // self._session.spec.chunk_size

    def _worthwhile(self, state: RequestState, computed_count: int, here: int, hit: int) -> int:
        """The end of what is faster to load than to compute; `here` is the end of what is in the own pool."""
        choice = state.lookup.choice
        if choice is None or (choice.computed_count, choice.hit_tokens) != (computed_count, hit):
            count = self._loads.choose(state, here - computed_count, hit - here)
            self._session.counters.add("refused_fetch_tokens", hit - computed_count - count)
            choice = FetchChoice(computed_count=computed_count, hit_tokens=hit, loaded_count=count)
            state.lookup.choice = choice
        if choice.loaded_count < hit - computed_count:
            state.account.unused = MissReason.SLOWER
        return computed_count + choice.loaded_count
