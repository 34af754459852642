"""Which peer may read which extents of the own pool now.

`PeerService` admits readers and opens grants, on the event loop. The owners' ends of `tcp` and `ucx` ask before they
send, on threads of their own. `shm`, `nixl` and `mooncake` do not ask: their readers read by themselves.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TOKEN_BYTES = 32
GRANT_ID_BYTES = 32
"""Characters of a grant's id: 128 random bits in hexadecimal."""

ByteRange = tuple[int, int]
"""Bytes in the owner's process: address and size."""


def new_grant_id() -> str:
    """An id that cannot be guessed."""
    return secrets.token_hex(GRANT_ID_BYTES // 2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerReader:
    """One peer that may connect to this node's channels."""

    peer_name: str
    """`instance_id:epoch`, as the peer states it."""
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    """What it shows when it connects."""


@dataclass(frozen=True, slots=True)
class _OpenGrant:
    """The extents of one grant, in order of their addresses."""

    starts: Sequence[int]
    ends: Sequence[int]
    reader: PeerReader | None
    peer_name: str

    def is_for(self, reader: PeerReader) -> bool:
        return self.reader is reader or (self.reader is None and self.peer_name == reader.peer_name)

    def holds(self, address: int, size_bytes: int) -> bool:
        place = bisect_right(self.starts, address) - 1
        return place >= 0 and size_bytes >= 0 and address + size_bytes <= self.ends[place]


class ReadAccess:
    """The readers and grants of one pool. `find` and `check` may be called on any thread."""

    def __init__(self) -> None:
        self.refused_count = 0
        """Reads refused since the start, because no live grant of the reader covered them."""
        self._readers: dict[bytes, PeerReader] = {}  # by digest: how long a search takes says nothing about a token
        self._grants: dict[bytes, _OpenGrant] = {}
        self._lock = threading.Lock()

    def admit(self, peer_name: str) -> PeerReader:
        """Admits a reader, until `revoke`. It may read nothing yet."""
        reader = PeerReader(peer_name=peer_name)
        self._readers[_digest(reader.token)] = reader
        return reader

    def revoke(self, reader: PeerReader) -> None:
        """Admits no further connection of a reader. Idempotent."""
        self._readers.pop(_digest(reader.token), None)

    def open(
        self, grant_id: str, ranges: Iterable[ByteRange], *, reader: PeerReader | None = None, peer_name: str = ""
    ) -> None:
        """Permits reads of these ranges under a grant, until `close`.

        They are for `reader`; without one, for the reader that calls itself `peer_name` and knows the grant's id.
        """
        ordered = sorted(ranges)
        starts, ends = [start for start, _ in ordered], [start + size for start, size in ordered]
        self._grants[grant_id.encode()] = _OpenGrant(starts, ends, reader, peer_name)

    def close(self, grant_id: str) -> None:
        """Ends the permission. A read that has begun may still be sent. Idempotent."""
        self._grants.pop(grant_id.encode(), None)

    def find(self, token: bytes) -> PeerReader | None:
        """The reader with this token."""
        return self._readers.get(_digest(token))

    def check(self, reader: PeerReader, grant_id: bytes, ranges: Iterable[ByteRange]) -> bool:
        """Whether a live grant of this reader covers all of the ranges; counts it if not."""
        grant = self._grants.get(grant_id)
        if grant and grant.is_for(reader) and all(grant.holds(address, size) for address, size in ranges):
            return True
        with self._lock:
            self.refused_count += 1
        return False


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
