"""A completion request of a client. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmkv_server.proxy.openai import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A completion or chat completion request."""

    path: str
    body: Json
    """Without handoff parameters, which only the proxy sets."""
    headers: Mapping[str, str]
    """As they are forwarded to engines."""
    session: str = ""

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream of events."""
        return bool(self.body.get("stream"))
