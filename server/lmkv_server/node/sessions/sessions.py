"""The engines attached to a node and what each was granted. Pure; called by the engine service and the pool socket.

What an engine was granted ends when the engine gives it back, or when its stream is gone and every worker's connection
to the pool socket with it: only then has the kernel proven that nobody of it touches the pool any more. A frozen engine
keeps what it has, which is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmkv.errors import BadKvSpec, BadMessage, EngineNotFound, GrantNotFound
from lmkv.keys import ChunkKey
from lmkv.spec import MAX_SPECS, KvSpec
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk, HostTier, Reserved
from lmkv_server.node.sessions.served_models import ServedModels
from lmkv_server.node.sessions.wire import MAX_EXTENTS

MAX_CREDITS = 256
"""Most write credits that one engine may hold at a time."""
CREDIT_SHARE = 3
"""One engine's write credits take at most one part in so many of the pool."""
HOLD_SHARE = 2
"""One engine's read grants take at most one part in so many of the pool."""


@dataclass(kw_only=True, slots=True)
class LookupLease:
    """One lookup: what it asked for, what is held in place for it, and who has the rest."""

    keys: list[ChunkKey]
    chunks: list[Chunk] = field(default_factory=list)
    holders: Sequence[Holder] = ()
    """Peers that hold the keys from `own_count` on."""
    own_count: int = 0
    disk_count: int = 0
    """Chunks from `own_count` on that are on the own disk."""
    remote_count: int = 0
    """Chunks after those on disk and at peers that are in the store which all share."""
    handoff_id: str = ""
    """The handoff that brings the rest, if one does."""
    on_release: Callable[[], None] | None = None
    """To be called when the ticket is released."""

    @property
    def peer_count(self) -> int:
        """Chunks after those on disk that a peer holds."""
        return max(0, self.holders[0].matched_chunk_count - self.disk_count) if self.holders else 0


class EngineSession:
    """One engine from attach to the proof that it is gone."""

    def __init__(
        self, engine_id: str, spec: KvSpec, tier: HostTier, credit_limit: int, *, worker_count: int = 1
    ) -> None:
        self.engine_id = engine_id
        self.spec = spec
        self.credit_limit = credit_limit
        self.worker_count = worker_count
        self.attached = True
        self.workers: Counter[int] = Counter()
        """Connections by rank that have the pool mapped; a worker that connects anew has two for a moment."""
        self._tier = tier
        self._tickets: dict[str, LookupLease] = {}
        self._credits: dict[int, Reserved] = {}
        self._held_bytes = 0

    @property
    def credit_count(self) -> int:
        """Write credits that are out."""
        return len(self._credits)

    @property
    def ticket_count(self) -> int:
        """Lookups that hold something or wait for it."""
        return len(self._tickets)

    @property
    def holdable_count(self) -> int:
        """How many full chunks more may be held in place for it."""
        return max(0, self._tier.size_bytes // HOLD_SHARE - self._held_bytes) // self.spec.chunk_bytes

    def open(self, request_id: str, keys: list[ChunkKey]) -> LookupLease:
        """Finds and holds the own chunks of a prompt, as many as an answer can name: the others count as not there.

        Raises `BadMessage` if the id is in use.
        """
        if request_id in self._tickets:
            raise BadMessage(f"request_id {request_id!r} is in use; release it first", request_id=request_id)
        ticket = LookupLease(keys=keys)
        self._tickets[request_id] = ticket
        budget = self._tier.size_bytes // HOLD_SHARE - self._held_bytes
        for chunk in self._tier.find(keys[:MAX_EXTENTS]):
            budget -= chunk.size_bytes
            if budget < 0:
                break
            ticket.chunks.append(chunk)
        ticket.own_count = len(ticket.chunks)
        self._tier.hold(ticket.chunks)
        self._held_bytes += self._pool_bytes(ticket.chunks)
        return ticket

    def ticket(self, request_id: str) -> LookupLease | None:
        """The open lookup of this id, if any."""
        return self._tickets.get(request_id)

    def keep(self, request_id: str, chunks: Sequence[Chunk]) -> bool:
        """Takes over holds on chunks that were fetched for a lookup; if it was released meanwhile, ends them: False."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            self._tier.unhold(chunks)
            return False
        ticket.chunks.extend(chunks)
        self._held_bytes += self._pool_bytes(chunks)
        return True

    def release(self, request_id: str) -> int:
        """Ends a lookup and its holds; the count of chunks that were held. An unknown id is no error."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return 0
        self._tier.unhold(ticket.chunks)
        self._held_bytes -= self._pool_bytes(ticket.chunks)
        if ticket.on_release:
            ticket.on_release()
        return len(ticket.chunks)

    def reserve(self, count: int) -> list[Reserved]:
        """Up to so many write credits, each room for one full chunk."""
        granted: list[Reserved] = []
        for _ in range(min(count, self.credit_limit - len(self._credits))):
            reserved = self._tier.reserve(self.spec.chunk_bytes)
            if reserved is None:
                break
            self._credits[reserved.offset] = reserved
            granted.append(reserved)
        return granted

    def give_back(self, offset: int) -> None:
        """Takes back an unused credit. Raises `GrantNotFound` if the engine does not hold it."""
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
        """Makes a written credit visible; None if the chunk is held already.

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
        """What the chunks take of the pool; those in a device buffer take nothing of it."""
        return sum(chunk.size_bytes for chunk in chunks if chunk.tier is self._tier)

    def _spend(self, offset: int) -> None:
        if self._credits.pop(offset, None) is None:
            raise GrantNotFound(f"engine {self.engine_id} holds no credit at offset {offset}", offset=offset)

    def retire(self) -> None:
        """Takes back everything; only once nobody of the engine can touch the pool."""
        for request_id in list(self._tickets):
            self.release(request_id)
        for offset in list(self._credits):
            self.give_back(offset)


class Engines:
    """All sessions of a node."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._sessions: dict[str, EngineSession] = {}
        self._specs: dict[bytes, KvSpec] = {}
        self.served = ServedModels()
        """The names under which engines serve."""

    @property
    def specs(self) -> Iterable[KvSpec]:
        """Specs of the engines that have attached, those that attached last at the end; at most `MAX_SPECS`."""
        return self._specs.values()

    @property
    def attached_count(self) -> int:
        """Engines whose stream is alive."""
        return sum(session.attached for session in self._sessions.values())

    @property
    def mapped_count(self) -> int:
        """Engines of which something may still touch the pool."""
        return len(self._sessions)

    def spec(self, fingerprint: bytes) -> KvSpec | None:
        """The spec of this fingerprint, if an engine of it has attached."""
        return self._specs.get(fingerprint)

    def attached(self, fingerprint: bytes) -> list[EngineSession]:
        """The sessions of the engines of this spec whose stream is alive."""
        sessions = self._sessions.values()
        return [one for one in sessions if one.attached and one.spec.fingerprint == fingerprint]

    def session(self, engine_id: str) -> EngineSession:
        """The session of an engine. Raises `EngineNotFound`."""
        session = self._sessions.get(engine_id)
        if session is None:
            raise EngineNotFound(f"engine {engine_id!r} is not attached", engine_id=engine_id)
        return session

    def attach(self, engine_id: str, spec: KvSpec, worker_count: int = 1) -> EngineSession:
        """Begins a session. Raises `BadMessage` if the id is in use, `BadKvSpec` if not even two chunks fit."""
        if not engine_id or engine_id in self._sessions:
            raise BadMessage(f"engine_id {engine_id!r} is empty or in use", engine_id=engine_id)
        capacity = self._tier.size_bytes // spec.chunk_bytes
        if capacity < 2:
            raise BadKvSpec(
                f"a chunk takes {spec.chunk_bytes} bytes, the pool has {self._tier.size_bytes}; "
                "raise max_local_cpu_size or lower chunk_size",
                field="chunk_size",
            )
        limit = max(1, min(MAX_CREDITS, capacity // CREDIT_SHARE))
        session = EngineSession(engine_id, spec, self._tier, limit, worker_count=worker_count)
        self._sessions[engine_id] = session
        self._specs.pop(spec.fingerprint, None)
        self._specs[spec.fingerprint] = spec
        if len(self._specs) > MAX_SPECS:
            self._forget_spec()
        return session

    def detach(self, session: EngineSession) -> None:
        """Its stream is gone."""
        session.attached = False
        self.served.detach(session.engine_id)
        self._retire_if_gone(session)

    def worker_came(self, engine_id: str, rank: int) -> None:
        """A worker maps the pool. Raises `EngineNotFound`: it comes too late."""
        self.session(engine_id).workers[rank] += 1

    def worker_went(self, engine_id: str, rank: int) -> None:
        """The kernel says that a worker is gone."""
        session = self._sessions.get(engine_id)
        if session and session.workers[rank]:
            session.workers[rank] -= 1
            self._retire_if_gone(session)

    def _forget_spec(self) -> None:
        """Forgets the oldest spec that no engine here has; what is held of it is useful again once one attaches."""
        in_use = {session.spec.fingerprint for session in self._sessions.values()}
        del self._specs[next((one for one in self._specs if one not in in_use), next(iter(self._specs)))]

    def _retire_if_gone(self, session: EngineSession) -> None:
        gone = not session.attached and not session.workers.total()
        if gone and self._sessions.get(session.engine_id) is session:
            del self._sessions[session.engine_id]
            session.retire()
