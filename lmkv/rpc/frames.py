"""Frames of messages on a stream socket: one byte of kind, four bytes of length, and the message. Pure."""

from __future__ import annotations

import enum
import struct

from lmkv.errors import BadMessage, MessageTooLarge

HEADER = struct.Struct("!BI")
KEEPALIVE_SECONDS = 10.0
"""Time without data after which either side sends a ping."""
KEEPALIVE_TIMEOUT_SECONDS = 5.0
"""Time without an answer to a ping after which the connection is lost."""


class FrameKind(enum.IntEnum):
    """The kind of a frame's content."""

    MESSAGE = 0
    """A protobuf message."""
    STATUS = 1
    """A `google.rpc.Status`: why the server ends the connection."""
    PING = 2
    """Nothing; it is answered with a `PONG`."""
    PONG = 3
    """Nothing."""


def to_frame(kind: FrameKind, payload: bytes, max_bytes: int) -> bytes:
    """The bytes of a frame. Raises `MessageTooLarge` if the payload is."""
    if len(payload) > max_bytes:
        raise MessageTooLarge(f"the message has {len(payload)} bytes; at most {max_bytes} can be sent")
    return HEADER.pack(kind, len(payload)) + payload


class FrameBuffer:
    """Bytes that have arrived, cut into frames. Bounded: holds at most one incomplete frame."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the largest payload."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        """Adds bytes; all complete frames must be taken before the next call."""
        self._buffer += data

    @property
    def wanted_bytes(self) -> int:
        """Size of the payload that is arriving; 0 until its length is known."""
        return HEADER.unpack_from(self._buffer)[1] if len(self._buffer) >= HEADER.size else 0

    def take(self) -> tuple[FrameKind, bytes] | None:
        """The next complete frame, or None.

        Raises `MessageTooLarge` if its payload is, `BadMessage` if what has arrived is no frame.
        """
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        number, size = HEADER.unpack_from(buffer)
        try:
            kind = FrameKind(number)
        except ValueError:
            raise BadMessage(f"frames of kind {number} do not exist; the connection carries something else") from None
        if size > self._max_bytes:
            raise MessageTooLarge(
                f"a frame has {size} bytes; at most {self._max_bytes} are accepted",
                size_bytes=size,
                limit=self._max_bytes,
            )
        end = HEADER.size + size
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return kind, payload
