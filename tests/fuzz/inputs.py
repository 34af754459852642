"""How fuzz targets read structured values from bytes, and how their seeds are written."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<H")


class Input:
    """Reads values from the bytes of one input. A value beyond the end is zero or empty: no input is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything was read."""
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes, fewer at the end."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def byte(self) -> int:
        """The next byte."""
        return int.from_bytes(self.take(1), "little")

    def frame(self) -> bytes:
        """The next bytes whose length is written before them."""
        return self.take(int.from_bytes(self.take(_LENGTH.size), "little"))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def calls(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """A number and a frame each, at most `limit` of them: the method of a call and its message."""
        for _ in range(limit):
            if self.is_empty:
                return
            yield self.byte(), self.frame()


def frame(data: bytes) -> bytes:
    """What `Input.frame` reads as these bytes."""
    return _LENGTH.pack(len(data)) + data


def calls(*parts: tuple[int, bytes]) -> bytes:
    """What `Input.calls` reads as these parts."""
    return b"".join(bytes([number]) + frame(data) for number, data in parts)
