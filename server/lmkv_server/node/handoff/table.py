"""All handoffs that a decode's node takes part in: who may announce one, and until when it lasts. Pure; for `Receiver`.

Two deadlines: an open handoff expires when its prefill is silent for `silence_seconds`; one that has ended, or that no
request of the decode has come for, is abandoned `abandon_seconds` after the last word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from lmkv.errors import BadMessage, Full, GrantNotFound, NoFreeExtents, RequestTooLarge
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.transfer.access import new_grant_id
from lmkv.units import format_bytes
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.state import Handoff, HandoffSource, State

MAX_HANDOFFS = 1024
MAX_ENDED = 4096
"""So many names of ended handoffs are remembered, so that a late word about one begins nothing."""
MAX_NAME = 256
"""Characters of a handoff's name."""
RETRY_SECONDS = 0.05


class HandoffTable:
    """The table. Every hold and every reservation of a handoff is its own, and ended with it."""

    def __init__(
        self, tier: HostTier, *, buffer_bytes: int, silence_seconds: float = 5.0, abandon_seconds: float = 60.0
    ) -> None:
        """`buffer_bytes` bounds what all handoffs together keep room for in the tier, or have received there."""
        self.ended_counts: dict[State, int] = {State.COMMITTED: 0, State.ABORTED: 0, State.EXPIRED: 0}
        """Handoffs closed since the start, by how they ended."""
        self.abandoned_count = 0
        """Those of them that no request of the decode came for."""
        self.refused_count = 0
        """Handoffs that there was no room for."""
        self.silence_seconds = silence_seconds
        self.buffer_bytes = buffer_bytes
        self._abandon_seconds = abandon_seconds
        self._tier = tier
        self._by_grant: dict[str, Handoff] = {}
        self._by_request: dict[str, Handoff] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # names, oldest first
        self._claims: dict[str, list[HostTier | None]] = {}

    def __len__(self) -> int:
        return len(self._by_grant)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(self._by_grant.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the tier that are in use."""
        return sum(handoff.buffer_bytes for handoff in self if handoff.room is self._tier)

    def allocate(
        self,
        request_id: str,
        giver: HandoffSource,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        token_count: int,
        now: float,
        buffer: HostTier | None = None,
    ) -> Handoff:
        """Begins a handoff, or finds the one that this giver has begun by that name.

        Its chunks go into the device buffer, if there is one and it has room for all of them now, else into the tier.
        Raises `BadMessage` if the request makes no sense, `GrantNotFound` if it has ended already, `RequestTooLarge` if
        it will never fit, `NoFreeExtents` if it does not fit now.
        """
        check_name(request_id)
        if not request_id or -(-token_count // spec.chunk_size) != len(keys):
            raise BadMessage(f"{token_count} tokens do not make {len(keys)} chunks", field="token_count")
        if known := self._by_request.get(request_id):
            if (known.giver, list(known.keys)) != (giver, list(keys)):
                raise BadMessage(f"request_id {request_id!r} names another handoff", field="request_id")
            self.heard(known, now)
            return known
        if request_id in self._ended:
            raise GrantNotFound(f"handoff {request_id!r} has ended", request_id=request_id)
        candidates = [
            Handoff(
                grant_id=new_grant_id(),
                request_id=request_id,
                giver=giver,
                spec=spec,
                keys=keys,
                token_count=token_count,
                room=room,
            )
            for room in (buffer, self._tier)
            if room is not None
        ]
        handoff = self._begin(candidates)
        self._by_grant[handoff.grant_id] = self._by_request[request_id] = handoff
        self.heard(handoff, now)
        return handoff

    def _begin(self, candidates: Sequence[Handoff]) -> Handoff:
        """The first of them that there is room for. Raises why there is none, which is what the last is told."""
        *others, last = candidates
        for handoff in others:
            if len(self) < MAX_HANDOFFS and handoff.allocate(self._tier):
                return handoff
        wanted = sum(last.size_of(index) for index, key in enumerate(last.keys) if not self._tier.get(key))
        if wanted > self.buffer_bytes:
            self.refused_count += 1
            raise RequestTooLarge(
                f"the prompt takes {format_bytes(wanted)}, the buffer has {format_bytes(self.buffer_bytes)}; "
                "raise pd_buffer_size at the decode",
                size_bytes=wanted,
            )
        if len(self) >= MAX_HANDOFFS:
            self.refused_count += 1
            raise Full(f"{MAX_HANDOFFS} handoffs are under way", retry_seconds=RETRY_SECONDS)
        if self.used_bytes + wanted > self.buffer_bytes or not last.allocate(self._tier):
            self.refused_count += 1
            raise NoFreeExtents(
                f"{format_bytes(wanted)} are wanted, {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.buffer_bytes)} are in use",
                retry_seconds=RETRY_SECONDS,
            )
        return last

    def get(self, grant_id: str, session_id: str) -> Handoff:
        """The handoff. Raises `GrantNotFound` if it is over, or of another session."""
        handoff = self._by_grant.get(grant_id)
        if handoff is None or handoff.giver.session_id != session_id:
            raise GrantNotFound("no handoff of this caller has this grant; it has ended")
        return handoff

    def find(self, request_id: str) -> Handoff | None:
        """The handoff of this name, if it was announced and is not over."""
        return self._by_request.get(request_id)

    def is_over(self, request_id: str) -> bool:
        """Whether the handoff of this name has been and gone."""
        return request_id in self._ended

    def heard(self, handoff: Handoff, now: float) -> None:
        """The prefill gave a sign of life, or the handoff has ended."""
        handoff.expire_at = now + (self.silence_seconds if handoff.is_open else self._abandon_seconds)

    def claim(self, request_id: str, buffer: HostTier | None = None) -> None:
        """The decode's request has come; from now on it decides how long the chunks are kept. `unclaim` ends it.

        `buffer` is the device buffer of its engine. A request for several answers comes several times.
        """
        self._claims.setdefault(request_id, []).append(buffer)

    def reaches(self, handoff: Handoff) -> bool:
        """Whether the request that has come can load what the handoff brings: not out of another engine's buffer."""
        return handoff.room is self._tier or handoff.room in self._claims.get(handoff.request_id, ())

    def unclaim(self, request_id: str) -> None:
        """The decode's request has what it wants, or is gone: the handoff is over, announced or not."""
        claims = self._claims.get(request_id, [])
        if claims:
            claims.pop()
        if claims:
            return
        self._claims.pop(request_id, None)
        if handoff := self.find(request_id):
            self._close(handoff)
        self._remember(request_id)

    def withdraw(self, request_id: str, now: float, session_id: str | None = None) -> bool:
        """Ends a handoff, announced or not, that is refused or that no request will load; whether the caller may.

        `session_id` is that of a prefill, which may end its own; None: this node's engine. A request that has come
        nevertheless keeps the chunks that came, and waits for no more.
        """
        check_name(request_id)
        handoff = self.find(request_id)
        if handoff and session_id not in (None, handoff.giver.session_id):
            return False
        if handoff and self._is_claimed(handoff):
            handoff.end(State.ABORTED)
            self.heard(handoff, now)
        elif handoff:
            self._close(handoff)
        self._remember(request_id)
        return True

    def end(self, grant_id: str, session_id: str, now: float) -> bool:
        """The prefill will send nothing more; whether the session has such a handoff."""
        handoff = self._by_grant.get(grant_id)
        if handoff is None or handoff.giver.session_id != session_id:
            return False
        handoff.end(State.ABORTED)
        self.heard(handoff, now)
        return True

    def expire(self, now: float) -> list[Handoff]:
        """Expires the open handoffs, and closes the abandoned ones, whose time has come; the first ones."""
        expired = []
        for handoff in [one for one in self if one.expire_at <= now]:
            if handoff.is_open:
                handoff.end(State.EXPIRED)
                self.heard(handoff, now)
                expired.append(handoff)
            elif not self._is_claimed(handoff):
                self.abandoned_count += 1
                self._close(handoff)
        return expired

    def next_expiry(self) -> float | None:
        """When the next deadline is; None if there is none."""
        waiting = (one.expire_at for one in self if one.is_open or not self._is_claimed(one))
        return min(waiting, default=None)

    def lose_room(self, room: HostTier, now: float) -> None:
        """A device buffer is gone: what was to come into it will not come."""
        for handoff in [one for one in self if one.room is room]:
            handoff.lose_room(self._tier)
            self.heard(handoff, now)

    def clear(self) -> None:
        """Closes every handoff."""
        for handoff in list(self):
            self._close(handoff)

    def _is_claimed(self, handoff: Handoff) -> bool:
        return handoff.request_id in self._claims

    def _close(self, handoff: Handoff) -> None:
        handoff.close(self._tier)
        self.ended_counts[handoff.state] += 1
        del self._by_grant[handoff.grant_id], self._by_request[handoff.request_id]
        self._remember(handoff.request_id)

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        self._ended.move_to_end(request_id)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def check(self) -> None:
        """Asserts that the indices agree and the buffer's bound holds."""
        assert set(map(id, self._by_grant.values())) == set(map(id, self._by_request.values()))
        assert len(self) <= MAX_HANDOFFS
        assert self.used_bytes <= self.buffer_bytes
        for handoff in self:
            handoff.check()


def check_name(request_id: str) -> None:
    """Raises `BadMessage` if the name is too long or not printable: names are kept when handoffs end, and logged."""
    if len(request_id) > MAX_NAME or not request_id.isprintable():
        raise BadMessage(f"request_id must have at most {MAX_NAME} printable characters", field="request_id")
