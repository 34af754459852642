"""What an instance holds, as a shared map keeps it: one record of 37 bytes for each chunk. Pure.

    tier (1) | fingerprint (16, zeros for none) | chunk key (16) | tokens (4, little-endian)
    '---------------- field of the hash ------------------------'  '------- value ---------'

Tokens are always told: who reads them may not know the chunk's spec yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from lmkv.keys import KEY_BYTES

FINGERPRINT_BYTES = 16
PLACE_BYTES = 1 + FINGERPRINT_BYTES
FIELD_BYTES = PLACE_BYTES + KEY_BYTES
RECORD_BYTES = FIELD_BYTES + 4
OPENING = bytes(RECORD_BYTES)
"""The record that every hash begins with, of no chunk: a hash without it was lost."""

_TOKENS = struct.Struct("<I")


class Change(msgspec.Struct, array_like=True, frozen=True):
    """What one instance gained, then what it lost, in one tier; the words are those of `LayoutMap.apply`."""

    tier: int
    fingerprint: bytes
    chunk_size: int
    admitted: bytes
    partial_token_counts: dict[int, int]
    evicted: bytes

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return len(self.admitted) + len(self.evicted) + 16 * len(self.partial_token_counts) + 64

    @property
    def place(self) -> bytes:
        """What the fields of its chunks begin with."""
        return bytes([self.tier]) + self.fingerprint.ljust(FINGERPRINT_BYTES, b"\0")

    @property
    def tokens(self) -> bytes:
        """The values of its admitted chunks; a single one if they are all the same."""
        if not self.partial_token_counts:
            return _TOKENS.pack(self.chunk_size)
        counts = [self.chunk_size] * (len(self.admitted) // KEY_BYTES)
        for index, tokens in self.partial_token_counts.items():
            counts[index] = tokens
        return struct.pack(f"<{len(counts)}I", *counts)


def admissions(records: bytes) -> Iterator[Change]:
    """The chunks that are in some records, those of the same kind together. Raises `ValueError` for anything else."""
    if len(records) % RECORD_BYTES:
        raise ValueError(f"{len(records)} bytes are no records")
    kinds: dict[tuple[bytes, bytes], list[bytes]] = {}
    for at in range(0, len(records), RECORD_BYTES):
        kind = records[at : at + PLACE_BYTES], records[at + FIELD_BYTES : at + RECORD_BYTES]
        kinds.setdefault(kind, []).append(records[at + PLACE_BYTES : at + FIELD_BYTES])
    for (place, tokens), keys in kinds.items():
        if place[0]:  # else it is the opening
            fingerprint = place[1:] if any(place[1:]) else b""
            yield Change(place[0], fingerprint, _TOKENS.unpack(tokens)[0], b"".join(keys), {}, b"")
