"""A completion request of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lmkv.runtime import turns
from lmkv_server.proxy.openai import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A completion or chat completion request."""

    path: str
    body: Json
    """Without handoff parameters, which only the proxy sets."""
    size_bytes: int
    """That of the body, as the client has sent it."""
    headers: Mapping[str, str]
    """As they are forwarded to engines."""
    caller: str
    """Who has shares of the proxy's limits: a token, or an address."""
    session: str = ""

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream of events."""
        return bool(self.body.get("stream"))

    async def encode(self, body: Json) -> bytes:
        """The body that an engine receives, made of the client's. A large one waits for its turn."""
        async with turns.of_loop().take(self.caller, self.size_bytes):
            return msgspec.json.encode(body)
