"""What a client gets: one answer, or a stream of events; timed on its way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from starlette.types import Send

from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream.client import Answer
from lmkv_server.proxy.upstream.events import DONE, event_of
from lmkv_server.proxy.upstream.tokens import TokenCount

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
LAST_WORD_SECONDS = 5.0
"""Most time to tell a client what went wrong: its request has no other bound by then."""
_KINDS = {404: "NotFoundError", 503: "ServiceUnavailableError"}


class Reply:
    """Sends one answer, whole or in events. What cannot be sent any more is dropped: the client is gone."""

    def __init__(self, send: Send, statistics: Statistics, metrics: Metrics) -> None:
        self.way = "none"
        """How the request went through the engines."""
        self.status = 0
        """What the answer began with; 0 before it has."""
        self._send = send
        self._statistics = statistics
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last: float | None = None
        """When the last token left; None before the first."""
        self._tokens = TokenCount()

    async def answer(self, answer: Answer) -> None:
        """The whole answer. It is the first and the last that is sent."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
        headers.append((b"content-length", str(len(answer.body)).encode()))
        if answer.status == 200:
            self._time_tokens(1)
        await self._begin(answer.status, headers)
        await self._send({"type": "http.response.body", "body": answer.body})
        if answer.status == 200:
            self._time_whole()

    async def event(self, event: bytes) -> None:
        """The next event of the stream, which begins with the first."""
        if not self.status:
            await self._begin(200, _STREAM_HEADERS)
        if count := self._tokens.of(event):
            self._time_tokens(count)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """Ends the stream."""
        await self._send({"type": "http.response.body", "body": b""})
        self._time_whole()

    async def fail(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Tells what went wrong in OpenAI's way: as the answer, or as the last event of a stream that has begun."""
        told = {"content-type": "application/json", **(headers or {})}
        await self.refuse(Answer(status=status, body=error_body(status, message), headers=told))

    async def refuse(self, answer: Answer) -> None:
        """The same in an engine's own words. A client that takes no more gets none of it, and is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_SECONDS):
                if not self.status:
                    await self.answer(answer)
                    return
                for event in (event_of(answer.body.replace(b"\n", b" ")), DONE):
                    await self._send({"type": "http.response.body", "body": event, "more_body": True})
                await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _time_tokens(self, count: int) -> None:
        """Times tokens that leave together: the first of the answer, or each since the event before."""
        now = time.perf_counter()
        if self._last is None:
            self._statistics.first(now - self._arrival)
            self._metrics.first_token_seconds.observe(now - self._arrival)
        else:
            seconds = (now - self._last) / count
            for _ in range(count):
                self._statistics.between(seconds)
                self._metrics.inter_token_seconds.observe(seconds)
        self._last = now

    def _time_whole(self) -> None:
        seconds = time.perf_counter() - self._arrival
        self._statistics.whole(seconds)
        self._metrics.request_seconds.observe(seconds)


def error_body(status: int, message: str) -> bytes:
    """An error as OpenAI's clients understand it."""
    kind = _KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
