"""How many tokens of a hit are loaded, and whether in the step or beside the steps."""

from __future__ import annotations

from lmkv.config import ConnectorConfig
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv_client.connector.scheduler.loads.loads import Loads
from lmkv_client.connector.scheduler.loads.step_loads import StepLoads
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.connector.stats import ConnectorCounters
from lmkv_client.connector.vllm_api import Request
from lmkv_client.engine.prompts.prefill_rate import PrefillRate


class HitChoice:
    """Chooses what of the chunks that a lookup has found is loaded. Only what is faster to load than to compute is
    fetched, and nothing below the configured minima."""

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KvSpec,
        lookups: RequestLookups,
        loads: Loads,
        step_loads: StepLoads,
        counters: ConnectorCounters,
        prefill: PrefillRate,
    ) -> None:
        self._config = config
        self._spec = spec
        self._lookups = lookups
        self._loads = loads
        self._step_loads = step_loads
        self._counters = counters
        self._prefill = prefill
        self._in_step = spec.has_plain_parts and not config.enable_async_loading
        """Whether all loads are part of a step. Loads of parts are not: vLLM handles their failures by request."""

    def choose(
        self, state: RequestState, request: Request, computed_count: int, *, is_alone: bool
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond those computed, and whether beside the steps; None while chunks are fetched first."""
        sync = state.loads_in_step = self._in_step or self._fits_step(state, computed_count, is_alone=is_alone)
        here = max(computed_count, state.hit_tokens(state.found_chunks(pool_only=True), request.num_tokens, sync=sync))
        hit = state.hit_tokens(state.found_chunks(), request.num_tokens, sync=sync)
        if self._config.refuse_slow_fetches and not state.handoff_id and not state.has_parts:
            hit = self._worthwhile(state, computed_count, here, max(here, hit))
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
        if state.loads_in_step:
            self._step_loads.take(self._load_bytes(state, state.computed_count))

    def _fits_step(self, state: RequestState, computed_count: int, *, is_alone: bool) -> bool:
        """Whether the load of the whole hit is to be part of the step, though other loads are not."""
        if state.has_parts or state.absent_count or state.handoff_id:
            return False
        return self._step_loads.have_room(self._load_bytes(state, computed_count), is_alone=is_alone)

    def _load_bytes(self, state: RequestState, computed_count: int) -> int:
        token_count = max(0, state.found_tokens(len(state.own)) - computed_count)
        return token_count * self._spec.chunk_bytes // self._spec.chunk_size

    def _worthwhile(self, state: RequestState, computed_count: int, here: int, hit: int) -> int:
        """The end of what is faster to load than to compute; `here` is the end of what is in the own pool."""
        if state.chosen_tokens is None or state.chosen_tokens[:2] != (computed_count, hit):
            rate = self._prefill.tokens_per_second
            count = self._loads.costs.choose(here - computed_count, hit - here, rate)
            self._counters.add("refused_fetch_tokens", hit - computed_count - count)
            state.chosen_tokens = computed_count, hit, count
        if state.chosen_tokens[2] < hit - computed_count:
            state.account.unused = MissReason.SLOWER
        return computed_count + state.chosen_tokens[2]
