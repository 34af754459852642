"""What the two ends of a TCP connection say: a hello with the token, then requests for runs of bytes.

    reader   MARK token          count (address size)...            count ...
    owner                GRANTED                          GRANTED bytes...     GRANTED bytes...

Instead of `GRANTED` an owner that refuses closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

MARK = b"lmkvtcp1"
TOKEN_BYTES = 32
HELLO_BYTES = len(MARK) + TOKEN_BYTES
GRANTED = b"\1"
MAX_RANGES = 4096
"""Most runs of bytes in one request."""
COUNT = struct.Struct("!I")
RANGE = struct.Struct("!QQ")


def hello(token: bytes) -> bytes:
    """The first bytes of a connection."""
    return MARK + token


def request(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Asks for runs of bytes: address in the owner's process, and size."""
    return COUNT.pack(len(ranges)) + b"".join(RANGE.pack(address, size) for address, size in ranges)
