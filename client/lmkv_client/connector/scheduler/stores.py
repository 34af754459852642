"""Stores: plans the copies of completed chunks into the pool, and commits what was written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.misses import LossMemory, MissReason
from lmkv.spec import KvSpec
from lmkv.tiers import OWN
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END
from lmkv_client.connector.adapters import Adapters
from lmkv_client.connector.messages import AuditedExtent, WorkerReport
from lmkv_client.connector.scheduler.audits import Audits
from lmkv_client.connector.scheduler.block_copies import BlockIds, BlockMap, PartExtent, has_null_page
from lmkv_client.connector.scheduler.events import BlockEvents
from lmkv_client.connector.scheduler.pending_stores import EndedRequest, EndedRequests, PendingStore, PendingStores
from lmkv_client.connector.scheduler.request_state import HeldEnd, RequestLookup, RequestState
from lmkv_client.connector.scheduler.windows import Windows
from lmkv_client.connector.vllm_api import SchedulerOutput, init_logger
from lmkv_client.engine.session import Session
from lmkv_client.engine.write_credits import WriteCredits
from lmkv_kernels import ChunkCopy

logger = init_logger("vllm.lmkv")

MAX_FAILURES = 2
"""Failed steps after which a request stores no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """The properties of an engine that its configuration does not have."""

    rank_count: int
    """Workers that copy a share of each chunk."""
    step_tokens: int
    may_load: bool = True
    may_store: bool = True
    reads_ahead: bool = False
    """Whether chunks have layers of a drafter: these may depend on the token behind a chunk, which no key names."""
    has_events: bool = False
    """Whether vLLM publishes KV events."""
    clock: Callable[[], float] = time.monotonic


def has_tails(config: ConnectorConfig, spec: KvSpec) -> bool:
    """Whether the pages of a finished request stay until all that is to be stored of it is."""
    return config.stores_partial_chunks and spec.matches_prefixes and spec.ends_anywhere


class Stores:
    """The stores of one engine. A part of a chunk is committed only after every rank has written its share.

    Parts of full attention are stored when there is a credit, since a request keeps their pages. vLLM frees pages of
    windows and local chunks while the request runs: they are stored in the step that completes a chunk, or not at all.
    States are stored where vLLM offers them, windows where hits are expected to end (`Windows`).

    A partial chunk is stored in an extent of exactly its size: the end of a prompt if its credit is there in time, the
    last tokens of a request when it has finished.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session[RequestLookup],
        blocks: BlockMap,
        events: BlockEvents,
        skipped: LossMemory,
        audits: Audits,
        options: SchedulerOptions,
    ) -> None:
        """`skipped` is to have the chunks that were computed and not stored; `audits` judge those that are held."""
        spec = blocks.spec
        self._with_tails = config.stores_partial_chunks and spec.ends_anywhere
        self._pages_stay = has_tails(config, spec)
        self._with_decode = config.save_decode_cache
        self._session = session
        self._spec = spec
        self._blocks = blocks
        self._events = events
        self._skipped = skipped
        self._audits = audits
        self._step_chunks = -(-options.step_tokens // spec.chunk_size)
        self._kept_parts = [index for index, part in enumerate(spec.parts) if part.rule == PART_RULE_ALL]
        self._states = [index for index, part in enumerate(spec.parts) if part.rule == PART_RULE_END]
        self._freed_parts = [
            index for index in range(len(spec.parts)) if index not in self._kept_parts and index not in self._states
        ]
        self._windows = Windows(spec)
        self._lacks_credits = False
        """Whether a chunk found no credit since credits were last requested."""
        self._pending = PendingStores(options.rank_count)
        self._ended = EndedRequests(options.clock)
        self._asked: list[int] = []
        """Lengths of partial chunks for which to request credits."""
        self._planned_audits: dict[int, AuditedExtent] = {}

    def __len__(self) -> int:
        """Chunks that workers write, and finished requests whose last tokens they are still to write."""
        return len(self._pending) + len(self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether finished requests have pages that a later step stores."""
        return len(self._ended) > 0

    def is_writing(self, state: RequestState) -> bool:
        """Whether workers still write chunks of this request, or are still to write its last tokens."""
        return state in self._ended or self._pending.has_any_of(state)

    def wanted_credits(self, states: Collection[RequestState]) -> list[int]:
        """Credits that are to be available, by part: enough for two steps of these requests, and for chunks that wait
        for one. Where pages do not stay until their chunks are stored, also for a decoded chunk of each."""
        unstored = min(sum(state.unstored_count for state in states), 2 * self._step_chunks)
        lacking = sum(state.store.lacking_count for state in states) + self._ended.missing_count
        spare = 0 if self._pages_stay else len(states)
        counts = [0 if part in self._states else unstored + lacking for part in range(len(self._spec.parts))]
        for part in self._windows.parts:
            windows = sum(self._windows.wanted_count(state, part) for state in states)
            counts[part] = min(windows + lacking, counts[part])
        return [spare + count for count in counts]

    def plan(self, output: SchedulerOutput, states: dict[str, RequestState]) -> list[ChunkCopy]:
        """The copies of chunks that this step completes, and of those that found no credit before."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        copies: list[ChunkCopy] = []
        if self._states:
            self._plan_states(output, states, copies)
        for request_id, count in output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state and state.store.may_store and state.store.failure_count < MAX_FAILURES:
                self._plan(state, computed[request_id] + count, output, copies)
        if copies or self._lacks_credits:
            self._request(states.values())
        else:
            self._exchange()
        return copies

    def _request(self, states: Collection[RequestState], returned: Sequence[int] = ()) -> None:
        """Requests the credits that these and the finished requests lack, and returns others."""
        wanted = self._session.credits.request(self.wanted_credits(states))
        if any(wanted):
            self._lacks_credits = False
        self._exchange(returned, wanted if any(wanted) else ())

    def _exchange(self, returned: Sequence[int] = (), counts: Sequence[int] = ()) -> None:
        """Returns credits, requests those for full chunks, by part, and for the partial chunks that were asked for."""
        acts = []
        if returned:
            acts.append(pb.Act(return_credits=pb.ReturnCredits(offsets=returned)))
        if counts or self._asked:
            acts.append(pb.Act(reserve=pb.ReserveCredits(counts=counts, partial_token_counts=self._asked)))
            self._asked = []
        if acts:
            self._session.send(*acts)

    def request_end(self, state: RequestState) -> None:
        """Requests a credit for the end of a prompt that a handoff sends: the step that completes it stores it."""
        self._ask_for_end(state)
        self._exchange()

    def begin_audit(self, state: RequestState) -> None:
        """Requests a credit for the end of the request's hit, if it is compared."""
        if end := state.store.held_end:
            self._ask(end.token_count)
            self._exchange()

    def _ask_for_end(self, state: RequestState) -> None:
        """Asks for a credit for the end of a prompt, once."""
        if not state.store.partial_is_stored and not state.store.end_is_requested and state.store.may_store:
            state.store.end_is_requested = True
            self._ask(state.token_count % self._spec.chunk_size)

    def _ask(self, token_count: int) -> None:
        if self._session.credits.request_partial(token_count):
            self._asked.append(token_count)

    def _plan(self, state: RequestState, done_count: int, output: SchedulerOutput, copies: list[ChunkCopy]) -> None:
        size = self._spec.chunk_size
        end = state.store.held_end
        compares_end = end and end.is_computed(done_count, size) and self._has_credits(end)
        prompt_done = done_count >= state.token_count
        if prompt_done and not self._with_decode:
            done_count = state.token_count
        full = state.keys_up_to(done_count // size)
        self._ask_for_end(state)
        tokens = state.token_count % size
        partial = prompt_done and not state.store.partial_is_stored and len(self._session.credits.partial(tokens)) > 0
        is_passed = not self._freed_parts or full <= state.store.passed_count
        if full <= state.store.stored_count and not partial and is_passed and not compares_end:
            return
        block_ids = output.kv_connector_block_state.get_block_ids(state.request_id)
        if compares_end:
            self._compare_end(state, block_ids, copies)
        if self._freed_parts:
            self._plan_freed(state, full, block_ids, copies)
        for index in range(state.store.stored_count, full):
            for part in self._kept_parts:
                if not self._write(state, part, index, size, block_ids, copies):
                    state.store.lacking_count = max(0, full - max(index, state.full_count))
                    return
            state.store.stored_count = index + 1
        state.store.lacking_count = 0
        if partial:
            state.store.partial_is_stored = self._write_tail(state, state.full_count, tokens, block_ids, copies)

    def end(self, state: RequestState, computed_count: int, block_ids: BlockIds) -> bool:
        """Begins to store what a finished request has computed and not stored: its last tokens, and chunks that found
        no credit before. Whether there is any: then its pages must stay until `plan_ended` has returned its copies, and
        these are made.
        """
        end = state.store.held_end
        if end and not end.is_computed(computed_count, self._spec.chunk_size):
            end = state.store.held_end = None
        is_of_use = self._with_tails or state.store.held or end  # held chunks are to be compared
        if not is_of_use or not state.store.may_store or state.store.failure_count >= MAX_FAILURES:
            return False
        size = self._spec.chunk_size
        is_awaited = state.is_handed_off and not state.store.partial_is_stored  # exactly this end is sent
        done_count = computed_count if self._with_decode and not is_awaited else min(computed_count, state.token_count)
        full = state.keys_up_to(done_count // size)
        rest = done_count - full * size if self._with_tails else 0
        if done_count == state.token_count and state.store.partial_is_stored:
            rest = 0
        if full <= state.store.stored_count and not rest and not end:
            return False
        self._ended.add(state, full, rest, block_ids)
        if rest and len(self._session.credits.partial(rest)) < self._ended.partial_counts[rest]:
            self._ask(rest)
        return True

    def grace_seconds(self) -> float:
        """Returns how long a step that computes nothing may still wait for the credits of finished requests."""
        return self._ended.grace_seconds(self._session.credits)

    def plan_ended(self, copies: list[ChunkCopy]) -> dict[str, list[ChunkCopy]]:
        """Returns the last copies of finished requests, by request. Each request is returned once.

        A finished request may have more chunks than the limit of credits. Its chunks for which there are credits are
        added to `copies`, and it waits for further credits.
        """
        for ended in self._ended.with_missing_chunks():
            store = ended.state.store
            ended.is_discarded |= not store.may_store or store.failure_count >= MAX_FAILURES
            if ended.missing_count > len(self._session.credits[0]):
                self._write_full(ended, copies)
        ready = self._ended.take_ready(self._session.credits)
        return {ended.state.request_id: self._store_ended(ended) for ended in ready}

    def _store_ended(self, ended: EndedRequest) -> list[ChunkCopy]:
        state, copies = ended.state, list[ChunkCopy]()
        if not ended.is_discarded:
            state.store.tail_is_lost = ended.rest_count > 0
            self._write_ended(ended, copies)
            self._compare_end(state, ended.block_ids, copies)
        self.finished(state)
        return copies

    def _write_full(self, ended: EndedRequest, copies: list[ChunkCopy]) -> bool:
        """Adds the copies of its full chunks for which there are credits; False if one lacks some."""
        state = ended.state
        for index in range(state.store.stored_count, ended.full_count):
            for part in self._kept_parts:
                if not self._write(state, part, index, self._spec.chunk_size, ended.block_ids, copies):
                    return False
            state.store.stored_count = index + 1
        return True

    def _write_ended(self, ended: EndedRequest, copies: list[ChunkCopy]) -> None:
        if not self._write_full(ended, copies):
            return
        state, rest_count = ended.state, ended.rest_count
        if rest_count and self._write_tail(state, ended.full_count, rest_count, ended.block_ids, copies):
            state.store.tail_is_lost = False
            if ended.full_count * self._spec.chunk_size + ended.rest_count == state.token_count:
                state.store.partial_is_stored = True

    def _has_credits(self, end: HeldEnd) -> bool:
        return all(len(self._session.credits.partial(end.token_count, part)) for part in end.parts)

    def _compare_end(self, state: RequestState, block_ids: BlockIds, copies: list[ChunkCopy]) -> None:
        """Adds the copies of the end of a hit that is compared, of the parts that have a credit and all their pages."""
        end, state.store.held_end = state.store.held_end, None
        for part, held in end.parts.items() if end else ():
            assert end
            source = self._session.credits.partial(end.token_count, part)
            if (offset := source.take()) is None:
                continue
            own = self._blocks.stored(PartExtent(part, end.index, end.token_count, offset), block_ids)
            if has_null_page(own):
                source.return_unwritten(offset)
                continue
            copies += own
            store = PendingStore(
                state=state,
                part=part,
                key=end.key,
                index=end.index,
                token_count=end.token_count,
                source=source,
                held=held,
            )
            self._add(offset, store)

    def _write_tail(
        self, state: RequestState, index: int, token_count: int, block_ids: BlockIds, copies: list[ChunkCopy]
    ) -> bool:
        """Adds the copies that store all parts of a partial chunk that a hit needs; False if they are not stored."""
        end, own = index * self._spec.chunk_size + token_count, self._session.credits
        needed = [number for number, part in enumerate(self._spec.parts) if part.first_token(end) < end]
        if not all(len(own.partial(token_count, part)) for part in needed):
            state.store.lacked_credit = self._lacks_credits = True
            return False
        is_written = all(self._write(state, part, index, token_count, block_ids, copies) for part in needed)
        if is_written:
            state.store.partials[index] = state.key_behind(index, token_count)
        return is_written

    def _plan_freed(self, state: RequestState, full: int, block_ids: BlockIds, copies: list[ChunkCopy]) -> None:
        """The parts whose pages vLLM may free in the next step. Chunks that vLLM has freed already are passed over."""
        size = self._spec.chunk_size
        for part in self._freed_parts:
            for index in self._stored_chunks(state, part, full):
                self._write(state, part, index, size, block_ids, copies)
        state.store.passed_count = max(state.store.passed_count, full)

    def _stored_chunks(self, state: RequestState, part: int, stop: int) -> Iterable[int]:
        """The chunks that have not been passed, before `stop`, of which a part is stored whose pages vLLM frees."""
        if part in self._windows.parts:
            return self._windows.stored(state, part, stop)
        kind, size = self._spec.parts[part], self._spec.chunk_size
        return [index for index in range(state.store.passed_count, stop) if kind.is_needed(index, size)]

    def _plan_states(self, output: SchedulerOutput, states: dict[str, RequestState], copies: list[ChunkCopy]) -> None:
        """The states that vLLM offers in this step, where chunks end. All layers of a part must be among them."""
        size = self._spec.chunk_size
        groups = self._blocks.groups
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            state = states.get(request_id)
            if state is None or not state.store.may_store or state.store.failure_count >= MAX_FAILURES:
                continue
            limit = len(state.all_tokens) if self._with_decode else state.token_count
            offered: dict[tuple[int, int], dict[int, int]] = {}
            for group, block, tokens in offers:
                if tokens % size == 0 and tokens <= limit and tokens // size > state.store.stored_count:
                    offered.setdefault((groups[group].part, tokens // size - 1), {})[group] = block
            for (part, index), blocks in offered.items():
                if len(blocks) < sum(group.part == part for group in groups) or state.keys_up_to(index + 1) <= index:
                    continue
                source = self._session.credits[part]
                offset = self._take_credit(state, source)
                if offset is None:
                    state.store.skipped_chunks.add(index)
                else:
                    copies += self._blocks.state_copies(part, list(blocks.items()), offset=offset)
                    last = state.store.state_chunks.get(part, -1)
                    extent = PartExtent(part, index, size, offset)
                    self._note(state, extent, source, superseded=last if last < index else -1)
                    state.store.state_chunks[part] = index

    def _write(
        self,
        state: RequestState,
        part: int,
        index: int,
        token_count: int,
        block_ids: BlockIds,
        copies: list[ChunkCopy],
    ) -> bool:
        """Adds the copies that store one part of a chunk; False if there is no credit, or no KV of it in its pages."""
        size = self._spec.chunk_size
        is_full = token_count == size
        source = self._session.credits[part] if is_full else self._session.credits.partial(token_count, part)
        offset = self._take_credit(state, source)
        if offset is None:
            if part in self._freed_parts and is_full:
                lost = self._blocks.stored(PartExtent(part, index, token_count, 0), block_ids)
                state.store.skipped_chunks |= set() if has_null_page(lost) else {index}
            return False
        extent = PartExtent(part, index, token_count, offset)
        own = self._blocks.stored(extent, block_ids)
        if has_null_page(own):
            source.return_unwritten(offset)
            if part in self._kept_parts:
                self._refuse_null_page(state)
            return False
        copies += own
        older = self._spec.parts[part].needed(index * size + token_count, size).start - 1
        if self._windows.is_lasting(state, part, older):
            older = -1
        self._note(state, extent, source, superseded=older)
        return True

    def _take_credit(self, state: RequestState, source: WriteCredits) -> int | None:
        offset = source.take()
        if offset is None:
            state.store.lacked_credit = self._lacks_credits = True
        return offset

    def _note(self, state: RequestState, extent: PartExtent, source: WriteCredits, *, superseded: int) -> None:
        """Notes a write; `superseded` is the full chunk that it supersedes, negative if there is none."""
        part, index, token_count, offset = extent
        keys = state.chain.keys
        is_full = token_count == self._spec.chunk_size
        key = keys[index] if is_full else state.key_behind(index, token_count)
        shorter = state.store.partials.get(index, b"")
        has_ends = self._with_tails and (
            not is_full or shorter != b"" or (index == state.full_count and not state.ends_with_a_chunk)
        )
        store = PendingStore(
            state=state,
            part=part,
            key=key,
            parent=keys[index - 1] if index else state.chain.root if has_ends else b"",
            superseded=shorter if shorter not in (b"", key) else keys[superseded] if superseded >= 0 else b"",
            prefix_digests=state.prefix_digests(index, token_count) if has_ends and not part else b"",
            index=index,
            token_count=token_count,
            blocks=self._events.of_chunk(state.request_id, part, index) if is_full else (),
            source=source,
            held=state.store.held.pop((part, index), None) if is_full else None,
        )
        self._add(offset, store)

    def _add(self, offset: int, store: PendingStore) -> None:
        self._pending.add(offset, store)
        if held := store.held:
            self._planned_audits[offset] = AuditedExtent(
                held=held.extent, token_count=held.token_count, computed_count=store.token_count
            )

    def take_audits(self) -> dict[int, AuditedExtent]:
        """The held chunks to compare with what the plans since the last call write, by offset."""
        planned, self._planned_audits = self._planned_audits, {}
        return planned

    def _refuse_null_page(self, state: RequestState) -> None:
        """Stores nothing more of this request: chunks behind a missing chunk cannot be found."""
        state.store.failure_count = MAX_FAILURES
        self._session.counters.add("null_page_requests")
        logger.error(
            "[%s] not stored: vLLM has freed pages of this running request; please report this model to lmkv",
            state.request_id,
        )

    def handle_report(self, report: WorkerReport) -> bool:
        """Commits the chunks that all ranks have written now; those that some rank has not may be tried again.

        Whether there was one to commit.
        """
        written, failed = self._pending.handle_report(report)
        self._undo([store for store in failed if not store.held])
        audited = {offset: written.pop(offset) for offset, store in list(written.items()) if store.held}
        self._audits.judge(list(audited.values()))
        if not written:
            return False
        self._session.commit([self._commit(offset, store) for offset, store in written.items()])
        for store in written.values():
            self._events.committed(store.key, store.part, store.blocks)
        self._count(written.values(), report.store_seconds)
        return True

    def _commit(self, offset: int, store: PendingStore) -> pb.CommitChunk:
        return pb.CommitChunk(
            chunk_key=store.key,
            offset=offset,
            size_bytes=self._spec.part_bytes(store.part, store.token_count),
            checksum=store.result.checksum,
            token_count=store.token_count,
            parent_key=store.parent,
            part=store.part,
            superseded_key=store.superseded,
            prefix_digests=store.prefix_digests,
            owner_key=store.state.chain.namespace,
        )

    def finished(self, state: RequestState) -> None:
        """Counts chunks of a finished request that were not stored, and logs what was."""
        skipped = state.store.skipped_chunks
        audited = {index for _, index in state.store.held}
        if state.store.lacked_credit or state.store.failure_count:
            skipped |= set(range(state.store.stored_count, state.full_count)) if state.store.may_store else set()
        skipped -= audited
        if state.store.failure_count >= MAX_FAILURES and state.store.may_store:
            state.store.tail_is_lost |= not state.store.partial_is_stored
        self._session.counters.add("skipped_chunks", len(skipped) + state.store.tail_is_lost)
        keys = [state.chain.keys[index] for index in skipped if index < len(state.chain.keys)]
        if state.store.tail_is_lost and state.partial_key and not state.store.partial_is_stored:
            keys.append(state.partial_key)
        for key in keys:
            self._skipped.add(key, OWN, MissReason.SKIPPED, time.time())
        self._audits.finished(state)
        state.store.written.is_all_planned = True
        self._log_if_complete(state)

    def settle(self, states: Collection[RequestState]) -> None:
        """Returns credits that are not needed, and requests those that finished requests lack; `states` are of the
        requests that run."""
        returned: list[int] = []
        if self._session.credits.has_partial:
            wanted = self._ended.partial_counts
            wanted.update(state.store.held_end.token_count for state in states if state.store.held_end)
            waiting = (state for state in states if state.store.end_is_requested and not state.store.partial_is_stored)
            wanted.update(state.token_count % self._spec.chunk_size for state in waiting)
            returned = self._session.credits.take_unused(wanted)
        if not states:
            returned += self._session.credits.take_surplus(self._ended.missing_count)
        if self._ended.missing_count:
            self._request(states, returned)
        else:
            self._exchange(returned)

    def check_adapters(self, adapters: Adapters) -> None:
        """Commits nothing that was computed with adapters that are not current any more, and stores no more of it."""
        for state in self._pending.states:
            if state.adapter is not None and not adapters.is_current(state.adapter):
                state.store.may_store = False
                self._pending.discard(state)

    def discard(self) -> None:
        """Discards the chunks that workers still write: nothing can use them any more."""
        self._pending.discard()
        self._ended.discard()

    def node_lost(self) -> None:
        """Handles the loss of the node, and of all credits with it. What the workers still write is not committed."""
        self._undo(self._pending.take_all())
        self._ended.discard()
        self._asked = []

    def _undo(self, stores: Collection[PendingStore]) -> None:
        """Marks chunks as not stored, so that they are tried again."""
        for store in stores:
            if store.token_count < self._spec.chunk_size:
                store.state.store.partials.pop(store.index, None)
                store.state.store.partial_is_stored &= store.key != store.state.partial_key
            elif store.part in self._kept_parts:
                store.state.store.stored_count = min(store.state.store.stored_count, store.index)
            else:
                store.state.store.skipped_chunks.add(store.index)
        for state in {store.state for store in stores}:
            state.store.failure_count += 1

    def _count(self, stores: Collection[PendingStore], seconds: float) -> None:
        """Counts what the workers have written in this time, and logs it of requests that have finished."""
        tokens, sizes = Counter[RequestState](), Counter[RequestState]()
        for store in stores:
            sizes[store.state] += self._spec.part_bytes(store.part, store.token_count)
            if store.part == 0:  # which stands for the chunk
                tokens[store.state] += store.token_count
                store.state.store.written.add_chunk(store.index, store.token_count)
        self._session.counters.add("stored_tokens", tokens.total())
        self._session.counters.add("stored_bytes", sizes.total())
        self._session.counters.add("store_seconds", seconds)
        for state, size_bytes in sizes.items():
            telemetry.record("lmkv.store", seconds, parent=state.traceparent, stored_tokens=tokens[state])
            state.store.written.size_bytes += size_bytes
            state.store.written.seconds += seconds * size_bytes / sizes.total()
            self._log_if_complete(state)

    def _log_if_complete(self, state: RequestState) -> None:
        """Logs once what was stored of a request: when it has finished, and its last chunk is written."""
        stored = state.store.written
        if not stored.size_bytes or not stored.is_all_planned or self._pending.has_any_of(state):
            return
        logger.info(
            "[%s] Stored %d tokens (prompt: %d), %s, %s, %s",
            state.request_id,
            stored.token_count,
            state.token_count,
            format_bytes(stored.size_bytes),
            format_duration(stored.seconds),
            format_rate(stored.size_bytes, stored.seconds),
        )
