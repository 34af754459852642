"""Extents to write into: write credits of the node, and the callers that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.caller_lookup import CallerLookup, Outcomes
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_client.engine.session import Session

IDLE_SECONDS = 1.0
"""Time without a reservation after which unused credits are returned to the node."""


@dataclass(kw_only=True, slots=True)
class ExtentRequest:
    """A caller that waits for extents."""

    count: int
    deadline: float
    future: Future[list[Extent]] = field(default_factory=Future)
    offsets: list[int] = field(default_factory=list)

    @property
    def missing_count(self) -> int:
        """Extents that it waits for."""
        return self.count - len(self.offsets)


class Reservations:
    """All reservations of an engine, served in order. Called with the dispatcher's lock held."""

    def __init__(self, session: Session[CallerLookup], outcomes: Outcomes) -> None:
        self._session = session
        self._outcomes = outcomes
        self._pool: MappedPool | None = None
        self._waiting: deque[ExtentRequest] = deque()
        self._writing: set[int] = set()
        """Offsets of extents that callers have."""
        self._used_at = 0.0

    def open(self, pool: MappedPool) -> None:
        """Grants extents of this pool from now on."""
        self._pool = pool

    def begin(self, reservation: ExtentRequest, now: float) -> None:
        """Serves a reservation, at once if it can be, if its deadline has passed, or without a node."""
        self._used_at = now
        self._waiting.append(reservation)
        if self._pool is None:
            self.lost()
            return
        self._serve()
        self.expire(now)

    def granted(self, granted: pb.GrantedCredits) -> None:
        """Distributes the credits that the node has granted."""
        if self._pool is not None:
            self._serve(refused=len(granted.credits) < sum(granted.settled_counts))

    def is_written(self, extent: Extent) -> bool:
        """Whether a caller has the extent to write into it."""
        return extent.pool is self._pool and extent.offset in self._writing

    def committed(self, extents: Iterable[Extent]) -> None:
        """Extents that were committed."""
        for extent in extents:
            self._writing.discard(extent.offset)
            self._session.credits[0].commit()
        self._serve()

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Extents that their callers do not need any more; others are ignored."""
        for extent in extents:
            if self.is_written(extent):
                self._writing.discard(extent.offset)
                self._session.credits[0].return_unwritten(extent.offset)
        self._serve()

    def expire(self, now: float) -> None:
        """Ends reservations whose deadline has passed with what they have; returns credits that are not used."""
        for reservation in [one for one in self._waiting if one.deadline <= now]:
            self._waiting.remove(reservation)
            self._end(reservation)
        if now - self._used_at > IDLE_SECONDS and (surplus := self._session.credits[0].take_surplus()):
            self._session.send(pb.Act(return_credits=pb.ReturnCredits(offsets=surplus)))

    def lost(self) -> None:
        """Ends all reservations without extents: the node is lost."""
        self._pool = None
        self._writing.clear()
        for reservation in self._waiting:
            self._end(reservation)
        self._waiting.clear()

    def _serve(self, *, refused: bool = False) -> None:
        """Distributes credits and requests those that lack; `refused`: the node has no more now."""
        while self._waiting:
            first = self._waiting[0]
            while first.missing_count and (offset := self._session.credits[0].take()) is not None:
                first.offsets.append(offset)
            if first.missing_count:
                break
            self._waiting.popleft()
            self._end(first)
        missing_count = sum(one.missing_count for one in self._waiting)
        if missing_count and not refused and (count := self._session.credits[0].request(missing_count)):
            self._session.send(pb.Act(reserve=pb.ReserveCredits(counts=[count])))
        if self._session.credits[0].requested_count:
            return
        # Nothing is on its way: who has something takes that; who has nothing waits only for what others return.
        for reservation in [one for one in self._waiting if refused or one.offsets]:
            self._waiting.remove(reservation)
            self._end(reservation)

    def _end(self, reservation: ExtentRequest) -> None:
        spec, pool = self._session.spec, self._pool
        extents = [pool.extent(one, spec.chunk_bytes, spec.chunk_size) for one in reservation.offsets] if pool else []
        self._writing.update(extent.offset for extent in extents)
        self._session.counters.add("reserved_extents", len(extents))
        if len(extents) < reservation.count:
            self._session.counters.add("short_reserves")
        self._outcomes.add(reservation.future, extents)
