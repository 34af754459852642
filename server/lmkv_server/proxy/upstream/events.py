"""Server-sent events, as OpenAI's streams are made of them. No IO."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
"""What ends a stream that is whole."""
MAX_EVENT_BYTES = 32 << 20
"""Room for the ids of a prompt of millions of tokens."""


class EventTooLong(ValueError):
    """An event does not end where it must."""


class Splitter:
    """Splits bytes as they come into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """The events that are whole by now. Raises `EventTooLong`."""
        begin = max(len(self._buffer) - 1, 0)
        self._buffer += received
        events = []
        while (end := self._buffer.find(b"\n\n", begin)) >= 0:
            events.append(bytes(self._buffer[: end + 2]))
            del self._buffer[: end + 2]
            begin = 0
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return events


def data_of(event: bytes) -> bytes:
    """What an event carries; empty for a comment, with which servers keep connections open."""
    return event.removeprefix(b"data:").strip() if event.startswith(b"data:") else b""


def event_of(data: bytes) -> bytes:
    """An event that carries this."""
    return b"data: " + data + b"\n\n"
