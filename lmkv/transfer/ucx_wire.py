"""What the two ends of a UCX connection say. Words go by UCX's streams, bytes by its tags, which the reader chooses.

    reader   HELLO token     tag count (address size)...                              tag count ...
    owner                                                  GRANTED (tag), run (tag + 1), run (tag + 2), ...

Instead of `GRANTED` an owner that refuses closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

HELLO = b"lmkvucx1"
TOKEN_BYTES = 32
HELLO_BYTES = len(HELLO) + TOKEN_BYTES
GRANTED = b"\1"
MAX_RANGES = 4096
"""Most runs of bytes in one request."""
HEAD = struct.Struct("!QI")
RANGE = struct.Struct("!QQ")


def request(tag: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Asks for runs of bytes: address in the owner's process, and size."""
    return HEAD.pack(tag, len(ranges)) + b"".join(RANGE.pack(address, size) for address, size in ranges)
