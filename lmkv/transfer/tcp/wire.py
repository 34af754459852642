"""The protocol of a TCP connection: a hello with the reader's token, then requests for byte ranges under a grant.

    reader   MARK token          count grant (address size)...                    count grant ...
    owner                GRANTED                                 GRANTED bytes...                  REFUSED

The owner answers `REFUSED` if no live grant of this reader covers all ranges; the connection stays open. It closes the
connection of a reader without a valid token or with a protocol error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from lmkv.transfer.access import GRANT_ID_BYTES, TOKEN_BYTES

MARK = b"lmkvtcp2"
HELLO_BYTES = len(MARK) + TOKEN_BYTES
GRANTED = b"\1"
REFUSED = b"\0"
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
HEAD = struct.Struct(f"!I{GRANT_ID_BYTES}s")
"""Number of ranges, and the grant's id."""
RANGE = struct.Struct("!QQ")


def hello(token: bytes) -> bytes:
    """The first bytes of a connection."""
    return MARK + token


def request(grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for ranges under a grant: address in the owner's process, and size."""
    return HEAD.pack(len(ranges), grant_id.encode()) + b"".join(RANGE.pack(address, size) for address, size in ranges)
