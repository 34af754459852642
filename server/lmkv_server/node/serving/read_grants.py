"""Sessions of peers, and the grants by which they read chunks of this node. Pure.

A grant ends exactly once, and with it its holds and the permission to read:

    acquire ──► granted ──┬── release ──► ended
                          └── expire  ──► ended
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lmkv.errors import Full, SessionNotFound
from lmkv.transfer.channel import ByteRange, PeerReader, ReadAccess, new_grant_id
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.encoded_copies import EncodedCopies, EncodedCopy
from lmkv_server.node.peers.connection import FULL_SECONDS, MAX_GRANTS

_NO_COPIES: Mapping[Chunk, EncodedCopy] = {}
MAX_SESSIONS = 4096
"""Maximum number of sessions of one identity; the session that was not used for longest is dropped."""
MAX_INSTANCE_SESSIONS = 16
"""Most sessions of one identity that name the same instance, likewise: an instance uses one, and none of those that it
opened before a restart."""
SHARE = 4
"""The grants of one session hold at most 1/4 of the tier."""
IDENTITY_SHARE = 2
"""The grants of all sessions of one identity hold at most 1/2 of the tier, but always one chunk."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerSession:
    """A session that `Init` opened for one caller."""

    session_id: str
    identity: str
    """The caller's authenticated identity; empty where the fleet has no authentication."""
    instance_id: str
    """The instance that the caller claims to be."""
    epoch: int
    reader: PeerReader
    """The caller as a reader of this node's memory."""


class PeerSessions:
    """All sessions of a node. Ids are unguessable, and valid only for the identity that opened them."""

    def __init__(self, access: ReadAccess) -> None:
        self._access = access
        self._by_identity: dict[str, OrderedDict[str, PeerSession]] = defaultdict(OrderedDict)

    def open(self, identity: str, instance_id: str, epoch: int, session_id: str = "") -> PeerSession:
        """The caller's session of this id, or a new one."""
        known = self.find(identity, session_id)
        if known and (known.instance_id, known.epoch) == (instance_id, epoch):
            return known
        session = PeerSession(
            session_id=secrets.token_hex(16),
            identity=identity,
            instance_id=instance_id,
            epoch=epoch,
            reader=self._access.admit(f"{instance_id}:{epoch}"),
        )
        own = self._by_identity[identity]
        same = [one for one in own.values() if one.instance_id == instance_id]  # least recently used first
        if len(same) >= MAX_INSTANCE_SESSIONS:
            self._drop(same[0])
        elif len(own) >= MAX_SESSIONS:
            self._drop(next(iter(own.values())))
        own[session.session_id] = session
        return session

    def _drop(self, session: PeerSession) -> None:
        del self._by_identity[session.identity][session.session_id]
        self._access.revoke(session.reader)

    def find(self, identity: str, session_id: str) -> PeerSession | None:
        own = self._by_identity.get(identity)
        session = own.get(session_id) if own else None
        if own and session:
            own.move_to_end(session_id)
        return session

    def get(self, identity: str, session_id: str) -> PeerSession:
        """The session of this id. Raises `SessionNotFound` if the identity has no such session."""
        session = self.find(identity, session_id)
        if session is None:
            raise SessionNotFound("the caller has no such session here; Init again")
        return session


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadGrant:
    """Permission to read some chunks until a time."""

    grant_id: str
    session: PeerSession
    chunks: tuple[Chunk, ...]
    expire_at: float
    """When it expires, by the clock of the `now` that `acquire` was called with."""
    copies: dict[Chunk, EncodedCopy] = field(default_factory=dict)
    """The copies that are read in place of chunks."""


@dataclass(kw_only=True, slots=True)
class _Usage:
    """The chunks that the grants of one session, or of all sessions of one identity, hold."""

    counts: dict[Chunk, int] = field(default_factory=dict)
    """The number of grants that hold each chunk."""
    size_bytes: int = 0
    """Bytes of these chunks, each counted once."""
    grant_count: int = 0

    def extra_bytes(self, chunk: Chunk) -> int:
        """Bytes that a grant of this chunk adds."""
        return 0 if chunk in self.counts else chunk.size_bytes

    def add(self, chunk: Chunk) -> None:
        self.size_bytes += self.extra_bytes(chunk)
        self.counts[chunk] = self.counts.get(chunk, 0) + 1

    def remove(self, chunk: Chunk) -> None:
        self.counts[chunk] -= 1
        if not self.counts[chunk]:
            del self.counts[chunk]
            self.size_bytes -= chunk.size_bytes


class ReadGrants:
    """All grants that have not ended. Each has its own hold on each of its chunks."""

    def __init__(
        self, tier: HostTier, access: ReadAccess, region_address: int, copies: EncodedCopies | None = None
    ) -> None:
        """`region_address` is the start of the tier's memory in this process; `copies` are made for some grants."""
        self._copies = copies
        self._tier = tier
        self._access = access
        self._region_address = region_address
        self._grants: dict[str, ReadGrant] = {}
        self._sessions: dict[str, _Usage] = {}  # by session id, of those that have grants
        self._identities: dict[str, _Usage] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def acquire(
        self, session: PeerSession, chunks: Iterable[Chunk], now: float, ttl_seconds: float
    ) -> ReadGrant | None:
        """Grants the first of `chunks`, as many as the limits allow; None if there are no chunks.

        Raises `Full` if the earlier grants of the session, or of its identity, have reached their limit.
        """
        wanted = list(chunks)
        if not wanted:
            return None
        usages = self._usages(session)
        own, shared = usages
        taken: list[Chunk] = []
        for chunk in wanted:
            fits = (
                own.size_bytes + own.extra_bytes(chunk) <= self._tier.size_bytes // SHARE
                and shared.size_bytes + shared.extra_bytes(chunk) <= self._tier.size_bytes // IDENTITY_SHARE
            )
            if own.grant_count >= MAX_GRANTS or not (fits or not shared.size_bytes):
                break
            taken.append(chunk)
            for usage in usages:
                usage.add(chunk)
        if not taken:
            raise Full("the caller's earlier grants have reached its limit; release some", retry_seconds=FULL_SECONDS)
        grant = ReadGrant(grant_id=new_grant_id(), session=session, chunks=tuple(taken), expire_at=now + ttl_seconds)
        self._tier.hold(taken)
        self._grants[grant.grant_id] = grant
        self._sessions[session.session_id], self._identities[session.identity] = usages
        for usage in usages:
            usage.grant_count += 1
        self._access.open(grant.grant_id, self.runs(taken), reader=session.reader)
        return grant

    async def encode(self, grant: ReadGrant, codec: str) -> None:
        """Makes copies of the chunks of a grant, if the codec is the node's; they are read in place of the chunks.

        If that fails or is cancelled the grant ends: its holder will not learn of it.
        """
        assert self._copies is not None
        try:
            copies = await self._copies.make(grant.chunks, codec)
        except BaseException:
            if grant.grant_id in self._grants:
                self.release(grant)
            raise
        if grant.grant_id not in self._grants:  # it has expired
            self._copies.release(copies.values())
        elif copies:
            grant.copies.update(copies)
            self._access.open(grant.grant_id, self.runs(grant.chunks, copies), reader=grant.session.reader)

    def runs(self, chunks: Iterable[Chunk], copies: Mapping[Chunk, EncodedCopy] = _NO_COPIES) -> list[ByteRange]:
        """The memory of chunks of the tier, or of their copies, in this process."""
        extents = (copies.get(chunk, chunk) for chunk in chunks)
        return [(self._region_address + extent.offset, extent.size_bytes) for extent in extents]

    def get(self, grant_id: str, session: PeerSession | None) -> ReadGrant | None:
        """The grant, if it has not ended and is of this session."""
        grant = self._grants.get(grant_id)
        return grant if grant and grant.session is session else None

    def release(self, grant: ReadGrant) -> None:
        """Ends a grant that has not ended."""
        del self._grants[grant.grant_id]
        self._access.close(grant.grant_id)
        self._tier.unhold(grant.chunks)
        if self._copies is not None:
            self._copies.release(grant.copies.values())
            grant.copies.clear()
        for usage in self._usages(grant.session):
            usage.grant_count -= 1
            for chunk in grant.chunks:
                usage.remove(chunk)
        if not self._sessions[grant.session.session_id].grant_count:
            del self._sessions[grant.session.session_id]
        if not self._identities[grant.session.identity].grant_count:
            del self._identities[grant.session.identity]

    def expire(self, now: float) -> int:
        """Ends the grants that have expired; returns their number."""
        due = [grant for grant in self._grants.values() if grant.expire_at <= now]
        for grant in due:
            self.release(grant)
        return len(due)

    def next_expiry(self) -> float | None:
        """The time when the next grant expires; None if there is none."""
        return min((grant.expire_at for grant in self._grants.values()), default=None)

    def clear(self) -> None:
        """Ends every grant."""
        for grant in list(self._grants.values()):
            self.release(grant)

    def _usages(self, session: PeerSession) -> tuple[_Usage, _Usage]:
        """The usage of the session, and of its identity."""
        return (
            self._sessions.get(session.session_id) or _Usage(),
            self._identities.get(session.identity) or _Usage(),
        )

    def check(self) -> None:
        """Asserts that usages add up and that every granted chunk has a hold for each grant."""
        grants = list(self._grants.values())
        sessions = {grant.session.session_id for grant in grants}
        identities = {grant.session.identity for grant in grants}
        assert (sessions, identities) == (set(self._sessions), set(self._identities))
        for session_id, usage in self._sessions.items():
            self._check(usage, [grant for grant in grants if grant.session.session_id == session_id], SHARE)
            assert usage.grant_count <= MAX_GRANTS
        for identity, usage in self._identities.items():
            self._check(usage, [grant for grant in grants if grant.session.identity == identity], IDENTITY_SHARE)
        granted: dict[int, list[Chunk]] = {}
        for grant in grants:
            for chunk in grant.chunks:
                granted.setdefault(id(chunk), []).append(chunk)
        assert all(chunks[0].holds >= len(chunks) for chunks in granted.values())

    def _check(self, usage: _Usage, own: list[ReadGrant], share: int) -> None:
        assert usage.grant_count == len(own)
        chunks = {chunk for grant in own for chunk in grant.chunks}
        assert set(usage.counts) == chunks
        assert usage.size_bytes == sum(chunk.size_bytes for chunk in chunks)
        assert len(chunks) == 1 or usage.size_bytes <= self._tier.size_bytes // share
