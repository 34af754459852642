"""An unambiguous encoding of fields that are hashed or signed. Needs no library, so that commands start fast."""

from __future__ import annotations

from collections.abc import Iterable


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """Fields one after the other, each led by its length as little-endian u32: no two lists look alike."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
