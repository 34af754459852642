"""One attached engine and what it was granted: lookup leases and write credits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmkv.errors import BadMessage, GrantNotFound
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.sessions.extents import MAX_EXTENTS

HOLD_SHARE = 2
"""The chunks that are held for one engine take at most 1/2 of the pool."""


@dataclass(kw_only=True, slots=True)
class LookupLease:
    """One lookup: its keys, and the chunks that are held in the pool for it."""

    keys: list[ChunkKey]
    chunks: list[Chunk] = field(default_factory=list)
    own_count: int = 0
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
        self.workers: Counter[int] = Counter()
        """Connections by rank that have the pool mapped; a worker that connects again has two for a moment."""
        self._tier = tier
        self._leases: dict[str, LookupLease] = {}
        self._credits: dict[int, Reservation] = {}
        self._held_bytes = 0

    @property
    def credit_count(self) -> int:
        """Write credits that the engine holds."""
        return len(self._credits)

    @property
    def lease_count(self) -> int:
        """Lookups that are not released yet."""
        return len(self._leases)

    @property
    def holdable_count(self) -> int:
        """Number of further full chunks that may be held for the engine."""
        return max(0, self._tier.size_bytes // HOLD_SHARE - self._held_bytes) // self.spec.chunk_bytes

    def open(self, request_id: str, keys: list[ChunkKey]) -> LookupLease:
        """Begins a lookup: finds and holds chunks of a prompt in the pool, at most as many as an answer can name.

        Raises `BadMessage` if the id is in use.
        """
        if request_id in self._leases:
            raise BadMessage(f"request_id {request_id!r} is in use; release it first", request_id=request_id)
        lease = LookupLease(keys=keys)
        self._leases[request_id] = lease
        budget = self._tier.size_bytes // HOLD_SHARE - self._held_bytes
        for chunk in self._tier.find(keys[:MAX_EXTENTS]):
            budget -= chunk.size_bytes
            if budget < 0:
                break
            lease.chunks.append(chunk)
        lease.own_count = len(lease.chunks)
        self._tier.hold(lease.chunks)
        self._held_bytes += self._pool_bytes(lease.chunks)
        return lease

    def lease(self, request_id: str) -> LookupLease | None:
        """The lookup of this id; None if it was released."""
        return self._leases.get(request_id)

    def hold(self, request_id: str, chunks: Sequence[Chunk]) -> bool:
        """Adds fetched chunks, already held, to a lookup; if it was released meanwhile, ends the holds: False."""
        lease = self._leases.get(request_id)
        if lease is None:
            self._tier.unhold(chunks)
            return False
        lease.chunks.extend(chunks)
        self._held_bytes += self._pool_bytes(chunks)
        return True

    def release(self, request_id: str) -> int:
        """Ends a lookup and its holds; returns the number of chunks that were held. Idempotent."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return 0
        self._tier.unhold(lease.chunks)
        self._held_bytes -= self._pool_bytes(lease.chunks)
        if lease.on_release:
            lease.on_release()
        return len(lease.chunks)

    def reserve(self, count: int) -> list[Reservation]:
        """Grants up to `count` write credits of one full chunk each, within the limit and the pool's free space."""
        granted: list[Reservation] = []
        for _ in range(min(count, self.credit_limit - len(self._credits))):
            reserved = self._tier.reserve(self.spec.chunk_bytes)
            if reserved is None:
                break
            self._credits[reserved.offset] = reserved
            granted.append(reserved)
        return granted

    def return_credit(self, offset: int) -> None:
        """Returns an unused credit to the pool. Raises `GrantNotFound` if the engine does not hold it."""
        self._spend(offset)
        self._tier.give_back(offset)

    def commit(
        self,
        offset: int,
        key: ChunkKey,
        size_bytes: int,
        checksum: int,
        token_count: int,
        *,
        parent: ChunkKey | None = None,
    ) -> Chunk | None:
        """Makes a written chunk visible; None if the chunk is held already.

        Raises `GrantNotFound` if the engine does not hold the credit, `BadMessage` if sizes do not fit the spec.
        """
        if not 0 < token_count <= self.spec.chunk_size or size_bytes != self.spec.size_bytes(token_count):
            raise BadMessage(f"{size_bytes} bytes are not {token_count} tokens of this spec", size_bytes=size_bytes)
        self._spend(offset)
        return self._tier.commit(
            offset,
            key=key,
            fingerprint=self.spec.fingerprint,
            size_bytes=size_bytes,
            checksum=checksum,
            token_count=token_count,
            parent=parent,
        )

    def _pool_bytes(self, chunks: Iterable[Chunk]) -> int:
        """Bytes of the pool that the chunks take; those in a device buffer take none."""
        return sum(chunk.size_bytes for chunk in chunks if chunk.tier is self._tier)

    def _spend(self, offset: int) -> None:
        if self._credits.pop(offset, None) is None:
            raise GrantNotFound(f"engine {self.engine_id} holds no credit at offset {offset}", offset=offset)

    def revoke(self) -> None:
        """Ends all grants. The caller guarantees that no process of the engine can touch the pool any more."""
        for request_id in list(self._leases):
            self.release(request_id)
        for offset in list(self._credits):
            self.return_credit(offset)
