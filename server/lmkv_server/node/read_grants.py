"""Leaves to read that peers were given: which chunks stay in place for whom, and until when. Pure; for PeerService.

acquire ──► granted ──┬── release ──► ended        Each grant ends exactly once, and its holds with it.
                      └── expire  ──► ended
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmkv.errors import Full
from lmkv_server.node.host_tier import Chunk, HostTier

MAX_GRANTS = 64
"""Most grants that one peer may have at a time."""
SHARE = 4
"""One peer's grants keep at most one part in so many of the tier in place, but always one chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadGrant:
    """Leave to read some chunks for a while."""

    grant_id: str
    peer_id: str
    chunks: tuple[Chunk, ...]
    expire_at: float
    """On the clock that `acquire` was given the time of."""


class ReadGrants:
    """All grants that are in force. Every hold it takes on a chunk is its own, and ended by it."""

    def __init__(self, tier: HostTier) -> None:
        self.expired_count = 0
        """Grants that nobody released in time, since the start."""
        self._tier = tier
        self._grants: dict[str, ReadGrant] = {}
        self._bytes: dict[str, int] = {}  # by peer, of those that have grants
        self._counts: dict[str, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._grants)

    def acquire(self, peer_id: str, chunks: Iterable[Chunk], now: float, ttl_seconds: float) -> ReadGrant | None:
        """Grants the first of `chunks`, as many as the peer's share allows; None if there are no chunks.

        Raises `Full` if the peer's earlier grants take all of its share.
        """
        taken: list[Chunk] = []
        held_bytes = self._bytes.get(peer_id, 0)
        wanted = list(chunks)
        if not wanted:
            return None
        for chunk in wanted:
            if held_bytes and held_bytes + chunk.size_bytes > self._tier.size_bytes // SHARE:
                break
            taken.append(chunk)
            held_bytes += chunk.size_bytes
        if not taken or self._counts.get(peer_id, 0) >= MAX_GRANTS:
            raise Full(f"the earlier grants of {peer_id!r} take all it may have; release some", retry_seconds=0.02)
        self._serial += 1
        grant = ReadGrant(
            grant_id=f"r{self._serial}", peer_id=peer_id, chunks=tuple(taken), expire_at=now + ttl_seconds
        )
        self._tier.hold(taken)
        self._grants[grant.grant_id] = grant
        self._bytes[peer_id] = held_bytes
        self._counts[peer_id] = self._counts.get(peer_id, 0) + 1
        return grant

    def get(self, grant_id: str) -> ReadGrant | None:
        """The grant, if it is in force."""
        return self._grants.get(grant_id)

    def release(self, grant_id: str) -> bool:
        """Ends a grant; whether it was still in force."""
        grant = self._grants.pop(grant_id, None)
        if grant is None:
            return False
        self._tier.unhold(grant.chunks)
        self._bytes[grant.peer_id] -= sum(chunk.size_bytes for chunk in grant.chunks)
        self._counts[grant.peer_id] -= 1
        if not self._counts[grant.peer_id]:
            del self._bytes[grant.peer_id], self._counts[grant.peer_id]
        return True

    def expire(self, now: float) -> int:
        """Ends the grants whose time is up; their count."""
        due = [grant.grant_id for grant in self._grants.values() if grant.expire_at <= now]
        for grant_id in due:
            self.release(grant_id)
        self.expired_count += len(due)
        return len(due)

    def next_expiry(self) -> float | None:
        """When the next grant expires; None if there is none."""
        return min((grant.expire_at for grant in self._grants.values()), default=None)

    def clear(self) -> None:
        """Ends every grant."""
        for grant_id in list(self._grants):
            self.release(grant_id)

    def check(self) -> None:
        """Asserts that shares add up and that every granted chunk is held at least as often as it is granted."""
        peers = {grant.peer_id for grant in self._grants.values()}
        assert peers == set(self._bytes) == set(self._counts)
        for peer in peers:
            own = [grant for grant in self._grants.values() if grant.peer_id == peer]
            assert self._counts[peer] == len(own) <= MAX_GRANTS
            sizes = [chunk.size_bytes for grant in own for chunk in grant.chunks]
            assert self._bytes[peer] == sum(sizes)
            assert len(sizes) == 1 or sum(sizes) <= self._tier.size_bytes // SHARE
        granted: dict[int, list[Chunk]] = {}
        for grant in self._grants.values():
            for chunk in grant.chunks:
                granted.setdefault(id(chunk), []).append(chunk)
        assert all(chunks[0].holds >= len(chunks) for chunks in granted.values())
