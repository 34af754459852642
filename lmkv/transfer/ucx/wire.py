"""What the two ends of a UCX connection say. Words go by UCX's streams, bytes by its tags, which the reader chooses.

    reader   HELLO token     tag count grant (address size)...                              tag count grant ...
    owner                                                        GRANTED (tag), run (tag + 1), run (tag + 2), ...

Instead of `GRANTED` an owner that refuses closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from lmkv.transfer.access import GRANT_ID_BYTES, TOKEN_BYTES

HELLO = b"lmkvucx2"
HELLO_BYTES = len(HELLO) + TOKEN_BYTES
GRANTED = b"\1"
MAX_RANGES = 4096
"""Most runs of bytes in one request."""
HEAD = struct.Struct(f"!QI{GRANT_ID_BYTES}s")
RANGE = struct.Struct("!QQ")


def request(tag: int, grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Asks for runs of bytes under a grant: address in the owner's process, and size."""
    return HEAD.pack(tag, len(ranges), grant_id.encode()) + b"".join(
        RANGE.pack(address, size) for address, size in ranges
    )
