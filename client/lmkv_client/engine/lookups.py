"""Lookups and loads of one attachment: what was asked, what is held, and which callers wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent as ExtentMessage
from lmkv_client.engine.counters import EngineCounts
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_client.engine.outcomes import Outcomes

TIMEOUTS_UNTIL_SUSPECT = 3
SUSPECT_SECONDS = 1.0
"""After `TIMEOUTS_UNTIL_SUSPECT` lookups in a row without an answer, no lookups are sent for this time."""


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
    counted: bool
    """Whether it adds to the counters of hits."""
    future: Future[HeldChunks | None] = field(default_factory=Future)


class Lookups:
    """All lookups of one attachment. Called with the dispatcher's lock held."""

    def __init__(
        self,
        pool: MappedPool,
        send: Callable[[pb.AttachRequest], None],
        outcomes: Outcomes,
        counts: EngineCounts,
        is_intact: Callable[[Extent], bool],
    ) -> None:
        """`is_intact`: whether the bytes of a chunk may be handed out."""
        self._pool = pool
        self._send = send
        self._outcomes = outcomes
        self._counts = counts
        self._is_intact = is_intact
        self._number = 0
        self._asked: dict[str, Lookup] = {}
        self._held: dict[str, HeldChunks] = {}
        self._timeouts = 0
        """Lookups in a row that were not answered in time."""
        self._suspect_until = 0.0

    def begin(self, lookup: Lookup, now: float) -> None:
        """Sends a lookup, unless the node is suspect."""
        if now < self._suspect_until:
            self._outcomes.add(lookup.future, None)
            return
        self._number += 1
        lookup_id = str(self._number)
        self._asked[lookup_id] = lookup
        self._send(pb.AttachRequest(lookups=[pb.LookupChunks(request_id=lookup_id, chunk_keys=join_keys(lookup.keys))]))

    def found(self, found: pb.FoundChunks) -> None:
        """Handles the answer to a lookup; one that arrives too late is released."""
        self._timeouts = 0
        self._suspect_until = 0.0
        lookup = self._asked.pop(found.request_id, None)
        if lookup is None:
            self._send_release(found.request_id)
            return
        extents = self._intact(found.own, lookup.keys)
        is_whole = len(extents) == len(found.own)
        hit_count = len(extents) + (sum(run.chunk_count for run in found.runs) if is_whole else 0)
        if lookup.counted:
            self._counts.add("hit_chunks", hit_count)
        if not hit_count:
            self._send_release(found.request_id)
            self._outcomes.add(lookup.future, None)
            return
        held = HeldChunks(
            lookup_id=found.request_id,
            keys=lookup.keys[:hit_count],
            extents=extents,
            hit_count=hit_count,
            own_count=len(extents),
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
        held = self._held.get(loaded.request_id)
        if held is None or held.is_over:
            return
        if loaded.first_chunk == len(held.extents):
            extents = self._intact(loaded.extents, held.keys[loaded.first_chunk :])
            held.extents += extents
            held.is_over = len(extents) < len(loaded.extents)
        if loaded.done:
            if len(held.extents) < held.requested_count:
                self._counts.add("failed_loads")
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
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_UNTIL_SUSPECT:
                self._suspect_until = now + SUSPECT_SECONDS
            self._outcomes.add(lookup.future, None)
        for held in self._held.values():
            if held.waiting:
                self._serve(held, now)

    def lost(self) -> None:
        """Ends everything: the node is lost. Chunks that were in the pool can still be read."""
        for lookup in self._asked.values():
            self._outcomes.add(lookup.future, None)
        self._asked.clear()
        for held in self._held.values():
            held.is_over = True
            self._serve(held, 0.0)
        self._held.clear()

    def _request(self, held: HeldChunks, now: float) -> None:
        """Requests what is wanted and not in the pool, unless a load runs."""
        first, until = len(held.extents), max((waiter.deadline for waiter in held.waiting), default=now)
        if held.is_over or held.requested_count or first >= held.wanted_count or until <= now:
            return
        load = pb.LoadChunks(request_id=held.lookup_id, first_chunk=first, chunk_count=held.wanted_count - first)
        load.timeout.FromNanoseconds(int((until - now) * 1e9))
        held.requested_count = held.wanted_count
        self._send(pb.AttachRequest(loads=[load]))

    def _serve(self, held: HeldChunks, now: float) -> None:
        """Answers the callers whose chunks are in the pool, and those that have waited long enough."""
        for waiter in held.waiting[:]:
            if len(held.extents) >= waiter.count or held.is_over or waiter.deadline <= now:
                held.waiting.remove(waiter)
                self._outcomes.add(waiter.future, held.extents[: waiter.count])

    def _intact(self, extents: Iterable[ExtentMessage], keys: Sequence[ChunkKey]) -> list[Extent]:
        """The extents before the first damaged one, which is reported to the node."""
        intact: list[Extent] = []
        for message, key in zip(extents, keys, strict=False):
            extent = self._pool.extent(message.offset, message.size_bytes, message.token_count, message.checksum)
            if not self._is_intact(extent):
                self._counts.add("damaged_chunks")
                self._send(pb.AttachRequest(damaged_keys=[key]))
                break
            intact.append(extent)
        return intact

    def _send_release(self, lookup_id: str) -> None:
        self._send(pb.AttachRequest(releases=[pb.ReleaseChunks(request_id=lookup_id)]))
