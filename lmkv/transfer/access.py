"""Access control of the local pool: which peer may read which extents.

`PeerService` admits readers and opens grants, on the event loop. The servers of `tcp` and `ucx` check each read, in
threads of their own. `shm`, `nixl` and `mooncake` cannot check: readers access the memory themselves.
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
"""Length of a grant's id: 128 random bits in hexadecimal."""

ByteRange = tuple[int, int]
"""Address in the owner's process, and size in bytes."""


def new_grant_id() -> str:
    """A random id that cannot be guessed."""
    return secrets.token_hex(GRANT_ID_BYTES // 2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerReader:
    """One peer that may connect to this node's channels."""

    peer_name: str
    """`instance_id:epoch`, as the peer states it."""
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    """The secret that it sends when it connects."""


@dataclass(frozen=True, slots=True)
class _OpenGrant:
    """The extents of one grant, sorted by address."""

    starts: Sequence[int]
    ends: Sequence[int]
    reader: PeerReader | None
    peer_name: str

    def is_for(self, reader: PeerReader) -> bool:
        return self.reader is reader or (self.reader is None and self.peer_name == reader.peer_name)

    def contains(self, address: int, size_bytes: int) -> bool:
        index = bisect_right(self.starts, address) - 1
        return index >= 0 and size_bytes >= 0 and address + size_bytes <= self.ends[index]


class ReadAccess:
    """The readers and grants of one pool. `find` and `check` may be called on any thread."""

    def __init__(self) -> None:
        self.refused_count = 0
        """Number of reads refused because no live grant of the reader covered them."""
        self._readers: dict[bytes, PeerReader] = {}  # by digest, so that the duration of a lookup reveals nothing
        self._grants: dict[bytes, _OpenGrant] = {}
        self._lock = threading.Lock()

    def admit(self, peer_name: str) -> PeerReader:
        """Admits a reader, until `revoke`. It cannot read anything before a grant is opened."""
        reader = PeerReader(peer_name=peer_name)
        self._readers[_digest(reader.token)] = reader
        return reader

    def revoke(self, reader: PeerReader) -> None:
        """Refuses further connections of a reader. Idempotent."""
        self._readers.pop(_digest(reader.token), None)

    def open(
        self, grant_id: str, ranges: Iterable[ByteRange], *, reader: PeerReader | None = None, peer_name: str = ""
    ) -> None:
        """Permits reads of these ranges under a grant, until `close`.

        They are for `reader`; without one, for the reader named `peer_name` that knows the grant's id.
        """
        ordered = sorted(ranges)
        starts, ends = [start for start, _ in ordered], [start + size for start, size in ordered]
        self._grants[grant_id.encode()] = _OpenGrant(starts, ends, reader, peer_name)

    def close(self, grant_id: str) -> None:
        """Closes a grant. A read that has begun may still be sent. Idempotent."""
        self._grants.pop(grant_id.encode(), None)

    def find(self, token: bytes) -> PeerReader | None:
        """The reader with this token."""
        return self._readers.get(_digest(token))

    def check(self, reader: PeerReader, grant_id: bytes, ranges: Iterable[ByteRange]) -> bool:
        """Whether a live grant of this reader covers all ranges; a refusal is counted."""
        grant = self._grants.get(grant_id)
        if grant and grant.is_for(reader) and all(grant.contains(address, size) for address, size in ranges):
            return True
        with self._lock:
            self.refused_count += 1
        return False


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
