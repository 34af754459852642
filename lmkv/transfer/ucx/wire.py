"""The protocol of a UCX connection. Requests use UCX streams; bytes use tags, which the reader chooses.

    reader   HELLO token     tag count grant (address size)...                              tag count grant ...
    owner                                                        GRANTED (tag), range (tag + 1), range (tag + 2), ...

To refuse, the owner closes the connection instead of sending `GRANTED`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from lmkv.transfer.access import GRANT_ID_BYTES, TOKEN_BYTES

HELLO = b"lmkvucx2"
HELLO_BYTES = len(HELLO) + TOKEN_BYTES
GRANTED = b"\1"
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
HEAD = struct.Struct(f"!QI{GRANT_ID_BYTES}s")
RANGE = struct.Struct("!QQ")


def request(tag: int, grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for ranges under a grant: address in the owner's process, and size."""
    return HEAD.pack(tag, len(ranges), grant_id.encode()) + b"".join(
        RANGE.pack(address, size) for address, size in ranges
    )
