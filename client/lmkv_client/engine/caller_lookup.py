"""Lookups of the engine API: the callers that wait for them and their loads, and the futures that these wait on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmkv import telemetry
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.telemetry import NO_SPAN, Span, SpanKind
from lmkv.tiers import OWN, PEERS
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_client.engine.prompt_account import failure_reason
from lmkv_client.engine.session import Lookup, LookupState, Session, SessionEvent
from lmkv_kernels import checksum

T = TypeVar("T")


class Outcomes:
    """Futures with their results, in order. Added to with the lock held, set without it: a callback may then call the
    engine again."""

    def __init__(self) -> None:
        self._pending: list[tuple[Future[Any], Any]] = []

    def add(self, future: Future[T], result: T) -> None:
        """Adds the result of a future. No future may be added twice."""
        self._pending.append((future, result))

    def take(self) -> Outcomes:
        """Removes and returns the results that were added; the caller sets them."""
        taken = Outcomes()
        self._pending, taken._pending = [], self._pending
        return taken

    def set(self) -> list[Any]:
        """Sets all results. Returns those whose futures the callers have cancelled."""
        cancelled = []
        for future, result in self._pending:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                cancelled.append(result)
        return cancelled


def await_result(future: Future[T], deadline: float, expire: Callable[[], None]) -> T:
    """The result of a future. At its deadline `expire` ends it with what there is."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        expire()
        return future.result()


@dataclass(kw_only=True, slots=True)
class LoadWaiter:
    """A caller that waits until the first `count` chunks are in the pool."""

    count: int
    deadline: float
    future: Future[list[Extent]] = field(default_factory=Future)


@dataclass(kw_only=True, eq=False, slots=True)
class CallerLookup(Lookup):
    """One lookup of a caller, from the question to the release of what was found.

    asked ──found──► found ──loading, delivered──► closed
      └──unanswered──► closed
    """

    deadline: float
    is_counted: bool = True
    """Whether it is counted and reported."""
    is_continued: bool = False
    """Whether the prompt was looked up before, so that only failures of the load are counted."""
    engine_request_id: str = ""
    """The id of the request in the report; empty until the lookup has an id."""
    traceparent: str | None = None
    """Parent of the spans; None: the current span, if any. Once it was sent, the lookup's own span."""
    future: Future[CallerLookup | None] = field(default_factory=Future)
    """Gets None if nothing was found."""
    is_answered: bool = False
    """Whether `future` has its result."""
    extents: list[Extent] = field(default_factory=list)
    """The first chunks of the hit that are in the pool, up to a damaged chunk."""
    hit_count: int = 0
    """The number of chunks of the hit that can be loaded, up to a damaged chunk."""
    own_count: int = 0
    """The number of these chunks that were in the pool at the lookup."""
    requested_count: int = 0
    """The load that runs brings the first chunks up to this number; 0: none runs."""
    wanted_count: int = 0
    """The same of the largest load that was wanted."""
    is_ended: bool = False
    """Whether no more chunks arrive: a load failed, the node is lost, or the chunks were released."""
    waiting: list[LoadWaiter] = field(default_factory=list)
    is_closed: bool = False
    loaded_chunks: int | None = None
    """Chunks that loads have brought, if one of them has ended early."""
    load_span: Span = NO_SPAN

    @property
    def hit_tokens(self) -> int:
        """Tokens that can be loaded."""
        return self.tokens_in(self.hit_count)

    def found(self, found: pb.FoundChunks, extents: list[Extent]) -> None:
        """Records the answer; `extents` are those of the chunks in the pool before the first damaged one."""
        self.extents, self.own_count = extents, len(extents)
        hit_count = self.sources.chunk_count
        self.hit_count = hit_count if len(extents) == len(found.own) else len(extents)
        self.account.answered(self.tokens_in(hit_count), found.missed)
        if self.hit_count < hit_count:
            self.account.unused = MissReason.DAMAGED

    def key(self, index: int) -> ChunkKey:
        """The key of one chunk of the hit."""
        found = self.partial
        return found.key if found and index == found.index else self.keys[index]

    def loading(self, chunk_count: int) -> None:
        """Begins the span of a load of the first chunks, unless an earlier load has."""
        if self.is_counted and self.load_span is NO_SPAN and not self.is_closed:
            self.load_span = telemetry.follow(
                "lmkv.load",
                self.traceparent or "",
                kind=SpanKind.CLIENT,
                asked_tokens=self.tokens_in(min(chunk_count, self.hit_count)),
            )

    def fell_short(self, chunk_count: int) -> None:
        """A load has ended with the first `chunk_count` chunks only."""
        self.loaded_chunks = max(chunk_count, self.loaded_chunks or 0)

    def delivered(self, chunk_count: int) -> None:
        """A load has brought the first `chunk_count` chunks, perhaps more than an earlier load that fell short."""
        if self.loaded_chunks is not None and chunk_count > self.loaded_chunks:
            self.loaded_chunks = chunk_count if chunk_count < self.hit_count else None

    def refuse(self, kept: int, reason: MissReason) -> None:
        """The hit behind its first `kept` chunks is computed, for that reason."""
        self.account.unused = reason
        self.loaded_chunks = kept

    def close(self) -> dict[str, int]:
        """Fixes the account, ends the span of the load, and returns the tokens of the hit by their tier.

        What was found and not loaded counts as found. Call it once.
        """
        self.is_closed = True
        size, count = self.account.chunk_size, self.hit_count if self.loaded_chunks is None else self.loaded_chunks
        used = self.tokens_in(min(count, self.hit_count))
        by_tier = {tier: tokens for tier, tokens in self.sources.tokens(0, used, size).items() if tokens}
        self.account.take(0, by_tier)
        if self.loaded_chunks is not None:
            self.load_span.fail("incomplete", "fewer chunks arrived than were found")
        self.load_span.set(
            loaded_tokens=used,
            peer_instance_id=self.peer_id if by_tier.get(PEERS) else "",
            **{f"{tier}_tokens": tokens for tier, tokens in by_tier.items() if tier != OWN},
        )
        self.load_span.end()
        return by_tier


class CallerLookups:
    """All lookups and loads of an engine's callers. Called with the dispatcher's lock held."""

    def __init__(self, session: Session[CallerLookup], outcomes: Outcomes, *, verifies: bool) -> None:
        """`verifies`: whether chunks are compared with their checksums before they are handed out."""
        self.pool: MappedPool | None = None
        """The pool of the attached node, once it is mapped."""
        self._session = session
        self._outcomes = outcomes
        self._verifies = verifies

    def begin(self, lookup: CallerLookup, now: float) -> None:
        """Sends a lookup, unless there is no node, or it is suspect."""
        counters = self._session.counters
        if lookup.is_counted:
            counters.add("lookups")
            counters.add("asked_chunks", len(lookup.keys))
            counters.add("asked_tokens", lookup.account.token_count)
        if self.pool is None:
            lookup.account.unanswered(MissReason.NODE_LOST if lookup.keys else MissReason.UNCACHEABLE)
            self._unanswered(lookup)
        elif self._session.look_up(lookup, now, traceparent=lookup.traceparent):
            lookup.traceparent = lookup.span.traceparent
            if not lookup.engine_request_id and self._session.attachment:
                lookup.engine_request_id = f"{self._session.attachment.engine_id}/{lookup.lookup_id}"
        else:
            self._unanswered(lookup)

    def handle(self, event: SessionEvent[CallerLookup], now: float) -> None:
        """Handles an answer to a lookup, chunks that have arrived, and the loss of the node."""
        if event.kind == "lost":
            self.lost(event.message)
        elif event.lookup is None or self.pool is None:
            return
        elif event.kind == "found":
            self._found(event.lookup, event.message, self.pool)
        elif event.kind == "loaded" and not event.lookup.is_ended:
            self._loaded(event.lookup, event.message, self.pool, now)

    def load(self, lookup: CallerLookup, waiter: LoadWaiter, up_to: int, now: float) -> None:
        """Serves a caller that waits for chunks; requests those up to `up_to` that are not in the pool."""
        lookup.waiting.append(waiter)
        lookup.wanted_count = max(lookup.wanted_count, up_to)
        self._request(lookup, now)
        self._serve(lookup, now)

    def release(self, lookup: CallerLookup) -> None:
        """Ends a lookup. Idempotent."""
        self._close(lookup)
        self._session.release(lookup)
        lookup.is_ended = True
        self._serve(lookup, 0.0)
        lookup.extents = []  # they no longer keep the pool of a lost node mapped

    def lost(self, lookups: Sequence[CallerLookup]) -> None:
        """Ends lookups whose node is lost. Chunks that were in the pool can still be read."""
        for lookup in lookups:
            lookup.is_ended = True
            if not lookup.is_answered:
                self._unanswered(lookup)
            self._serve(lookup, 0.0)

    def expire(self, now: float) -> None:
        """Ends lookups and waits whose deadline has passed."""
        for lookup in self._session.lookups:
            if lookup.state is LookupState.ASKED and lookup.deadline <= now:
                self._session.time_out(lookup, lookup.deadline - lookup.asked_at, now)
                self._unanswered(lookup)
            elif lookup.waiting:
                self._serve(lookup, now)

    def _found(self, lookup: CallerLookup, found: pb.FoundChunks, pool: MappedPool) -> None:
        lookup.found(found, self._intact(lookup, found.own, 0, pool))
        if lookup.is_counted:
            self._session.counters.add("hit_chunks", lookup.hit_count)
            self._session.counters.add("hit_tokens", lookup.hit_tokens)
        if lookup.hit_count:
            self._answer(lookup, lookup)
            return
        self._session.release(lookup)  # it may have been found damaged
        self._unanswered(lookup)

    def _loaded(self, lookup: CallerLookup, loaded: pb.LoadedChunks, pool: MappedPool, now: float) -> None:
        first = len(lookup.extents)
        arrived = lookup.chunks[first:]
        lookup.extents += self._intact(lookup, arrived, first, pool)
        if len(lookup.extents) < first + len(arrived):
            lookup.is_ended = True
            lookup.account.unused = MissReason.DAMAGED
        if loaded.done:
            if (count := len(lookup.extents)) < lookup.requested_count:
                self._session.counters.add("failed_loads")
                if not lookup.is_ended:
                    size = lookup.account.chunk_size
                    lookup.account.unused = failure_reason(loaded, lookup.sources.tier_at(count * size, size))
                lookup.is_ended = True
            lookup.requested_count = 0
            self._request(lookup, now)
        self._serve(lookup, now)

    def _request(self, lookup: CallerLookup, now: float) -> None:
        """Requests what is wanted and not in the pool, unless a load runs."""
        first, until = len(lookup.extents), max((waiter.deadline for waiter in lookup.waiting), default=now)
        if lookup.is_ended or lookup.requested_count or first >= lookup.wanted_count or until <= now:
            return
        lookup.requested_count = lookup.wanted_count
        count, traceparent = lookup.wanted_count - first, lookup.load_span.traceparent
        self._session.load(lookup, first, count, until - now, traceparent=traceparent)

    def _serve(self, lookup: CallerLookup, now: float) -> None:
        """Answers the callers whose chunks are in the pool, and those that have waited long enough."""
        for waiter in lookup.waiting[:]:
            if len(lookup.extents) >= waiter.count or lookup.is_ended or waiter.deadline <= now:
                lookup.waiting.remove(waiter)
                self._outcomes.add(waiter.future, lookup.extents[: waiter.count])

    def _intact(
        self, lookup: CallerLookup, chunks: Sequence[pb.HeldChunk], first: int, pool: MappedPool
    ) -> list[Extent]:
        """The extents of the chunks before the first damaged one, which is reported to the node."""
        intact: list[Extent] = []
        for index, chunk in enumerate(chunks, first):
            place = chunk.extent
            extent = pool.extent(place.offset, place.size_bytes, chunk.token_count, chunk.checksum)
            if self._verifies and checksum(extent.view) != extent.checksum:
                self._session.counters.add("damaged_chunks")
                self._session.drop_damaged([lookup.key(index)])
                break
            intact.append(extent)
        return intact

    def _unanswered(self, lookup: CallerLookup) -> None:
        """Ends a lookup that has found nothing."""
        self._close(lookup)
        self._session.send_reports()
        self._answer(lookup, None)

    def _answer(self, lookup: CallerLookup, result: CallerLookup | None) -> None:
        lookup.is_answered = True
        self._outcomes.add(lookup.future, result)

    def _close(self, lookup: CallerLookup) -> None:
        """Counts and reports a prompt, once."""
        if not lookup.is_counted or lookup.is_closed:
            return
        session, by_tier = self._session, lookup.close()
        if lookup.is_continued:
            session.accounts.count(lookup.account)
            return
        for tier, count in by_tier.items():
            session.counters.add("tier_tokens", count, label=tier)
        session.accounts.close(lookup.engine_request_id, lookup.account)
