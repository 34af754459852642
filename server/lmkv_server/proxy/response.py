"""Sends the response to a client: complete, or as a stream of events. Measures its latencies, and counts its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from starlette.types import Send

from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import DONE, data_of, error_body, event_of
from lmkv_server.proxy.upstream.client import HttpResponse

MAX_TOKENS = 1024
"""Maximum number of tokens that one event counts as. An engine may report any number."""


class _Delta(msgspec.Struct, gc=False):
    role: msgspec.Raw = msgspec.Raw()
    content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _TokenUsage(msgspec.Struct, gc=False):
    completion_tokens: int = 0


class _StreamEvent(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] = ()
    usage: _TokenUsage | None = None


_decode = msgspec.json.Decoder(_StreamEvent).decode
"""Decodes these fields and skips the others."""


class TokenCounter:
    """Counts the tokens of one stream, event by event."""

    def __init__(self) -> None:
        self._sum = 0
        """Tokens so far, by the engine's own count if it reports one."""

    def count(self, event: bytes) -> int:
        """The number of tokens in the event: by the engine's count, else by token ids, else one per choice with text.

        The first event of a chat, which has only a role, and the last one, which has only the usage, have none. Events
        of the Responses and the Messages API have names; those with a part of the output count as one token.
        """
        if event.startswith(b"event:"):
            name = event.partition(b"\n")[0].strip()
            return int(name.endswith(b"delta") and not name.endswith(b"message_delta"))
        try:
            event_content = _decode(data_of(event))
        except (msgspec.DecodeError, UnicodeDecodeError):  # it is forwarded nevertheless
            return 0
        if not event_content.choices:
            return 0
        if event_content.usage is not None:
            count = max(event_content.usage.completion_tokens - self._sum, 0)
        else:
            count = sum(map(_tokens_in, event_content.choices))
        self._sum += count
        return min(count, MAX_TOKENS)


def _tokens_in(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None or delta.content or delta.reasoning or not delta.role or choice.finish_reason:
        return 1
    return int(bool(delta.tool_calls) and bytes(delta.tool_calls) not in (b"null", b"[]"))


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
ERROR_TIMEOUT_SECONDS = 5.0
"""Deadline for sending an error: the deadline of the request has passed by then."""


class ResponseWriter:
    """Sends one response. What cannot be sent is discarded: the client has disconnected."""

    def __init__(self, send: Send, metrics: ProxyMetrics) -> None:
        self.strategy = "none"
        """The way in which engines share a request: `continue`, `repeat` or `alone`; `none` until it is decided."""
        self.status = 0
        """The status that was sent; 0 before the response has started."""
        self._send = send
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last: float | None = None
        """The time at which the last token was sent; None before the first."""
        self._tokens = TokenCounter()

    @property
    def has_token(self) -> bool:
        """Whether a token has been sent."""
        return self._last is not None

    async def send(self, response: HttpResponse, *, is_timed: bool = True) -> None:
        """Sends a complete response; nothing else may be sent before or after it. `is_timed` measures its latency."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
        headers.append((b"content-length", str(len(response.body)).encode()))
        is_timed = is_timed and response.status == 200
        if is_timed:
            self._record_tokens(1)
        await self._start(response.status, headers)
        await self._send({"type": "http.response.body", "body": response.body})
        if is_timed:
            self._record_total()

    async def send_event(self, event: bytes) -> None:
        """Sends the next event of the stream. The first event starts the response."""
        if not self.status:
            await self._start(200, _STREAM_HEADERS)
        if count := self._tokens.count(event):
            self._record_tokens(count)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
        self._record_total()

    async def fail(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Sends an error in OpenAI's format, as `fail_with` does."""
        all_headers = {"content-type": "application/json", **(headers or {})}
        await self.fail_with(HttpResponse(status=status, body=error_body(status, message), headers=all_headers))

    async def fail_with(self, response: HttpResponse) -> None:
        """Sends an error as the response, or as the last event of a stream that has started.

        Gives up after `ERROR_TIMEOUT_SECONDS` if the client does not read.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(ERROR_TIMEOUT_SECONDS):
                if not self.status:
                    await self.send(response)
                    return
                for event in (event_of(response.body.replace(b"\n", b" ")), DONE):
                    await self._send({"type": "http.response.body", "body": event, "more_body": True})
                await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _record_tokens(self, count: int) -> None:
        """Records the latency of tokens that are sent together. They share the time since the previous event."""
        now = time.perf_counter()
        if self._last is None:
            self._metrics.latencies.record_first_token(now - self._arrival)
            self._metrics.first_token_seconds.observe(now - self._arrival)
        else:
            seconds = (now - self._last) / count
            for _ in range(count):
                self._metrics.latencies.record_inter_token(seconds)
                self._metrics.inter_token_seconds.observe(seconds)
        self._last = now

    def _record_total(self) -> None:
        seconds = time.perf_counter() - self._arrival
        self._metrics.latencies.record_total(seconds)
        self._metrics.request_seconds.observe(seconds)
