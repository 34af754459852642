"""All handoffs to a decode's node: their admission, their names and their deadlines.

There are two deadlines. An open handoff expires when its prefill sends nothing for `timeout_seconds`. A handoff that
has ended and is not claimed by a request is abandoned `abandon_seconds` after the last message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmkv.errors import BadMessage, Full, GrantNotFound, NoFreeExtents, RequestTooLarge
from lmkv.runtime.places import Places, most_of
from lmkv.transfer.channel import new_grant_id
from lmkv.units import format_bytes
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.state import HandedPrompt, Handoff, HandoffSource, HandoffState, check_name

MAX_HANDOFFS = 1024
"""Handoffs at a time, of which one caller may have 7/8."""
MAX_ENDED = 4096
"""Names of ended handoffs that are remembered, so that a late message does not begin one again."""
RETRY_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffTableStats:
    """Handoffs to this node since the start."""

    ended_counts: Mapping[HandoffState, int]
    """Handoffs that were closed, by their last state."""
    abandoned_count: int
    """Handoffs that no request of the decode claimed."""
    refused_count: int
    """Handoffs that were refused for lack of room."""


class HandoffTable:
    """The table. Each handoff has its own holds and reservations, which end with it."""

    def __init__(
        self, tier: HostTier, *, buffer_bytes: int, timeout_seconds: float = 5.0, abandon_seconds: float = 60.0
    ) -> None:
        """`buffer_bytes` limits the bytes of the tier that all handoffs together reserve, or have received."""
        self._ended_counts = dict.fromkeys((HandoffState.COMMITTED, HandoffState.ABORTED, HandoffState.EXPIRED), 0)
        self._abandoned_count = 0
        self._refused_count = 0
        self.timeout_seconds = timeout_seconds
        self.buffer_bytes = buffer_bytes
        self._abandon_seconds = abandon_seconds
        self._tier = tier
        self._by_grant: dict[str, Handoff] = {}
        self._by_id: dict[str, Handoff] = {}
        self._places = Places[str]("handoffs", MAX_HANDOFFS, most_of(MAX_HANDOFFS))
        """Taken by the ids of grants."""
        self._ended: OrderedDict[str, None] = OrderedDict()  # names, oldest first
        self._claims: dict[str, list[HostTier | None]] = {}

    def __len__(self) -> int:
        return len(self._by_grant)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(self._by_grant.values())

    def stats(self) -> HandoffTableStats:
        """The counters as they are now."""
        return HandoffTableStats(
            ended_counts=dict(self._ended_counts),
            abandoned_count=self._abandoned_count,
            refused_count=self._refused_count,
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of the tier that handoffs use."""
        return sum(handoff.buffer_bytes for handoff in self if handoff.destination is self._tier)

    def allocate(
        self,
        prompt: HandedPrompt,
        source: HandoffSource,
        now: float,
        buffer: HostTier | None = None,
        caller: str = "",
    ) -> Handoff:
        """Begins a handoff, or returns the one of that name from the same source.

        It takes a place of the caller's share.
        Its chunks go to the device buffer, if there is one and it has room for all of them now, else to the tier.
        Raises `BadMessage` if the request makes no sense, `GrantNotFound` if it has ended already, `RequestTooLarge` if
        it will never fit, `NoFreeExtents` if it does not fit now.
        """
        prompt.check()
        handoff_id = prompt.handoff_id
        if known := self._by_id.get(handoff_id):
            if (known.source, list(known.chunk_keys)) != (source, list(prompt.chunk_keys)):
                raise BadMessage(f"handoff_id {handoff_id!r} names another handoff", field="handoff_id")
            self.renew(known, now)
            return known
        if handoff_id in self._ended:
            raise GrantNotFound(f"handoff {handoff_id!r} has ended", handoff_id=handoff_id)
        candidates = [
            Handoff(new_grant_id(), prompt, source, destination)
            for destination in (buffer, self._tier)
            if destination is not None
        ]
        handoff = self._begin(candidates, caller)
        self._places.take(handoff.grant_id, caller)
        self._by_grant[handoff.grant_id] = self._by_id[handoff_id] = handoff
        self.renew(handoff, now)
        return handoff

    def _begin(self, candidates: Sequence[Handoff], caller: str) -> Handoff:
        """The first of these handoffs that there is room for. Raises why there is none for the last one."""
        *others, last = candidates
        refusal = self._refusal(caller)
        for handoff in others:
            if refusal is None and handoff.allocate(self._tier):
                return handoff
        wanted = sum(last.size_bytes_of(index) for index, key in enumerate(last.keys) if not self._tier.get(key))
        if wanted > self.buffer_bytes:
            self._refused_count += 1
            raise RequestTooLarge(
                f"the prompt takes {format_bytes(wanted)}, the buffer has {format_bytes(self.buffer_bytes)}; "
                "raise pd_buffer_size at the decode",
                size_bytes=wanted,
            )
        if refusal is not None:
            self._refused_count += 1
            raise refusal
        if self.used_bytes + wanted > self.buffer_bytes or not last.allocate(self._tier):
            self._refused_count += 1
            raise NoFreeExtents(
                f"{format_bytes(wanted)} are needed, {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.buffer_bytes)} are in use",
                retry_seconds=RETRY_SECONDS,
            )
        return last

    def _refusal(self, caller: str) -> Full | None:
        """Why a caller gets no place now."""
        try:
            self._places.check(caller)
        except Full as full:
            return type(full)(str(full), retry_seconds=RETRY_SECONDS)
        return None

    def get(self, grant_id: str, session_id: str) -> Handoff:
        """The handoff of this grant. Raises `GrantNotFound` if it is closed, or of another session."""
        handoff = self._by_grant.get(grant_id)
        if handoff is None or handoff.source.session_id != session_id:
            raise GrantNotFound("no handoff of this caller has this grant; it has ended")
        return handoff

    def find(self, handoff_id: str) -> Handoff | None:
        """The handoff of this name, if it was announced and is not closed."""
        return self._by_id.get(handoff_id)

    def is_closed(self, handoff_id: str) -> bool:
        """Whether a handoff of this name was closed or withdrawn."""
        return handoff_id in self._ended

    def renew(self, handoff: Handoff, now: float) -> None:
        """Restarts the deadline: the prefill has sent a message, or the handoff has ended."""
        handoff.expire_at = now + (self.timeout_seconds if handoff.is_open else self._abandon_seconds)

    def claim(self, handoff_id: str, buffer: HostTier | None = None) -> None:
        """A request of the decode has arrived: the chunks are held until `unclaim`, without a deadline.

        `buffer` is the device buffer of its engine. A request for several answers claims several times.
        """
        self._claims.setdefault(handoff_id, []).append(buffer)

    def is_loadable(self, handoff: Handoff) -> bool:
        """Whether the requests that claimed the handoff can load its chunks: not out of another engine's buffer."""
        return handoff.destination is self._tier or handoff.destination in self._claims.get(handoff.handoff_id, ())

    def unclaim(self, handoff_id: str) -> None:
        """A request of the decode has ended: after the last one the handoff is closed, announced or not."""
        claims = self._claims.get(handoff_id, [])
        if claims:
            claims.pop()
        if claims:
            return
        self._claims.pop(handoff_id, None)
        if handoff := self.find(handoff_id):
            self._close(handoff)
        self._remember(handoff_id)

    def withdraw(self, handoff_id: str, now: float, session_id: str | None = None) -> bool:
        """Ends a handoff that is refused or that no request will load, announced or not; whether the caller may.

        `session_id` is that of a prefill, which may end only its own; None: this node's engine. A request that has
        claimed it keeps the chunks that have arrived.
        """
        check_name(handoff_id)
        handoff = self.find(handoff_id)
        if handoff and session_id not in (None, handoff.source.session_id):
            return False
        if handoff and self._is_claimed(handoff):
            handoff.end(HandoffState.ABORTED)
            self.renew(handoff, now)
        elif handoff:
            self._close(handoff)
        self._remember(handoff_id)
        return True

    def end(self, grant_id: str, session_id: str, now: float) -> bool:
        """Ends a handoff: its prefill sends no more chunks. Whether the session has such a handoff."""
        handoff = self._by_grant.get(grant_id)
        if handoff is None or handoff.source.session_id != session_id:
            return False
        handoff.end(HandoffState.ABORTED)
        self.renew(handoff, now)
        return True

    def expire(self, now: float) -> list[Handoff]:
        """Expires open handoffs and closes abandoned ones whose deadline has passed; returns those that expired."""
        expired = []
        for handoff in [one for one in self if one.expire_at <= now]:
            if handoff.is_open:
                handoff.end(HandoffState.EXPIRED)
                self.renew(handoff, now)
                expired.append(handoff)
            elif not self._is_claimed(handoff):
                self._abandoned_count += 1
                self._close(handoff)
        return expired

    def next_expiry(self) -> float | None:
        """The next deadline; None if there is none."""
        waiting = (one.expire_at for one in self if one.is_open or not self._is_claimed(one))
        return min(waiting, default=None)

    def detach_buffer(self, buffer: HostTier, now: float) -> None:
        """Aborts the handoffs into a device buffer that is closed."""
        for handoff in [one for one in self if one.destination is buffer]:
            handoff.detach_buffer(self._tier)
            self.renew(handoff, now)

    def clear(self) -> None:
        """Closes every handoff."""
        for handoff in list(self):
            self._close(handoff)

    def _is_claimed(self, handoff: Handoff) -> bool:
        return handoff.handoff_id in self._claims

    def _close(self, handoff: Handoff) -> None:
        handoff.close(self._tier)
        self._ended_counts[handoff.state] += 1
        del self._by_grant[handoff.grant_id], self._by_id[handoff.handoff_id]
        self._places.release(handoff.grant_id)
        self._remember(handoff.handoff_id)

    def _remember(self, handoff_id: str) -> None:
        self._ended[handoff_id] = None
        self._ended.move_to_end(handoff_id)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def check(self) -> None:
        """Asserts that the indices agree and the limits hold."""
        assert set(map(id, self._by_grant.values())) == set(map(id, self._by_id.values()))
        assert set(self._places) == self._by_grant.keys()
        assert len(self) <= MAX_HANDOFFS
        assert self.used_bytes <= self.buffer_bytes
        for handoff in self:
            handoff.check()
