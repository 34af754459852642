"""One attached engine and what it was granted: lookup leases and write credits, and these as messages name them.

Messages are filled in place: that takes half of the time that one object per chunk takes, which is copied then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmkv import rpc
from lmkv.errors import BadChunkKey, BadMessage, GrantNotFound
from lmkv.keys import PREFIX_DIGEST_BYTES, ChunkKey, check_prefix_digests, part_key
from lmkv.prompt import parent_of
from lmkv.spec import ALL, KvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk, HostTier, Origin, Reservation

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MAX_EXTENT_BYTES = 56
"""Largest size of a held chunk in a message."""
MAX_EXTENTS = rpc.MAX_MESSAGE_BYTES * 3 // 4 // MAX_EXTENT_BYTES
"""Largest number of held chunks in one message."""
MAX_DIGEST_BYTES = rpc.MAX_MESSAGE_BYTES // 4
"""Most prefix digests in one message, in bytes; other chunks then have none there."""


def add_held(messages: RepeatedCompositeFieldContainer[pb.HeldChunk], chunks: Iterable[Chunk]) -> None:
    """Adds chunks that are held for an engine."""
    for chunk in chunks:
        message = messages.add(checksum=chunk.checksum, token_count=chunk.token_count, generation=chunk.generation)
        _place(message.extent, chunk)


def add_granted(
    messages: RepeatedCompositeFieldContainer[chunk_pb2.GrantedChunk], chunks: Iterable[Chunk], chunk_size: int | None
) -> None:
    """Adds chunks that a peer may read; `chunk_size` is None if no engine has attached with the chunks' spec."""
    room = MAX_DIGEST_BYTES
    for chunk in chunks:
        message = messages.add(checksum=chunk.checksum, token_count=chunk.token_count)
        _place(message.extent, chunk)
        if chunk.parent is not None and (chunk.prefix_digests or chunk_size is None or chunk.token_count < chunk_size):
            message.parent_key = chunk.parent
        room -= len(chunk.prefix_digests)
        if room >= 0:
            message.prefix_digests = chunk.prefix_digests


def add_credit(
    messages: RepeatedCompositeFieldContainer[pb.WriteCredit],
    reserved: Reservation,
    part: int = 0,
    token_count: int = 0,
) -> None:
    """Adds a write credit for a part of a full chunk, or for a partial chunk of `token_count` tokens."""
    extent = messages.add(part=part, partial_token_count=token_count).extent
    extent.offset, extent.size_bytes = reserved.offset, reserved.size_bytes


def _place(extent: chunk_pb2.Extent, chunk: Chunk) -> None:
    extent.region, extent.offset, extent.size_bytes = chunk.tier.region, chunk.offset, chunk.size_bytes


HOLD_SHARE = 2
"""The chunks that are held for one engine take at most 1/2 of the pool."""


class _Credit(NamedTuple):
    """The kind of chunk that a write credit is for."""

    part: int
    is_partial: bool = False


@dataclass(kw_only=True, slots=True)
class LookupLease:
    """One lookup: its keys, and the chunks that are held in the pool for it."""

    keys: Sequence[ChunkKey] = ()
    """Keys of the items of the hit."""
    chunks: list[Chunk] = field(default_factory=list)
    own_count: int = 0
    """The number of items from the first one on that were in the pool."""
    behind: set[Chunk] = field(default_factory=set)
    """Held items that were in the pool behind others that were not, and that no load has delivered."""
    handoff_id: str = ""
    """The handoff that brings the other chunks; empty if none does."""
    on_release: Callable[[], None] | None = None
    """Called when the lease is released."""


class EngineSession:
    """One engine, from its attachment until none of its processes can touch the pool any more."""

    def __init__(
        self, engine_id: str, spec: KvSpec, tier: HostTier, credit_limit: int, *, worker_count: int = 1
    ) -> None:
        self.engine_id = engine_id
        self.spec = spec
        self.credit_limit = credit_limit
        self.worker_count = worker_count
        self.attached = True
        self.origin = Origin()
        """That of the chunks that it stores."""
        self.workers: Counter[int] = Counter()
        """Connections by rank that have the pool mapped; a worker that connects again has two for a moment."""
        self._tier = tier
        self._leases: dict[str, LookupLease] = {}
        self._credits: dict[int, _Credit] = {}
        """Credits by the offset of their extent."""
        self._credit_counts: Counter[_Credit] = Counter()
        self._held_bytes = 0

    @property
    def credit_count(self) -> int:
        """Write credits that the engine holds, for all parts of chunks."""
        return len(self._credits)

    @property
    def lease_count(self) -> int:
        """Lookups that are not released yet."""
        return len(self._leases)

    @property
    def holdable_bytes(self) -> int:
        """Bytes of further chunks that may be held for the engine."""
        return max(0, self._tier.size_bytes // HOLD_SHARE - self._held_bytes)

    def begin(self, lookup_id: str) -> LookupLease:
        """Begins a lookup. Raises `BadMessage` if the id is in use."""
        if lookup_id in self._leases:
            raise BadMessage(f"lookup_id {lookup_id!r} is in use; release it first", lookup_id=lookup_id)
        lease = self._leases[lookup_id] = LookupLease()
        return lease

    def keep(
        self, lease: LookupLease, keys: Sequence[ChunkKey], own: Sequence[Chunk], behind: Sequence[Chunk] = ()
    ) -> None:
        """Holds the items of a hit that are in the pool: the first ones, and those behind others that are not.

        Ends the holds on what the lookup held before.
        """
        before = (*lease.chunks, *lease.behind)
        lease.keys, lease.chunks, lease.own_count, lease.behind = keys, list(own), len(own), set(behind)
        held = (*own, *behind)
        self._tier.hold(held)
        self._held_bytes += self._pool_bytes(held)
        if before:
            self._tier.unhold(before)
            self._held_bytes -= self._pool_bytes(before)

    def holdable_for(self, lease: LookupLease) -> int:
        """Bytes of the chunks that may be held for one lookup, those that are included."""
        return self.holdable_bytes + self._pool_bytes(lease.chunks) + self._pool_bytes(lease.behind)

    def lease(self, lookup_id: str) -> LookupLease | None:
        """The lookup of this id; None if it was released."""
        return self._leases.get(lookup_id)

    def hold(self, lookup_id: str, chunks: Sequence[Chunk]) -> bool:
        """Adds fetched chunks, already held, to a lookup; if it was released meanwhile, ends the holds: False."""
        lease = self._leases.get(lookup_id)
        if lease is None:
            self._tier.unhold(chunks)
            return False
        lease.chunks.extend(chunks)
        self._held_bytes += self._pool_bytes(chunks)
        if held := [chunk for chunk in chunks if chunk in lease.behind] if lease.behind else []:
            lease.behind.difference_update(held)
            self._tier.unhold(held)
            self._held_bytes -= self._pool_bytes(held)
        return True

    def release(self, lookup_id: str) -> int:
        """Ends a lookup and its holds; returns the number of chunks that were held. Idempotent."""
        lease = self._leases.pop(lookup_id, None)
        if lease is None:
            return 0
        held = [*lease.chunks, *lease.behind]
        self._tier.unhold(held)
        self._held_bytes -= self._pool_bytes(held)
        if lease.on_release:
            lease.on_release()
        return len(held)

    def reserve(self, count: int, part: int = 0) -> list[Reservation]:
        """Grants up to `count` write credits of one part of a full chunk each.

        The limit holds for each part; beyond the pool's free space none are granted.
        """
        granted: list[Reservation] = []
        size_bytes, credit = self.spec.part_bytes(part), _Credit(part)
        for _ in range(min(count, self.credit_limit - self._credit_counts[credit])):
            reserved = self._tier.reserve(size_bytes)
            if reserved is None:
                break
            self._grant(reserved, credit)
            granted.append(reserved)
        return granted

    def reserve_partial(self, token_count: int, *, is_optional: bool = False) -> list[Reservation]:
        """Grants write credits for a partial chunk of `token_count` tokens: one for each part, in their order.

        None beyond the pool's free space, or `credit_limit` partial chunks. One that `is_optional` evicts nothing, and
        leaves free memory for a full chunk to others: none unless there is a free run of that size. Raises `BadMessage`
        if no partial chunk has this number of tokens.
        """
        spec = self.spec
        if not 0 < token_count < spec.chunk_size or not spec.ends_anywhere:
            raise BadMessage(f"no partial chunk of this spec has {token_count} tokens", field="partial_token_counts")
        if self._credit_counts[_Credit(0, is_partial=True)] >= self.credit_limit:
            return []
        if is_optional and not self._tier.has_room(spec.chunk_bytes):
            return []
        granted: list[Reservation] = []
        for part in range(len(spec.parts)):
            reserved = self._tier.reserve(spec.part_bytes(part, token_count))
            if reserved is None:
                for one in granted:
                    self.return_credit(one.offset)
                return []
            self._grant(reserved, _Credit(part, is_partial=True))
            granted.append(reserved)
        return granted

    def _grant(self, reserved: Reservation, credit: _Credit) -> None:
        self._credits[reserved.offset] = credit
        self._credit_counts[credit] += 1

    def return_credit(self, offset: int) -> None:
        """Returns an unused credit to the pool. Raises `GrantNotFound` if the engine does not hold it."""
        self._spend(offset)
        self._tier.give_back(offset)

    def commit(self, chunk: Chunk, *, part: int = 0, superseded: ChunkKey | None = None) -> Chunk | None:
        """Makes a written part of a chunk visible, by the key of the part and as a chunk of the engine's spec.

        Returns None if it is held already.

        The keys of `chunk`, of its parent and of the `superseded` one are those of whole chunks. Of parts of which a
        hit needs every chunk, only a partial chunk can be superseded. Raises `GrantNotFound` if the engine does not
        hold a credit of this size for this part, `BadMessage` if sizes do not fit the spec, `BadChunkKey` if the
        prefix digests are not of this chunk; then the engine keeps its credits.
        """
        spec, key, offset = self.spec, chunk.key, chunk.offset
        size_bytes, token_count, prefix_digests = chunk.size_bytes, chunk.token_count, chunk.prefix_digests
        if not 0 <= part < len(spec.parts):
            raise BadMessage(f"chunks of this spec have no part {part}", part=part)
        if not spec.fits(size_bytes, token_count) or size_bytes != spec.part_bytes(part, token_count):
            raise BadMessage(f"{size_bytes} bytes are not {token_count} tokens of this spec", size_bytes=size_bytes)
        if self._credit(offset).part != part:
            raise GrantNotFound(f"the credit at offset {offset} is not for part {part}", offset=offset)
        check_prefix_digests(prefix_digests, token_count)
        if token_count < spec.chunk_size and prefix_digests[-PREFIX_DIGEST_BYTES:] not in (
            b"",
            key[:PREFIX_DIGEST_BYTES],
        ):
            raise BadChunkKey("prefix_digests do not end with the chunk's key", field="prefix_digests")
        has_ends = token_count < spec.chunk_size or prefix_digests != b""
        chunk.parent = parent_of(spec, part, key, chunk.parent, has_ends=has_ends)
        chunk.key, chunk.fingerprint = part_key(key, part), spec.fingerprint
        if part or not spec.ends_anywhere:
            chunk.prefix_digests = b""
        committed = self._tier.commit(chunk)
        self._spend(offset)
        if committed:
            self._tier.keep_quota(committed)
        if superseded is not None and (spec.parts[part].rule != ALL or self._is_partial(superseded)):
            self._tier.supersede(part_key(superseded, part))
        return committed

    def _is_partial(self, key: ChunkKey) -> bool:
        chunk = self._tier.get(key)
        return chunk is not None and chunk.token_count < self.spec.chunk_size

    def _pool_bytes(self, chunks: Iterable[Chunk]) -> int:
        """Bytes of the pool that the chunks take; those in a device buffer take none."""
        return sum(chunk.size_bytes for chunk in chunks if chunk.tier is self._tier)

    def _credit(self, offset: int) -> _Credit:
        """The credit at an offset. Raises `GrantNotFound` if the engine does not hold it."""
        credit = self._credits.get(offset)
        if credit is None:
            raise GrantNotFound(f"engine {self.engine_id} holds no credit at offset {offset}", offset=offset)
        return credit

    def _spend(self, offset: int) -> None:
        self._credit_counts[self._credit(offset)] -= 1
        del self._credits[offset]

    def revoke(self) -> None:
        """Ends all grants. The caller guarantees that no process of the engine can touch the pool any more."""
        for lookup_id in list(self._leases):
            self.release(lookup_id)
        for offset in list(self._credits):
            self.return_credit(offset)
