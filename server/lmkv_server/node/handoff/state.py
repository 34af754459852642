"""One handoff as the decode's node sees it: which chunks it still wants, has room for, and keeps. Pure; for `Handoffs`.

Allocated ──commit──► Transferring ──all are here──► Committed
    │                      │
    └──────────────────────┴──► Aborted     either side gave it up, or chunks came damaged
                           └──► Expired     no word from the prefill for too long

Only the first two are open: room is kept for what they want. In whatever state, the chunks that came are kept in place
until `close`: when the decode's request lets go, or when it has not come for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier, Reserved


class State(Enum):
    """How far a handoff is."""

    ALLOCATED = "allocated"
    """There is room for everything, and nothing has come."""
    TRANSFERRING = "transferring"
    """Chunks come."""
    COMMITTED = "committed"
    """Every chunk is here."""
    ABORTED = "aborted"
    """What is not here will not come: the prefill, the decode or a damaged chunk ended it."""
    EXPIRED = "expired"
    """What is not here will not come: the prefill fell silent."""


OPEN = (State.ALLOCATED, State.TRANSFERRING)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffSource:
    """The prefill's node."""

    instance_id: str
    epoch: int
    address: str
    session_id: str
    """The session by which it announced the handoff: no other caller may commit or end it."""


class Handoff:
    """The chunks of one prompt on their way from a prefill to this node."""

    def __init__(
        self,
        *,
        grant_id: str,
        request_id: str,
        giver: HandoffSource,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        token_count: int,
        room: HostTier,
    ) -> None:
        """`room` is where the chunks go that are not here: the node's tier, or an engine's device buffer."""
        self.grant_id = grant_id
        self.request_id = request_id
        self.giver = giver
        self.spec = spec
        self.keys = keys
        self.token_count = token_count
        self.room = room
        self.state = State.ALLOCATED
        self.missing: tuple[int, ...] = ()
        """Indices of the keys that were not here at first."""
        self.expire_at = 0.0
        """When it expires while it is open, or is abandoned while nobody claims it."""
        self.changed = asyncio.Event()
        """Set whenever a chunk came or the state changed."""
        self._wanted: dict[int, Reserved] = {}
        self._reading: dict[int, Reserved] = {}
        self._kept: list[Chunk] = []
        self._landed_bytes = 0
        self._closed = False
        self._has_room = True

    @property
    def is_open(self) -> bool:
        """Whether chunks may still come."""
        return self.state in OPEN

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the room that is kept for chunks, and of those that came."""
        rooms = (*self._wanted.values(), *self._reading.values())
        return sum(reserved.size_bytes for reserved in rooms) + self._landed_bytes

    @property
    def kept(self) -> Sequence[Chunk]:
        """The chunks that are kept in place."""
        return self._kept

    def tokens_of(self, index: int) -> int:
        """Tokens in the chunk of this index: the last one may be partial."""
        return min(self.spec.chunk_size, self.token_count - index * self.spec.chunk_size)

    def size_of(self, index: int) -> int:
        """Its bytes."""
        return self.spec.size_bytes(self.tokens_of(index))

    def promised(self, first: int) -> int:
        """Chunks from the index `first` on, without a gap, that are here or may still come."""
        here = {chunk.key for chunk in self._kept}
        coming = self._wanted.keys() | self._reading.keys()
        count = 0
        while first + count < len(self.keys) and (first + count in coming or self.keys[first + count] in here):
            count += 1
        return count

    def allocate(self, tier: HostTier) -> bool:
        """Keeps what is here and makes room for the rest; False, and nothing is kept, if there is no room for all."""
        here = [chunk for key in self.keys if (chunk := self._here(key, tier))]
        tier.hold(here)
        self._kept = here
        known = {chunk.key for chunk in here}
        self.missing = tuple(index for index, key in enumerate(self.keys) if key not in known)
        for index in self.missing:
            reserved = self.room.reserve(self.size_of(index))
            if reserved is None:
                self.close(tier)
                return False
            self._wanted[index] = reserved
        self._settle()
        return True

    def begin(self, indices: Iterable[int], tier: HostTier) -> dict[int, Reserved]:
        """Where those of the chunks go that are still wanted. The caller ends each by `land` or `lose`.

        What somebody else has brought meanwhile is not wanted any more: it is kept as it is.
        """
        begun = {index: self._wanted.pop(index) for index in indices if self.is_open and index in self._wanted}
        if begun:
            self.state = State.TRANSFERRING
            self._reading.update(begun)
        for index, reserved in list(begun.items()):
            if chunk := self._here(self.keys[index], tier):
                self.room.give_back(reserved.offset)
                del begun[index]
                self.land(index, chunk, tier)
        return begun

    def land(self, index: int, chunk: Chunk, tier: HostTier) -> None:
        """A chunk that was begun is here. It is kept, unless nobody wants it any more, or it is gone with its room."""
        reserved = self._reading.pop(index)
        if not self._closed and (self._has_room or chunk.tier is not self.room):
            tier.hold([chunk])
            self._kept.append(chunk)
            self._landed_bytes += reserved.size_bytes
        self._settle()

    def lose(self, indices: Iterable[int]) -> None:
        """Chunks that were begun did not come, or came damaged: it is not to be whole any more."""
        lost = [self._reading.pop(index) for index in indices if index in self._reading]
        if lost:
            self.end(State.ABORTED)

    def lose_room(self, tier: HostTier) -> None:
        """The room is gone, and what it held: only what is in the tier is kept."""
        self._has_room = False
        self.end(State.ABORTED)
        gone = [chunk for chunk in self._kept if chunk.tier is self.room]
        self._kept = [chunk for chunk in self._kept if chunk.tier is not self.room]
        tier.unhold(gone)
        self._landed_bytes = 0
        if gone:
            self.state = State.ABORTED

    def end(self, state: State) -> None:
        """Nothing more will come: gives back the room. Without effect if it has ended."""
        if self.is_open:
            self.state = state
            self._give_back()
            self.changed.set()

    def close(self, tier: HostTier) -> None:
        """Lets go of everything. What is being read now stays in its room like any other chunk."""
        self._closed = True
        self.end(State.ABORTED)
        self._give_back()
        tier.unhold(self._kept)
        self._kept = []
        self._landed_bytes = 0

    def _settle(self) -> None:
        if self.is_open and not self._wanted and not self._reading:
            self.state = State.COMMITTED
        self.changed.set()

    def _here(self, key: ChunkKey, tier: HostTier) -> Chunk | None:
        """The chunk, if it is in the tier or in the room."""
        chunk = tier.get(key) or self.room.get(key)
        return chunk if chunk and chunk.fingerprint == self.spec.fingerprint else None

    def _give_back(self) -> None:
        for reserved in self._wanted.values():
            self.room.give_back(reserved.offset)
        self._wanted.clear()

    def check(self) -> None:
        """Asserts that room and state agree."""
        assert not (self._wanted.keys() & self._reading)
        assert self.is_open or not self._wanted, "room is kept for what will not come"
        assert self.state is not State.COMMITTED or not self._reading
        assert not self._closed or not (self._wanted or self._kept)
        assert all(chunk.holds > 0 for chunk in self._kept)
