"""Lookups and loads of one attachment: what was asked, what is held, and which callers wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey, Tokens
from lmkv.misses import MissReason
from lmkv.runtime.patience import Suspicion
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Send
from lmkv_client.engine.counters import EngineCounts
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_client.engine.outcomes import Outcomes
from lmkv_client.engine.prompts.lookup_message import lookup_message
from lmkv_client.engine.prompts.prompt_account import PromptAccounts, failure_reason
from lmkv_client.engine.prompts.prompt_record import PromptRecord


@dataclass(kw_only=True, slots=True)
class HeldChunks:
    """What the node holds for one lookup."""

    lookup_id: str
    keys: Sequence[ChunkKey]
    """Of the hit."""
    extents: list[Extent]
    """Those in the pool, the first ones of the hit."""
    hit_count: int
    own_count: int
    record: PromptRecord | None = None
    """What is counted of it; None: nothing."""
    requested_count: int = 0
    """The load that runs brings the first chunks up to this number; 0: none runs."""
    wanted_count: int = 0
    """The same of the largest load that was wanted."""
    is_over: bool = False
    """Whether no more chunks arrive: a load failed, the node is lost, or the chunks were released."""
    waiting: list[LoadWaiter] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class LoadWaiter:
    """A caller that waits until the first `count` chunks are in the pool."""

    count: int
    deadline: float
    future: Future[list[Extent]] = field(default_factory=Future)


@dataclass(kw_only=True, slots=True)
class Lookup:
    """A lookup that waits for its answer."""

    keys: Sequence[ChunkKey]
    deadline: float
    worth_seconds: float = 0.0
    """The time that the answer is worth; 0 if that is not known."""
    asked_at: float = 0.0
    record: PromptRecord | None = None
    """What is counted, traced and reported of it; None: nothing."""
    tokens: Tokens | None = None
    """Of the prompt, to find partial chunks that other prompts have stored; None: only `keys` are found."""
    root: bytes = b""
    """With `tokens`: the root of the keys."""
    future: Future[HeldChunks | None] = field(default_factory=Future)


class Lookups:
    """All lookups of one attachment. Called with the dispatcher's lock held."""

    def __init__(
        self,
        pool: MappedPool,
        send: Send,
        outcomes: Outcomes,
        counts: EngineCounts,
        is_intact: Callable[[Extent], bool],
        accounts: PromptAccounts,
        name: str = "",
    ) -> None:
        """`is_intact`: whether the bytes of a chunk may be handed out. `accounts` outlive the attachment; `name` is the
        engine's, for the reports of prompts without an id."""
        self._pool = pool
        self._send = send
        self._outcomes = outcomes
        self._counts = counts
        self._is_intact = is_intact
        self._accounts = accounts
        self._name = name
        self._number = 0
        self._asked: dict[str, Lookup] = {}
        self._held: dict[str, HeldChunks] = {}
        self._suspicion = Suspicion()

    def begin(self, lookup: Lookup, now: float) -> None:
        """Sends a lookup, unless the node is suspect."""
        if self._suspicion.concerns(lookup.worth_seconds, now):
            self._end(lookup, MissReason.NODE_SUSPECT)
            return
        self._number += 1
        lookup_id, lookup.asked_at = str(self._number), now
        self._asked[lookup_id] = lookup
        message = lookup_message(lookup_id, lookup.keys, tokens=lookup.tokens, root=lookup.root)
        if lookup.worth_seconds:
            message.budget.FromNanoseconds(int(lookup.worth_seconds * 1e9))
        if lookup.record:
            lookup.record.engine_request_id = lookup.record.engine_request_id or f"{self._name}/{lookup_id}"
            message.traceparent = lookup.record.lookup_traceparent
        self._send(pb.Act(lookup=message))

    def found(self, found: pb.FoundChunks) -> None:
        """Handles the answer to a lookup; one that arrives too late is released."""
        self._suspicion.end()
        lookup = self._asked.pop(found.lookup_id, None)
        if lookup is None:
            self._send_release(found.lookup_id)
            return
        found_count = len(found.own) + sum(run.chunk_count for run in found.runs)
        keys = [*lookup.keys[: found_count - bool(found.partial_key)]]
        if found.partial_key:
            keys.append(ChunkKey(found.partial_key))
        extents = self._intact(found.own, keys)
        hit_count = found_count if len(extents) == len(found.own) else len(extents)
        if record := lookup.record:
            record.found(found, hit_count)
            self._counts.add("hit_chunks", hit_count)
            self._counts.add("hit_tokens", record.hit_tokens)
        if not hit_count:
            self._close(record)
            self._send_release(found.lookup_id)
            self._outcomes.add(lookup.future, None)
            return
        held = HeldChunks(
            lookup_id=found.lookup_id,
            keys=keys[:hit_count],
            extents=extents,
            hit_count=hit_count,
            own_count=len(extents),
            record=record,
        )
        self._held[held.lookup_id] = held
        self._outcomes.add(lookup.future, held)

    def load(self, held: HeldChunks, waiter: LoadWaiter, up_to: int, now: float) -> None:
        """Serves a caller that waits for chunks; requests those up to `up_to` that are not in the pool."""
        held.waiting.append(waiter)
        held.wanted_count = max(held.wanted_count, up_to)
        self._request(held, now)
        self._serve(held, now)

    def loaded(self, loaded: pb.LoadedChunks, now: float) -> None:
        """Handles chunks that have arrived, and the end of a load."""
        held = self._held.get(loaded.lookup_id)
        if held is None or held.is_over:
            return
        if loaded.first_chunk == len(held.extents):
            extents = self._intact(loaded.chunks, held.keys[loaded.first_chunk :])
            held.extents += extents
            held.is_over = len(extents) < len(loaded.chunks)
            if held.is_over and held.record:
                held.record.account.unused = MissReason.DAMAGED
        if loaded.done:
            if len(held.extents) < held.requested_count:
                self._counts.add("failed_loads")
                if held.record and not held.is_over:
                    tier = held.record.tier_behind(len(held.extents))
                    held.record.account.unused = failure_reason(loaded, tier)
                held.is_over = True
            held.requested_count = 0
            self._request(held, now)
        self._serve(held, now)

    def holds(self, held: HeldChunks) -> bool:
        """Whether the node holds these chunks for their lookup."""
        return self._held.get(held.lookup_id) is held

    def release(self, held: HeldChunks) -> None:
        """Ends a lookup. Idempotent."""
        if self._held.pop(held.lookup_id, None) is held:
            self._send_release(held.lookup_id)
        held.is_over = True
        self._serve(held, 0.0)

    def expire(self, now: float) -> None:
        """Ends lookups and waits whose deadline has passed."""
        for lookup_id, lookup in [item for item in self._asked.items() if item[1].deadline <= now]:
            del self._asked[lookup_id]  # if its answer arrives it is released
            self._counts.add("lookup_timeouts")
            self._suspicion.timed_out(lookup.asked_at, now)
            self._end(lookup, MissReason.LOOKUP_TIMEOUT)
        for held in self._held.values():
            if held.waiting:
                self._serve(held, now)

    def lost(self) -> None:
        """Ends everything: the node is lost. Chunks that were in the pool can still be read."""
        for lookup in self._asked.values():
            self._end(lookup, MissReason.NODE_LOST)
        self._asked.clear()
        for held in self._held.values():
            held.is_over = True
            if held.record:
                held.record.account.node_lost()
            self._serve(held, 0.0)
        self._held.clear()

    def _request(self, held: HeldChunks, now: float) -> None:
        """Requests what is wanted and not in the pool, unless a load runs."""
        first, until = len(held.extents), max((waiter.deadline for waiter in held.waiting), default=now)
        if held.is_over or held.requested_count or first >= held.wanted_count or until <= now:
            return
        load = pb.LoadChunks(lookup_id=held.lookup_id, first_chunk=first, chunk_count=held.wanted_count - first)
        load.timeout.FromNanoseconds(int((until - now) * 1e9))
        if held.record:
            load.traceparent = held.record.load_traceparent
        held.requested_count = held.wanted_count
        self._send(pb.Act(load=load))

    def _serve(self, held: HeldChunks, now: float) -> None:
        """Answers the callers whose chunks are in the pool, and those that have waited long enough."""
        for waiter in held.waiting[:]:
            if len(held.extents) >= waiter.count or held.is_over or waiter.deadline <= now:
                held.waiting.remove(waiter)
                self._outcomes.add(waiter.future, held.extents[: waiter.count])

    def _intact(self, chunks: Iterable[pb.HeldChunk], keys: Sequence[ChunkKey]) -> list[Extent]:
        """The extents of the chunks before the first damaged one, which is reported to the node."""
        intact: list[Extent] = []
        for chunk, key in zip(chunks, keys, strict=False):
            place = chunk.extent
            extent = self._pool.extent(place.offset, place.size_bytes, chunk.token_count, chunk.checksum)
            if not self._is_intact(extent):
                self._counts.add("damaged_chunks")
                self._send(pb.Act(drop_damaged=pb.DropDamagedChunks(chunk_keys=key)))
                break
            intact.append(extent)
        return intact

    def _end(self, lookup: Lookup, reason: MissReason) -> None:
        """Ends a lookup without an answer."""
        if lookup.record:
            lookup.record.unanswered(reason)
            self._close(lookup.record)
        self._outcomes.add(lookup.future, None)

    def _close(self, record: PromptRecord | None) -> None:
        if record:
            record.close(self._accounts, self._counts)

    def _send_release(self, lookup_id: str) -> None:
        """Also sends the reports of prompts that have ended."""
        release, reports = pb.ReleaseChunks(lookup_id=lookup_id), self._accounts.take_reports()
        self._send(pb.Act(release=release), *(pb.Act(report=report) for report in reports))
