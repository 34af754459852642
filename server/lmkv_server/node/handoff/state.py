"""One handoff as the decode's node sees it: its missing chunks, the room reserved for them, and those that arrived.

Allocated ──commit──► Transferring ──all have arrived──► Committed
    │                      │
    └──────────────────────┴──► Aborted     either side ended it, or chunks arrived damaged
                           └──► Expired     no message from the prefill within its timeout

A committed handoff becomes aborted if the device buffer that has its chunks is closed; no other end changes.

Only the first two are open: room is reserved for the chunks that are missing. In every state the chunks that arrived
are held until `close`: when the decode's request has released the handoff, or has not arrived in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from lmkv.errors import BadMessage
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.prompt import Hit, Items, Prompt
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation


class HandoffState(Enum):
    ALLOCATED = "allocated"
    """Room is reserved for every chunk, and none has arrived."""
    TRANSFERRING = "transferring"
    """Chunks are arriving."""
    COMMITTED = "committed"
    """Every chunk has arrived."""
    ABORTED = "aborted"
    """No more chunks will arrive: the prefill, the decode or a damaged chunk ended it."""
    EXPIRED = "expired"
    """No more chunks will arrive: the prefill sent nothing within its timeout."""


MAX_NAME = 256
"""Most characters of a handoff's name."""
OPEN = (HandoffState.ALLOCATED, HandoffState.TRANSFERRING)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffSource:
    """The prefill's node."""

    instance_id: str
    epoch: int
    address: str
    session_id: str
    """The session that announced the handoff: no other caller may commit or end it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedPrompt:
    """The prompt of a handoff, as the prefill announces it."""

    handoff_id: str
    spec: KvSpec
    chunk_keys: Sequence[ChunkKey]
    token_count: int

    def items(self) -> Items:
        """Returns the items that are transferred: those of a hit of all chunks."""
        token_count = min(self.token_count, len(self.chunk_keys) * self.spec.chunk_size)
        prompt = Prompt(self.spec, self.chunk_keys, token_count=token_count)
        return prompt.items(Hit(len(prompt)))

    def check(self) -> None:
        """Raises `BadMessage` if the handoff has no valid name, or its tokens do not make its chunks."""
        check_name(self.handoff_id)
        chunk_size, token_count = self.spec.chunk_size, self.token_count
        has_partial = token_count % chunk_size > 0
        if not self.handoff_id or token_count // chunk_size + has_partial != len(self.chunk_keys):
            raise BadMessage(f"{token_count} tokens do not make {len(self.chunk_keys)} chunks", field="token_count")
        if has_partial and not self.spec.ends_anywhere:
            raise BadMessage(f"{token_count} tokens are no whole chunks of {chunk_size}", field="token_count")


def check_name(handoff_id: str) -> None:
    """Raises `BadMessage` if the name is too long or not printable: names are remembered and logged."""
    if len(handoff_id) > MAX_NAME or not handoff_id.isprintable():
        raise BadMessage(f"handoff_id must have at most {MAX_NAME} printable characters", field="handoff_id")


class Handoff:
    """The transfer of one prompt's chunks from a prefill's node to this one."""

    def __init__(self, grant_id: str, prompt: HandedPrompt, source: HandoffSource, destination: HostTier) -> None:
        """`destination` takes the chunks that are not in the node's tier: that tier, or an engine's device buffer."""
        self.grant_id = grant_id
        self.handoff_id = prompt.handoff_id
        self.source = source
        self.spec = prompt.spec
        self.chunk_keys = prompt.chunk_keys
        self._items = prompt.items()
        self.keys = list(self._items.keys)
        """The keys of the items that are transferred."""
        self.destination = destination
        self.state = HandoffState.ALLOCATED
        self.missing: tuple[int, ...] = ()
        """Indices of the keys that were missing at the start."""
        self.codec = ""
        """The codec in which its chunks may be encoded; empty: none."""
        self.expire_at = 0.0
        """When it expires while it is open, or is abandoned while no request has claimed it."""
        self.changed = asyncio.Event()
        """Set whenever a chunk has arrived or the state has changed."""
        self._wanted: dict[int, Reservation] = {}
        self._reading: dict[int, Reservation] = {}
        self._chunks: list[Chunk] = []
        self._committed_bytes = 0
        self._closed = False
        self._has_destination = True

    @property
    def is_open(self) -> bool:
        """Whether chunks may still arrive."""
        return self.state in OPEN

    @property
    def buffer_bytes(self) -> int:
        """Bytes reserved for chunks, and of the chunks that arrived."""
        reserved_extents = (*self._wanted.values(), *self._reading.values())
        return sum(reserved.size_bytes for reserved in reserved_extents) + self._committed_bytes

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks that have arrived or were in the tier before; each is held."""
        return self._chunks

    def token_count_of(self, index: int) -> int:
        """Tokens in the chunk of this index, or that this item is a part of; the last one may be partial."""
        return self._items.token_count(index)

    def size_bytes_of(self, index: int) -> int:
        return self._items.sizes[index]

    def parent(self, index: int) -> ChunkKey | None:
        """The key of what must not be evicted before it; None if there is none."""
        return self._items.parent(index)

    def promised(self, first: int) -> int:
        """Number of chunks from the index `first` on, without a gap, that have arrived or may still arrive."""
        here = {chunk.key for chunk in self._chunks}
        coming = self._wanted.keys() | self._reading.keys()
        count = 0
        while first + count < len(self.keys) and (first + count in coming or self.keys[first + count] in here):
            count += 1
        return count

    def allocate(self, tier: HostTier) -> bool:
        """Holds the chunks in the tier and reserves room for the rest; False, with no effect: there is not enough."""
        here = [chunk for key in self.keys if (chunk := self._here(key, tier))]
        tier.hold(here)
        self._chunks = here
        known = {chunk.key for chunk in here}
        self.missing = tuple(index for index, key in enumerate(self.keys) if key not in known)
        for index in self.missing:
            reserved = self.destination.reserve(self.size_bytes_of(index), evict=MissReason.EVICTED_BY_FETCH)
            if reserved is None:
                self.close(tier)
                return False
            self._wanted[index] = reserved
        self._settle()
        return True

    def begin(self, indices: Iterable[int], tier: HostTier) -> dict[int, Reservation]:
        """The reserved extents of those of the chunks that are missing. The caller ends each by `commit` or `fail`.

        A chunk that another transfer has committed meanwhile is held, and not begun.
        """
        begun = {index: self._wanted.pop(index) for index in indices if self.is_open and index in self._wanted}
        if begun:
            self.state = HandoffState.TRANSFERRING
            self._reading.update(begun)
        for index, reserved in list(begun.items()):
            if chunk := self._here(self.keys[index], tier):
                self.destination.give_back(reserved.offset)
                del begun[index]
                self.commit(index, chunk, tier)
        return begun

    def commit(self, index: int, chunk: Chunk, tier: HostTier) -> None:
        """A chunk that was begun has arrived: holds it, unless the handoff is closed or its buffer detached."""
        reserved = self._reading.pop(index)
        if not self._closed and (self._has_destination or chunk.tier is not self.destination):
            tier.hold([chunk])
            self._chunks.append(chunk)
            self._committed_bytes += reserved.size_bytes
        self._settle()

    def fail(self, indices: Iterable[int]) -> None:
        """Aborts the handoff if one of these chunks was begun and not committed."""
        lost = [self._reading.pop(index) for index in indices if index in self._reading]
        if lost:
            self.end(HandoffState.ABORTED)

    def detach_buffer(self, tier: HostTier) -> None:
        """Aborts the handoff: its device buffer is closed. Only the chunks in the node's tier stay held."""
        self._has_destination = False
        self.end(HandoffState.ABORTED)
        lost = [chunk for chunk in self._chunks if chunk.tier is self.destination]
        self._chunks = [chunk for chunk in self._chunks if chunk.tier is not self.destination]
        tier.unhold(lost)
        self._committed_bytes = 0
        if lost and self.state is HandoffState.COMMITTED:
            self.state = HandoffState.ABORTED

    def end(self, state: HandoffState) -> None:
        """Releases the room of the missing chunks. Idempotent."""
        if self.is_open:
            self.state = state
            self._release_room()
            self.changed.set()

    def close(self, tier: HostTier) -> None:
        """Releases every hold and all room. Chunks that are being read stay in their tier like any other chunk."""
        self._closed = True
        self.end(HandoffState.ABORTED)
        self._release_room()
        tier.unhold(self._chunks)
        self._chunks = []
        self._committed_bytes = 0

    def _settle(self) -> None:
        if self.is_open and not self._wanted and not self._reading:
            self.state = HandoffState.COMMITTED
        self.changed.set()

    def _here(self, key: ChunkKey, tier: HostTier) -> Chunk | None:
        """The chunk, if it is in the tier or in the destination."""
        chunk = tier.get(key) or self.destination.get(key)
        return chunk if chunk and chunk.fingerprint == self.spec.fingerprint else None

    def _release_room(self) -> None:
        for reserved in self._wanted.values():
            self.destination.give_back(reserved.offset)
        self._wanted.clear()

    def check(self) -> None:
        """Asserts that reservations and state agree."""
        assert not (self._wanted.keys() & self._reading)
        assert self.is_open or not self._wanted, "room is reserved for a handoff that has ended"
        assert self.state is not HandoffState.COMMITTED or not self._reading
        assert not self._closed or not (self._wanted or self._chunks)
        assert all(chunk.holds > 0 for chunk in self._chunks)
