"""The connector's scheduler side: vLLM's scheduling hooks, and the events of the node between them.

vLLM calls it on the thread that schedules: no hook delays other requests for longer than a few milliseconds, and none
raises when the cache fails.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey
from lmkv.misses import LossMemory, MissReason
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.adapters import Adapters
from lmkv_client.connector.engine_kv import EngineKv
from lmkv_client.connector.messages import StepPlan, WorkerReport
from lmkv_client.connector.multimodal import UnknownMedia
from lmkv_client.connector.scheduler.audits import Audits
from lmkv_client.connector.scheduler.block_copies import BlockIds, BlockMap
from lmkv_client.connector.scheduler.events import BlockEvents
from lmkv_client.connector.scheduler.handoff import (
    PARAMS,
    HandoffParams,
    audit_of,
    is_addressed,
    wants_explanation,
)
from lmkv_client.connector.scheduler.handoffs import RequestHandoffs
from lmkv_client.connector.scheduler.hints import HINTS, RequestHints, envelope_of
from lmkv_client.connector.scheduler.hit_choice import HitChoice, StepLoads
from lmkv_client.connector.scheduler.loads import Loads
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import RequestBuilder, RequestLookup, RequestState
from lmkv_client.connector.scheduler.stores import SchedulerOptions, Stores, has_tails
from lmkv_client.connector.scheduler.weight_versions import WeightVersions
from lmkv_client.connector.stats import SPEC_CONFLICTS, ConnectorStats
from lmkv_client.connector.vllm_api import (
    CacheHitSource,
    KVCacheBlocks,
    KVCacheEvent,
    KVConnectorOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    init_logger,
    processed_tokens,
)
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.node.client import NodeClient
from lmkv_client.engine.prompt_account import PromptAccount, spans_in_answer
from lmkv_client.engine.session import LookupState, Session, SessionEvent
from lmkv_client.engine.write_credits import KEPT_WHEN_IDLE
from lmkv_kernels import ChunkCopy

logger = init_logger("vllm.lmkv")

NO_ANSWER = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
"""Ends of requests that no decode continues."""

RESET_TIMEOUT_SECONDS = 1.0
RESET_POLL_SECONDS = 0.002
MAX_SKIPPED = 4096
"""Chunks that were computed and not stored of which the engine remembers that."""


class SchedulerSide:
    """One engine's requests: their lookups, loads, stores and handoffs."""

    def __init__(
        self,
        config: ConnectorConfig,
        kv: EngineKv,
        client: NodeClient,
        options: SchedulerOptions,
        *,
        adapters: Adapters | None = None,
        step_loads: StepLoads | None = None,
    ) -> None:
        """`step_loads` says which loads are part of a step; None: as many as cost others little."""
        self.adapters = adapters or Adapters()
        """The LoRA adapters that vLLM has loaded."""
        self._kv = kv
        self._options = options
        self._clock = clock = options.clock
        spec, blocks = kv.spec, BlockMap(spec=kv.spec, groups=kv.groups)
        # Where pages stay until their chunks are stored, no credit is needed before the answer to a lookup brings it.
        kept_when_idle = 0 if has_tails(config, spec) else KEPT_WHEN_IDLE
        self._session = session = Session[RequestLookup](
            config, spec, client, Counters(), kept_when_idle=kept_when_idle
        )
        self._step_loads = step_loads or StepLoads()
        self._states: dict[str, RequestState] = {}
        skipped = LossMemory(MAX_SKIPPED)
        self._lookups = RequestLookups(config, session, clock, skipped)
        self._loads = Loads(config, session, blocks, clock, rank_count=options.rank_count)
        self._builder = RequestBuilder(config, session, self.adapters)
        self._events = BlockEvents(spec=spec, groups=kv.groups, hash_block_size=kv.hash_block_size)
        self._audits = Audits(config, session, may_audit=options.may_store and not options.reads_ahead)
        self._stores = Stores(config, session, blocks, self._events, skipped, self._audits, options)
        self._last_account: tuple[str, PromptAccount] | None = None
        """The account of the request that has ended last, for `identity`."""
        self._postponed: RequestState | None = None
        """A request whose lookup waits until the last tokens of finished requests are stored."""
        self._handoffs = RequestHandoffs(config, session, self._stores)
        self._hints = RequestHints(config, session, self._stores, clock)
        self._weights = WeightVersions(spec.weight_version)
        self._hit_choice = HitChoice(config, session, self._lookups, self._loads, self._step_loads, self._audits)
        self._reset_count = 0
        """Resets that nodes have confirmed."""

    # ---- hooks of vLLM, in the order of a request's life

    def on_new_request(self, request: Request) -> None:
        """Handles a new request: computes its keys and looks it up."""
        self.drain_events()
        self._follow_weights()
        handoff = self._handoffs.read(request)
        state = self._track(request, handoff)
        if (envelope := envelope_of(request)) is not None:
            self._hints.begin(request.request_id, envelope, state)
        if handoff and handoff.is_prefill:
            self._handoffs.begin(handoff, request.request_id, state)
            if state is not None and self._session.attachment and self._options.may_store:
                self._stores.request_end(state)
        elif handoff and not (state and state.handoff_id and state.lookup.lookup_id):
            self._handoffs.drop(handoff)  # no lookup will load it

    def _track(self, request: Request, handoff: HandoffParams | None) -> RequestState | None:
        """Makes the request's state and looks it up; None if it cannot be cached."""
        state = self._builder.build(request, handoff)
        if request.mm_features:
            self._follow_media()
        if state is None:
            self._session.queue.add(request.request_id, request.num_tokens, self._clock())
            account = PromptAccount(request.num_tokens, self._session.spec.chunk_size)
            account.take(0, {})
            self._session.accounts.close(request.request_id, account)
            return None
        self._states[request.request_id] = state
        state.audit_name = audit_of(request.kv_transfer_params)
        if self._options.has_events:
            self._events.follow(request, state.chain.keys[: state.full_count])
        if not request.skip_reading_prefix_cache or state.audit_name:
            self._look_up(state)
        self._session.queue.add(request.request_id, state.token_count, self._clock())
        return state

    def _follow_media(self) -> None:
        """Stores nothing more of the requests for whose items vLLM may compute others from now on."""
        if names := self._builder.media.take_ambiguous():
            for state in self._states.values():
                state.store.may_store &= names.isdisjoint(state.media_names)

    def matched_tokens(self, request: Request, computed_count: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed, and whether asynchronously; None while that is not known."""
        self.drain_events()  # the weights may be identified now
        self._follow_weights()
        state = self._states.get(request.request_id)
        if state and state.fingerprint != self._session.spec.fingerprint:
            state = self._begin_again(request, state)
        if state is None or state.load_failed:
            return 0, False
        state.computed_count = computed_count
        if not self._pages_are_of(state, computed_count):
            state.store.may_store = False
            state.account.unanswered(MissReason.UNCACHEABLE)
            self._session.release(state.lookup)
            return 0, False
        self.drain_events()
        if self._lookups.is_stale(state) or request.num_preemptions > state.preemption_count:
            state.preemption_count = request.num_preemptions
            self._session.release(state.lookup)
            self._look_up(state)
        while (seconds := self._lookups.grace_seconds(state, is_alone=len(self._states) == 1)) > 0:
            self._session.client.wait(seconds)
            self.drain_events()
        if self._lookups.is_pending(state):
            return None, False
        if state.lookup.state is not LookupState.FOUND:
            return 0, False
        if not self._options.may_load:
            state.account.unused = MissReason.UNCACHEABLE
            return 0, False
        if request.skip_reading_prefix_cache:  # nothing is loaded: it was looked up for its audit
            self._audits.cut(state, computed_count, 0)
            return 0, False
        return self._hit_choice.choose(state, request, computed_count, is_alone=len(self._states) == 1)

    def _pages_are_of(self, state: RequestState, computed_count: int) -> bool:
        """Whether vLLM computes, and has computed, the pages of a request with what its keys name."""
        adapter = state.adapter
        if adapter is not None and not self.adapters.is_current(adapter):
            return False
        are_stale = self._weights.pages_are_stale or (adapter is not None and self.adapters.has_stale_pages(adapter))
        return not are_stale or not (computed_count or self._kv.hits_end_in_blocks)

    def allocated(self, request: Request, blocks: KVCacheBlocks, extra_count: int) -> None:
        """Begins the load of `extra_count` tokens: vLLM has given the request pages."""
        state = self._states.get(request.request_id)
        if state is None:
            self._session.queue.expect(request.request_id, 0)
            return
        self._session.queue.expect(request.request_id, state.token_count - state.computed_count - extra_count)
        self._audits.begin(state)
        self._stores.begin_audit(state)
        if extra_count > 0:
            self._hit_choice.begin(state)
            self._loads.begin(state, extra_count, blocks.get_block_ids())
        elif self._loads.get(request.request_id) is None:
            state.account.take(state.computed_count, {})
            self._session.release(state.lookup)

    def hit_sources(self, request: Request, extra_count: int) -> dict[CacheHitSource, int]:
        """The tokens of the load that was just planned, by vLLM's name of their source."""
        return self._loads.hit_sources(request.request_id, extra_count)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of this step for the workers."""
        self.drain_events()
        self._follow_weights()
        if output.num_scheduled_tokens or self._loads:
            self._weights.computed()
        if token_count := output.total_num_scheduled_tokens:
            self._session.prefill.planned(token_count, self._clock())
            self._audits.computed(token_count)
        if self._session.queue:
            self._session.queue.planned(output.num_scheduled_tokens)
        self._note_session_media(output)
        self._step_loads.end_step()
        self._session.send_reports()
        plan = StepPlan(attachment=self._session.attachment)
        if self._loads:
            plan.loads = self._loads.plan()
        if output.num_scheduled_tokens and self._session.attachment and self._options.may_store:
            plan.stores = self._stores.plan(output, self._states)
        if self._stores.has_ended:
            plan.tails = self._plan_tails(plan.stores, is_idle=not output.num_scheduled_tokens)
        if plan.stores or plan.tails:  # only with copies: an idle step does nothing for audits
            plan.audits = self._stores.take_audits()
        return plan

    def _note_session_media(self, output: SchedulerOutput) -> None:
        """Notes the items that sessions, which are not cached, have got since they began."""
        for new in output.scheduled_new_reqs:
            if new.mm_features and new.req_id not in self._states:
                with suppress(UnknownMedia):
                    self._builder.media.note(new.mm_features)
                self._follow_media()

    def _plan_tails(self, copies: list[ChunkCopy], *, is_idle: bool) -> dict[str, list[ChunkCopy]]:
        """The last copies of finished requests; adds others to `copies`. A step that computes nothing waits for their
        credits: the next one may be much later."""
        self._stores.settle(self._states.values())
        while is_idle and (seconds := self._stores.grace_seconds()) > 0:
            self._session.client.wait(seconds)
            self.drain_events()
        tails = self._stores.plan_ended(copies)
        for request_id in tails.keys() - self._states.keys():
            self._events.forget(request_id)
        if tails:
            self._settle_ends()
        return tails

    def _settle_ends(self) -> None:
        """Ends what waits until the last tokens of a request are stored, or never will be."""
        self._handoffs.settle()
        self._hints.settle()
        self._stores.settle(self._states.values())

    def handle_report(self, output: KVConnectorOutput) -> None:
        """Handles the workers' report of a step."""
        self._session.prefill.ended(self._clock())
        self.drain_events()  # the step may have been long: nothing may be sent to a node that was lost meanwhile
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._handle_report(report)
        if self._postponed and not self._stores.has_ended:
            self._look_up_postponed(self._postponed)

    def _handle_report(self, report: WorkerReport) -> None:
        if report.stores:
            self._stores.check_adapters(self.adapters)
        attachment = self._session.attachment
        stored = report.for_engine(attachment.engine_id) if attachment else None
        if stored and self._stores.handle_report(stored):
            self._step_loads.workers_copy()
        self._handoffs.settle()
        self._hints.settle()
        for request_id, loaded in report.loaded.items():
            state, is_alone = self._states.get(request_id), len(self._states) == 1
            if self._loads.handle_result(request_id, loaded, state, is_alone=is_alone):
                self._step_loads.workers_copy()

    def finished(self, request: Request, block_ids: BlockIds) -> bool:
        """Ends everything of a finished or aborted request.

        Whether its pages, `block_ids`, must stay until the workers report that they have stored its last tokens.
        """
        self.drain_events()
        state = self._states.pop(request.request_id, None)
        self._session.queue.remove(request.request_id)
        if state is None:
            return False
        self._session.accounts.close(request.request_id, state.account)
        self._last_account = request.request_id, state.account
        if not self._loads.finished(state):
            self._session.release(state.lookup)
        has_tail = False
        if request.status not in NO_ANSWER and self._session.attachment and self._options.may_store:
            computed_count = min(processed_tokens(request), request.num_tokens)
            has_tail = self._stores.end(state, computed_count, block_ids)
        if not has_tail:
            self._events.forget(request.request_id)
            self._stores.finished(state)
        self._hints.finished(state)
        self._handoffs.finished(state, is_aborted=request.status in NO_ANSWER)
        self._stores.settle(self._states.values())
        if not self._states:
            self._session.send_reports()
        return has_tail

    def identity(self, request: Request) -> dict[str, Any] | None:
        """For requests with lmkv's parameters or hints: the instance id of this engine's node, why a handoff was
        refused, and the outcome of each hint.

        With `explain` among the parameters: where the prompt of the request, the last that has ended, came from.
        """
        refusal = self._handoffs.refusal(request.request_id)
        self._handoffs.forget(request.request_id)
        outcomes = self._hints.take_report(request.request_id)
        if not outcomes and not is_addressed(request.kv_transfer_params):
            return None
        instance_id = self._session.welcome.instance_id if self._session.attachment else ""
        refused = {"handoff_refused": refusal} if refusal else {}
        hinted = {HINTS: outcomes} if outcomes else {}
        name = audit_of(request.kv_transfer_params)
        audited = {"audit": report.shown()} if (report := self._audits.report(name)) else {}
        return {PARAMS: {"instance_id": instance_id, **refused, **hinted, **audited, **self._explanation(request)}}

    def _explanation(self, request: Request) -> dict[str, Any]:
        request_id, account = self._last_account or ("", None)
        if account is None or request_id != request.request_id or not wants_explanation(request.kv_transfer_params):
            return {}
        return {"prompt": spans_in_answer(account.spans() if account.is_taken else ())}

    @property
    def is_storing(self) -> bool:
        """Whether workers write chunks, or are still to write some of finished requests."""
        return len(self._stores) > 0

    @property
    def has_tails(self) -> bool:
        """Whether finished requests have pages that a later step stores."""
        return self._stores.has_ended

    def reset(self) -> bool:
        """Drops every chunk of this engine's spec on its node. Unless the version of the weights is named, chunks that
        are stored elsewhere are not used either. Waits up to a second; whether the node has confirmed.
        """
        self.drain_events()
        self._weights.reset()
        if self._session.attachment is None:
            return False
        done = self._reset_count
        self._session.send(pb.Act(reset=pb.ResetChunks()))
        deadline = time.monotonic() + RESET_TIMEOUT_SECONDS
        while self._reset_count == done and time.monotonic() < deadline:
            time.sleep(RESET_POLL_SECONDS)
            self.drain_events()
        return self._reset_count > done

    # ---- weights that change

    def weights_changed(self) -> None:
        """The weights change now: in steps that are planned from now on they are others."""
        self._weights.changed()
        self._builder.media.weights_changed()

    def name_weights(self, version: str) -> None:
        """The weights have this version; engines with the same one share KV."""
        self.drain_events()
        if self._weights.name(version):
            self._builder.media.weights_changed()  # perhaps in a way that could not be seen
            self._begin_version()

    def encoder_cleared(self) -> None:
        """vLLM's encoder cache is empty."""
        self._builder.media.encoder_cleared(set().union(*(state.media_names for state in self._states.values())))

    def pages_cleared(self) -> None:
        """vLLM's prefix cache is empty."""
        self._weights.pages_cleared()
        self.adapters.pages_cleared()

    def _follow_weights(self) -> None:
        """Begins a version of its own if the weights have changed and have no name."""
        if self._weights.take_change():
            self._begin_version()

    def _begin_version(self) -> None:
        """Ends everything of the version before. Requests that run compute with KV of both: they store nothing more."""
        version = self._weights.current
        for state in self._states.values():
            if self._loads.get(state.request_id) is None:
                self._session.release(state.lookup)
            state.store.may_store = False
        self._loads.discard()
        self._stores.discard()
        self._handoffs.fail("the weights of this engine have changed")
        self._session.change_weights(version)
        if self._session.spec.is_private:
            logger.warning(
                "the weights have changed, or may have: no other engine shares KV with this one until their version is "
                "named (weight_version, POST /update_weight_version)"
            )
        else:
            logger.info("the weights have version %s", version)

    def _begin_again(self, request: Request, state: RequestState) -> RequestState | None:
        """The state of a request that has no KV yet, under the weights of now."""
        self._stores.finished(state)
        del self._states[request.request_id]
        if again := self._track(request, None):
            again.preemption_count = request.num_preemptions
        return again

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of what the node has gained and lost since the last call."""
        self.drain_events()
        return self._events.take()

    def take_stats(self) -> ConnectorStats | None:
        """Counts since the last call."""
        values = self._session.counters.take()
        return ConnectorStats(data=values) if values else None

    # ---- events of the node

    def drain_events(self) -> None:
        """Handles everything that the node has sent."""
        for event in self._session.events(self._clock()):
            self._handle(event)

    def _handle(self, event: SessionEvent[RequestLookup]) -> None:
        kind, message, lookup = event.kind, event.message, event.lookup
        if kind == "found" and lookup:
            self._lookups.found(lookup, message)
        elif kind == "late" and lookup:
            self._lookups.late(lookup, message)
        elif kind == "loaded":
            self._handle_loaded(message, lookup)
        elif kind == "rejected_commit":
            self._events.refused(ChunkKey(message.chunk_key))
        elif kind == "tier_change":
            self._events.apply([message])
        elif kind == "handed":
            self._handoffs.handle_ended(message)
        elif kind == "hinted":
            self._hints.handle_answer(message)
        elif kind == "reset":
            self._reset_count += 1
        elif kind == "audit_hits":
            self._audits.audit_all(message.duration.ToNanoseconds() / 1e9)
        elif kind == "conflicts":
            self._handle_conflicts(message)
        elif kind == "identified":  # keys of requests that have begun before lack the identity of the weights
            for state in self._states.values():
                state.store.may_store = False
        elif kind == "lost":
            self._handle_node_loss()

    def _handle_loaded(self, loaded: pb.LoadedChunks, lookup: RequestLookup | None) -> None:
        counters = self._session.counters
        counters.add("peer_bytes", loaded.transferred_bytes)
        counters.add("peer_seconds", loaded.transfer_duration.ToNanoseconds() / 1e9)
        if lookup and not self._loads.loaded(lookup, loaded):
            self._lookups.loaded(lookup, loaded)

    def _handle_conflicts(self, conflicts: pb.SpecConflicts) -> None:
        self._session.counters.set(SPEC_CONFLICTS, len(conflicts.conflicts))
        for conflict in conflicts.conflicts:
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
        logger.warning("the node is lost; computing everything until one is available")
        self._step_loads.node_lost()
        self._stores.node_lost()
        self._handoffs.fail("the node of this engine is lost")
        self._hints.node_lost()
        self._loads.node_lost()
        self._events.node_lost()
        for state in self._states.values():
            state.account.node_lost()
            state.lookup.end()  # postponed lookups, too

    # ---- helpers of the hooks

    def _look_up_postponed(self, state: RequestState) -> None:
        self._postponed = None
        if state.lookup.state is LookupState.ASKED and self._states.get(state.request_id) is state:
            self._look_up(state)

    def _look_up(self, state: RequestState) -> None:
        """Looks a request up; the only one of an engine after the next step, if that stores tails: it may continue
        what they end."""
        if self._session.attachment and self._stores.has_ended and len(self._states) == 1:
            self._postponed = state
            self._lookups.postpone(state)
        else:
            self._lookups.start(state, self._stores.wanted_credits(self._states.values()))
