"""An unambiguous encoding of fields that are hashed or signed. Imports no library, so that commands start fast."""

from __future__ import annotations

from collections.abc import Iterable


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """The concatenated fields, each preceded by its length as little-endian u32: different lists differ."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
