"""Stores: plans the copies of completed chunks into the pool, and commits what was written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from lmkv import telemetry
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.messages import WorkerReport
from lmkv_client.connector.scheduler.block_copies import blocks_of, prompt_copy
from lmkv_client.connector.scheduler.events import BlockEvents
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.connector.scheduler.write_credits import WriteCredits
from lmkv_client.connector.stats import ConnectorCounters
from lmkv_kernels import ChunkCopy

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.lmkv")

MAX_FAILURES = 2
"""Failed steps after which a request stores no more."""
NULL_BLOCK_ID = 0
"""vLLM's null page: it stands for pages that were freed while their request runs, and holds no request's KV."""
PARTIAL = -1
"""Stands for the index of a prompt's partial chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStore:
    """A chunk that the workers write."""

    state: RequestState
    key: ChunkKey
    parent: bytes
    """Key of the chunk before it; empty for the first."""
    index: int
    token_count: int
    event: BlockStored | None
    """The KV event for vLLM's subscribers, published when the chunk is committed."""


class Stores:
    """The stores of one engine. A chunk is committed only after every rank has written its part."""

    def __init__(
        self,
        spec: KvSpec,
        send: Callable[[pb.AttachRequest], None],
        counters: ConnectorCounters,
        events: BlockEvents,
        *,
        block_size: int,
        rank_count: int,
        step_tokens: int,
        with_decode: bool,
    ) -> None:
        self.credits = WriteCredits()
        self._spec = spec
        self._send = send
        self._counters = counters
        self._events = events
        self._block_size = block_size
        self._rank_count = rank_count
        self._step_chunks = -(-step_tokens // spec.chunk_size)
        self._with_decode = with_decode
        self._lacks_credits = False
        """Whether a chunk found no credit since credits were last requested."""
        self._writes: dict[int, PendingStore] = {}
        """By offset of the extent."""

    def __len__(self) -> int:
        return len(self._writes)

    def is_writing(self, state: RequestState) -> bool:
        """Whether workers still write chunks of this request."""
        return any(write.state is state for write in self._writes.values())

    def reserve_count(self, states: Collection[RequestState]) -> int:
        """Credits to request: enough for two steps of these requests, and for a decoded chunk of each."""
        wanted = sum(state.unstored_count for state in states)
        return self.credits.request(min(wanted, 2 * self._step_chunks) + len(states))

    def plan(self, output: SchedulerOutput, states: dict[str, RequestState]) -> list[ChunkCopy]:
        """The copies of chunks that this step completes, and of those that found no credit before."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        copies: list[ChunkCopy] = []
        for request_id, count in output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state and state.may_store and state.store_failures < MAX_FAILURES:
                self._plan(state, computed[request_id] + count, output, copies)
        if (copies or self._lacks_credits) and (wanted := self.reserve_count(states.values())):
            self._lacks_credits = False
            self._send(pb.AttachRequest(reserve_count=wanted))
        return copies

    def _plan(self, state: RequestState, done_count: int, output: SchedulerOutput, copies: list[ChunkCopy]) -> None:
        size = self._spec.chunk_size
        prompt_done = done_count >= state.token_count
        if prompt_done and not self._with_decode:
            done_count = state.token_count
        full = state.keys_up_to(done_count // size)
        partial = prompt_done and not state.partial_is_stored
        if full <= state.stored_count and not partial:
            return
        block_ids = output.kv_connector_block_state.get_block_ids(state.request_id)[0]
        for index in range(state.stored_count, full):
            copy = self._write(state, index, state.chain.keys[index], size, block_ids)
            if copy is None:
                return
            copies.append(copy)
            state.stored_count = index + 1
        if partial and (copy := self._write(state, PARTIAL, state.keys[-1], state.token_count % size, block_ids)):
            copies.append(copy)
            state.partial_is_stored = True

    def _write(
        self, state: RequestState, index: int, key: ChunkKey, token_count: int, block_ids: Sequence[int]
    ) -> ChunkCopy | None:
        """The store of one chunk; None if there is no credit for it now, or no KV of it in its pages."""
        chunk = state.full_count if index == PARTIAL else index
        start = chunk * self._spec.chunk_size
        if NULL_BLOCK_ID in blocks_of(block_ids, self._block_size, start, start + token_count):
            self._refuse_null_page(state)
            return None
        offset = self.credits.take()
        if offset is None:
            state.lacked_credit = self._lacks_credits = True
            return None
        parent = state.chain.keys[chunk - 1] if chunk else b""
        event = None if index == PARTIAL else self._events.of_chunk(state.request_id, index)
        self._writes[offset] = PendingStore(
            state=state, key=key, parent=parent, index=index, token_count=token_count, event=event
        )
        return prompt_copy(
            block_ids,
            self._block_size,
            chunk_start=start,
            low=start,
            high=start + token_count,
            offset=offset,
            extent_tokens=token_count,
        )

    def _refuse_null_page(self, state: RequestState) -> None:
        """Stores nothing more of this request: chunks behind a missing one cannot be found."""
        state.store_failures = MAX_FAILURES
        self._counters.add("null_page_requests")
        logger.error(
            "[%s] not stored: vLLM has freed pages of this running request; please report this model to lmkv",
            state.request_id,
        )

    def handle_report(self, report: WorkerReport) -> None:
        """Commits the chunks that all ranks have written; the others may be tried again."""
        commits = []
        stored: dict[RequestState, int] = {}
        for offset, written in report.written.items():
            if offset in report.skipped or written.rank_count != self._rank_count:
                report.skipped.add(offset)
            elif write := self._writes.pop(offset, None):
                self.credits.commit()
                commits.append(
                    pb.CommitChunk(
                        chunk_key=write.key,
                        offset=offset,
                        size_bytes=self._spec.size_bytes(write.token_count),
                        checksum=written.checksum,
                        token_count=write.token_count,
                        parent_key=write.parent,
                    )
                )
                stored[write.state] = stored.get(write.state, 0) + write.token_count
                if write.event:
                    self._events.add(write.event)
        skipped = {offset: write for offset in report.skipped if (write := self._writes.pop(offset, None))}
        for offset in skipped:
            self.credits.return_unwritten(offset)
        self._undo(skipped.values())
        if commits:
            self._send(pb.AttachRequest(commits=commits))
            self._count(stored, sum(commit.size_bytes for commit in commits), report.store_seconds)

    def finished(self, state: RequestState) -> None:
        """Counts chunks of a finished request that were not stored."""
        if state.lacked_credit or state.store_failures:
            self._counters.add("skipped_chunks", state.unstored_count)

    def idle(self) -> None:
        """Returns the credits that an engine without requests does not need."""
        if take_surplus := self.credits.take_surplus():
            self._send(pb.AttachRequest(returned_credits=take_surplus))

    def node_lost(self) -> None:
        """Drops all credits: the node is lost. What the workers still write is not committed."""
        self._undo(self._writes.values())
        self._writes.clear()
        self.credits = WriteCredits()

    def _undo(self, writes: Collection[PendingStore]) -> None:
        """Marks chunks as not stored, so that they are tried again."""
        for write in writes:
            if write.index == PARTIAL:
                write.state.partial_is_stored = False
            else:
                write.state.stored_count = min(write.state.stored_count, write.index)
        for state in {write.state for write in writes}:
            state.store_failures += 1

    def _count(self, stored: dict[RequestState, int], size_bytes: int, seconds: float) -> None:
        tokens = sum(stored.values())
        self._counters.add("stored_tokens", tokens)
        self._counters.add("stored_bytes", size_bytes)
        self._counters.add("store_seconds", seconds)
        for state, token_count in stored.items():
            telemetry.record("lmkv.store", seconds, parent=state.traceparent, stored_tokens=token_count)
            logger.info(
                "[%s] Stored %d of %d tokens, %s, %s, %s",
                state.request_id,
                token_count,
                state.token_count,
                format_bytes(size_bytes * token_count // tokens),
                format_duration(seconds * token_count / tokens),
                format_rate(size_bytes, seconds),
            )
