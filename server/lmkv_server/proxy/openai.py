"""The parts of OpenAI's HTTP API that the proxy interprets: paths, errors, and server-sent events. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
"""Anthropic's API."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not set it. A chat completion has no such default."""
_ERROR_TYPES = {404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_body(status: int, message: str) -> bytes:
    """An error in the format of OpenAI's API."""
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


DONE = b"data: [DONE]\n\n"
"""The event that ends a complete stream."""
MAX_EVENT_BYTES = 32 << 20
"""Enough for the token ids of a prompt of millions of tokens."""


class EventTooLong(ValueError):
    """An event exceeds `MAX_EVENT_BYTES`."""


class EventSplitter:
    """Splits received bytes into events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Adds received bytes and returns the events that are complete. Raises `EventTooLong`."""
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
    """The data of an event; empty for a comment, which servers send to keep connections open."""
    return event.removeprefix(b"data:").strip() if event.startswith(b"data:") else b""


def event_of(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
