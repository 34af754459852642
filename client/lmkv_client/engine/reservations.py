"""Extents to write into: write credits of the node, and the callers that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Send
from lmkv_client.engine.counters import EngineCounts
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_client.engine.outcomes import Outcomes
from lmkv_client.engine.write_credits import WriteCredits

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
    """All reservations of one attachment, served in order. Called with the dispatcher's lock held."""

    def __init__(
        self,
        pool: MappedPool,
        spec: KvSpec,
        limit: int,
        send: Send,
        outcomes: Outcomes,
        counts: EngineCounts,
        undo: Callable[[Sequence[Extent]], None],
    ) -> None:
        """`undo` returns extents whose caller has cancelled; called without the lock."""
        self._credits = WriteCredits(limit=limit)
        self._pool = pool
        self._spec = spec
        self._send = send
        self._outcomes = outcomes
        self._counts = counts
        self._undo = undo
        self._waiting: deque[ExtentRequest] = deque()
        self._writing: set[int] = set()
        """Offsets of extents that callers have."""
        self._used_at = 0.0

    def begin(self, reservation: ExtentRequest, now: float) -> None:
        """Serves a reservation, at once if it can be or if its deadline has passed."""
        self._used_at = now
        self._waiting.append(reservation)
        self._serve()
        self.expire(now)

    def settle(self, count: int, granted: Iterable[int]) -> None:
        """Handles the node's answer to `count` requested credits: the offsets that it granted."""
        offsets = list(granted)
        self._credits.settle(count, offsets)
        self._serve(refused=len(offsets) < count)

    def is_written(self, extent: Extent) -> bool:
        """Whether a caller has the extent to write into it."""
        return extent.pool is self._pool and extent.offset in self._writing

    def committed(self, extents: Iterable[Extent]) -> None:
        """Extents that were committed."""
        for extent in extents:
            self._writing.discard(extent.offset)
            self._credits.commit()
        self._serve()

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Extents that their callers do not need any more; others are ignored."""
        for extent in extents:
            if self.is_written(extent):
                self._writing.discard(extent.offset)
                self._credits.return_unwritten(extent.offset)
        self._serve()

    def expire(self, now: float) -> None:
        """Ends reservations whose deadline has passed with what they have; returns credits that are not used."""
        for reservation in [one for one in self._waiting if one.deadline <= now]:
            self._waiting.remove(reservation)
            self._end(reservation)
        if now - self._used_at > IDLE_SECONDS and (surplus := self._credits.take_surplus()):
            self._send(pb.Act(return_credits=pb.ReturnCredits(offsets=surplus)))

    def lost(self) -> None:
        """Ends all reservations without extents: the node is lost."""
        for reservation in self._waiting:
            reservation.offsets.clear()
            self._end(reservation)
        self._waiting.clear()

    def _serve(self, *, refused: bool = False) -> None:
        """Distributes credits and requests those that lack; `refused`: the node has no more now."""
        while self._waiting:
            first = self._waiting[0]
            while first.missing_count and (offset := self._credits.take()) is not None:
                first.offsets.append(offset)
            if first.missing_count:
                break
            self._waiting.popleft()
            self._end(first)
        missing_count = sum(one.missing_count for one in self._waiting)
        if missing_count and not refused and (count := self._credits.request(missing_count)):
            self._send(pb.Act(reserve=pb.ReserveCredits(counts=[count])))
        if self._credits.requested_count:
            return
        # Nothing is on its way: who has something takes that; who has nothing waits only for what others return.
        for reservation in [one for one in self._waiting if refused or one.offsets]:
            self._waiting.remove(reservation)
            self._end(reservation)

    def _end(self, reservation: ExtentRequest) -> None:
        spec = self._spec
        extents = [self._pool.extent(offset, spec.chunk_bytes, spec.chunk_size) for offset in reservation.offsets]
        self._writing.update(reservation.offsets)
        self._counts.add("reserved_extents", len(extents))
        if len(extents) < reservation.count:
            self._counts.add("short_reserves")
        self._outcomes.add(reservation.future, extents, lambda: self._undo(extents))
