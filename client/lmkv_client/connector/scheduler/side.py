"""The connector's scheduler side: vLLM's scheduling hooks, and the events of the node between them.

vLLM calls it on the thread that schedules: no hook delays other requests for longer than a few milliseconds, and none
raises when the cache fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lmkv.config import ConnectorConfig
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.engine_kv import EngineKv
from lmkv_client.connector.messages import Attachment, StepPlan, WorkerReport
from lmkv_client.connector.node.client import NodeClient, NodeLost
from lmkv_client.connector.scheduler.block_copies import BlockMap
from lmkv_client.connector.scheduler.events import BlockEvents
from lmkv_client.connector.scheduler.handoff import PARAMS, HandoffParams, is_addressed
from lmkv_client.connector.scheduler.handoffs import RequestHandoffs
from lmkv_client.connector.scheduler.loads import Loads
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.prefill_rate import PrefillRate
from lmkv_client.connector.scheduler.request_builder import RequestBuilder
from lmkv_client.connector.scheduler.request_state import LookupState, RequestState
from lmkv_client.connector.scheduler.stores import Stores
from lmkv_client.connector.stats import SPEC_CONFLICTS, ConnectorCounters, ConnectorStats
from lmkv_client.connector.vllm_api import (
    BlockStored,
    CacheHitSource,
    KVCacheBlocks,
    KVConnectorOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    init_logger,
)

logger = init_logger("vllm.lmkv")

NO_ANSWER = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
"""Ends of requests that no decode continues."""

GRACE_POLL_SECONDS = 0.00005
RESET_TIMEOUT_SECONDS = 1.0
RESET_POLL_SECONDS = 0.002


class SchedulerSide:
    """One engine's requests: their lookups, loads, stores and handoffs."""

    def __init__(
        self,
        config: ConnectorConfig,
        kv: EngineKv,
        node_client: NodeClient,
        *,
        rank_count: int,
        step_tokens: int,
        may_load: bool = True,
        may_store: bool = True,
        has_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._may_load = may_load
        self._may_store = may_store
        spec = kv.spec
        blocks = BlockMap(spec=spec, groups=kv.groups)
        self._node_client = node_client
        self._block_size = block_size = kv.groups[0].block_size
        self._sync = spec.has_plain_parts and not config.enable_async_loading
        """Whether loads are part of a step. Loads of parts are not: vLLM handles their failures by request."""
        self._clock = clock
        self._attachment: Attachment | None = None
        self._states: dict[str, RequestState] = {}
        self._counters = ConnectorCounters()
        self._prefill = PrefillRate(spec.chunk_size)
        self._lookups = RequestLookups(config, self._send, self._counters, clock, self._prefill)
        self._loads = Loads(config, self._lookups, self._counters, clock, blocks=blocks, rank_count=rank_count)
        self._builder = RequestBuilder(config, spec, node_client.served, self._send)
        self._has_events = has_events
        self._events = BlockEvents(block_size=block_size, chunk_size=spec.chunk_size)
        self._stores = Stores(
            blocks,
            self._send,
            self._counters,
            self._events,
            rank_count=rank_count,
            step_tokens=step_tokens,
            with_decode=config.save_decode_cache,
        )
        self._handoffs = RequestHandoffs(config, self._send, self._counters, self._stores.is_writing)
        self._resets_done = 0
        self._welcome = pb.Welcome()
        """The latest welcome of a node."""

    # ---- hooks of vLLM, in the order of a request's life

    def on_new_request(self, request: Request) -> None:
        """Handles a new request: computes its keys and looks it up."""
        self.drain_events()
        handoff = self._handoffs.read(request, self._welcome.instance_id if self._attachment else "")
        state = self._track(request, handoff)
        if handoff and handoff.is_prefill:
            self._handoffs.begin(handoff, request.request_id, state)
        elif handoff and not (state and state.handoff_id and state.lookup_id):
            self._handoffs.drop(handoff)  # no lookup will load it

    def _track(self, request: Request, handoff: HandoffParams | None) -> RequestState | None:
        """Makes the request's state and looks it up; None if it cannot be cached."""
        state = self._builder.build(request, handoff)
        if state is None:
            return None
        self._states[request.request_id] = state
        if self._has_events:
            self._events.follow(request)
        if not request.skip_reading_prefix_cache:
            self._look_up(state)
        return state

    def matched_tokens(self, request: Request, computed_count: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed, and whether asynchronously; None while that is not known."""
        state = self._states.get(request.request_id)
        if state is None or state.load_failed:
            return 0, False
        self.drain_events()
        if self._lookups.is_stale(state) or request.num_preemptions > state.preemption_count:
            state.preemption_count = request.num_preemptions
            self._lookups.release(state)
            self._look_up(state)
        while self._lookups.is_fresh(state, is_alone=len(self._states) == 1):
            time.sleep(GRACE_POLL_SECONDS)
            self.drain_events()
        if self._lookups.is_pending(state):
            return None, False
        if state.lookup_state is not LookupState.FOUND or not self._may_load:
            return 0, False
        sync = self._sync
        state.computed_count = computed_count
        here = max(computed_count, self._hit(state, request, state.found_chunks(pool_only=True), sync=sync))
        hit = self._hit(state, request, state.found_chunks(), sync=sync)
        if hit - here < max(1, self._config.min_fetch_tokens):
            hit = here
        elif sync:
            self._lookups.fetch(state)
            return None, False
        if hit - computed_count < max(1, self._config.min_retrieve_tokens):
            return 0, False
        return hit - computed_count, not sync

    def _hit(self, state: RequestState, request: Request, chunk_count: int, *, sync: bool) -> int:
        return state.hit_tokens(chunk_count, request.num_tokens, self._block_size, sync=sync)

    def allocated(self, request: Request, blocks: KVCacheBlocks, extra_count: int) -> None:
        """Begins the load of `extra_count` tokens: vLLM has given the request pages."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if extra_count > 0:
            self._loads.begin(state, extra_count, blocks.get_block_ids())
        elif self._loads.get(request.request_id) is None:
            self._lookups.release(state)

    def hit_sources(self, request: Request, extra_count: int) -> dict[CacheHitSource, int]:
        """The tokens of the load that was just planned, by vLLM's name of their source."""
        return self._loads.hit_sources(request.request_id, extra_count)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of this step for the workers."""
        self.drain_events()
        self._prefill.planned(output.total_num_scheduled_tokens, self._clock())
        plan = StepPlan(attachment=self._attachment)
        if self._loads:
            plan.loads = self._loads.plan()
        if output.num_scheduled_tokens and self._attachment and self._may_store:
            plan.stores = self._stores.plan(output, self._states)
        return plan

    def handle_report(self, output: KVConnectorOutput) -> None:
        """Handles the workers' report of a step."""
        self._prefill.ended(self._clock())
        self.drain_events()  # the step may have been long: nothing may be sent to a node that was lost meanwhile
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        if self._attachment and report.engine_id == self._attachment.engine_id:
            self._stores.handle_report(report)
        self._handoffs.settle()
        for request_id, loaded in report.loaded.items():
            self._loads.handle_result(request_id, loaded, self._states.get(request_id))

    def finished(self, request: Request) -> None:
        """Ends everything of a finished or aborted request."""
        self.drain_events()
        self._events.forget(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        if not self._loads.finished(state):
            self._lookups.release(state)
        self._stores.finished(state)
        self._handoffs.finished(state, is_aborted=request.status in NO_ANSWER)
        if not self._states:
            self._stores.idle()

    def identity(self, request: Request) -> dict[str, Any] | None:
        """The instance id of this engine's node, and why a handoff was refused, for requests with lmkv's parameters."""
        refusal = self._handoffs.refusal(request.request_id)
        self._handoffs.forget(request.request_id)
        if not is_addressed(request.kv_transfer_params):
            return None
        attached = self._welcome if self._attachment else pb.Welcome()
        refused = {"handoff_refused": refusal} if refusal else {}
        return {PARAMS: {"instance_id": attached.instance_id, **refused}}

    @property
    def is_storing(self) -> bool:
        """Whether workers still write chunks."""
        return len(self._stores) > 0

    def reset(self) -> bool:
        """Drops every chunk of this engine's spec on its node. Waits up to a second; whether the node has confirmed."""
        self.drain_events()
        if self._attachment is None:
            return False
        done = self._resets_done
        self._send(pb.AttachRequest(reset=True))
        deadline = time.monotonic() + RESET_TIMEOUT_SECONDS
        while self._resets_done == done and time.monotonic() < deadline:
            time.sleep(RESET_POLL_SECONDS)
            self.drain_events()
        return self._resets_done > done

    def take_events(self) -> list[BlockStored]:
        """KV events of stored chunks since the last call."""
        return self._events.take()

    def take_stats(self) -> ConnectorStats | None:
        """Counts since the last call."""
        return self._counters.take()

    # ---- events of the node

    def drain_events(self) -> None:
        """Handles everything that the node has sent."""
        inbox = self._node_client.inbox
        while inbox:
            event = inbox.popleft()
            if isinstance(event, Attachment):
                self._attachment = event
                if self._node_client.served.has_adapters:  # adapters may have been loaded since the hello was sent
                    self._send(pb.AttachRequest(served_models=self._node_client.served.messages))
            elif isinstance(event, NodeLost):
                self._handle_node_loss()
            else:
                self._handle_answer(event)

    def _handle_answer(self, message: pb.AttachResponse) -> None:
        if message.HasField("welcome"):
            self._stores.reset_credits(message.welcome.credit_limit)
            self._welcome = message.welcome
        settled = (message.settled_reserve_count, *message.settled_part_reserve_counts)
        granted = [(extent.part, extent.offset) for extent in message.credits]
        self._stores.credits.settle(settled, granted)
        for found in message.found:
            self._lookups.handle_found(found)
        for loaded in message.loaded:
            self._counters.add("peer_bytes", loaded.transferred_bytes)
            self._counters.add("peer_seconds", loaded.transfer_duration.ToNanoseconds() / 1e9)
            if not self._loads.handle_loaded(loaded):
                self._lookups.handle_loaded(loaded)
        for handed in message.handed:
            self._handoffs.handle_ended(handed)
        for rejected in message.rejected_commits:
            logger.warning("the node refused chunk %s: %s", rejected.chunk_key.hex(), rejected.status.message)
        self._resets_done += len(message.reset_counts)
        if message.HasField("conflicts"):
            self._counters.set(SPEC_CONFLICTS, len(message.conflicts.conflicts))
        for conflict in message.conflicts.conflicts:
            logger.warning(
                "shares nothing with instance %s, which also serves %s: %s is %s here and %s there",
                conflict.instance_id,
                conflict.model_name,
                conflict.field,
                conflict.own_value,
                conflict.other_value,
            )

    def _handle_node_loss(self) -> None:
        """Ends everything that the node had granted. Workers report running copies under the old attachment."""
        self._counters.add("node_losses")
        logger.warning("the node is lost; computing everything until one is available")
        self._attachment = None
        self._lookups.node_lost()
        self._stores.node_lost()
        self._handoffs.node_lost()
        self._loads.node_lost()
        for state in self._states.values():
            state.end_lookup()

    # ---- helpers of the hooks

    def _look_up(self, state: RequestState) -> None:
        if self._attachment is None:
            state.end_lookup()
        else:
            self._lookups.start(state, lambda: self._stores.reserve_counts(self._states.values()))

    def _send(self, message: pb.AttachRequest) -> None:
        """Sends to the attached node, if there is one; messages for a lost node are not valid for the next."""
        if self._attachment is not None:
            self._node_client.send(self._attachment, message)
