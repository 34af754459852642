"""Lets requests in, as many as there is room for, and sees to it that each has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from lmkv import telemetry
from lmkv.telemetry.spans import TRACEPARENT
from lmkv_server.http.bodies import drain
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream.client import EngineFailed, Refused, passed_on
from lmkv_server.proxy.upstream.failover import NoEngine
from lmkv_server.proxy.upstream.reply import Reply

BODY_TIMEOUT_SECONDS = 30.0
"""Most time for a request's body: it has its place among those that are let in."""
RETRY_AFTER = {"retry-after": "1"}


class Refusal(Exception):
    """A request that no engine is asked about."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedRequest:
    """A request that was let in, read whole."""

    method: str
    path: str
    headers: Mapping[str, str]
    """As engines get them."""
    session: str
    """The value of the session header; empty if there is none."""
    body: bytes
    reply: Reply


Serve = Callable[[AdmittedRequest], Awaitable[None]]


class Admission:
    """Counts who is in. At most `limit` are, each for `timeout_seconds`, with a body of `max_body_bytes`."""

    def __init__(
        self,
        statistics: Statistics,
        metrics: Metrics,
        *,
        limit: int,
        max_body_bytes: int,
        timeout_seconds: float,
        session_header: str,
    ) -> None:
        self.is_closing = False
        """Whether nobody is let in any more, since the proxy is about to stop."""
        self._statistics = statistics
        self._metrics = metrics
        self._limit = limit
        self._count = 0
        self._max_body_bytes = max_body_bytes
        self._timeout_seconds = timeout_seconds
        self._session_header = session_header

    async def admit(self, serve: Serve, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request by `serve`, if it is let in. What `serve` raises is told to the client."""
        request = Request(scope, receive)
        path = request.url.path
        reply = Reply(send, self._statistics, self._metrics)
        with telemetry.serve_http(request.method, path, request.headers.get(TRACEPARENT, "")) as span:
            outcome = await self._answer(serve, request, reply, span.traceparent)
            span.set_http_status(reply.status)
        self._metrics.requests.labels(path, reply.way, outcome).inc()

    async def _answer(self, serve: Serve, request: Request, reply: Reply, traceparent: str) -> str:
        """Returns how it ended, in a word."""
        if self.is_closing or self._count >= self._limit:
            why = "it is about to stop" if self.is_closing else "it has as many requests as it may have"
            await reply.fail(503, f"the proxy takes no request now: {why}", RETRY_AFTER)
            return "rejected"
        self._count += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                visit = AdmittedRequest(
                    method=request.method,
                    path=request.url.path,
                    headers=passed_on(request.headers) | ({TRACEPARENT: traceparent} if traceparent else {}),
                    session=request.headers.get(self._session_header, ""),
                    body=await self._read(request),
                    reply=reply,
                )
                await _while_connected(serve(visit), request.receive)
        except ClientGone:
            return "cancelled"
        except TimeoutError:
            await reply.fail(504, f"no answer within {self._timeout_seconds:g} s")
            return "timeout"
        except Refusal as error:
            await reply.fail(error.status, str(error))
            return "refused"
        except Refused as error:
            await reply.refuse(error.answer)
            return "refused"
        except EngineFailed as error:
            await (reply.refuse(error.answer) if error.answer else reply.fail(502, f"no engine answers: {error}"))
            return "failed"
        except NoEngine:
            await reply.fail(503, "no engine is there to take the request", RETRY_AFTER)
            return "failed"
        finally:
            self._count -= 1
        return "ok"

    async def _read(self, request: Request) -> bytes:
        """The body of a request. Raises `Refusal` if it is too long or too slow, `ClientGone` if it breaks off."""
        chunks: list[bytes] = []
        size = 0
        stream = request.stream()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                async for chunk in stream:
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        chunks.clear()
                        await drain(stream)
                        raise Refusal(413, f"the body has more than {self._max_body_bytes} bytes; see max_body_size")
        except TimeoutError:
            raise Refusal(408, f"no body within {BODY_TIMEOUT_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ClientGone from None
        return b"".join(chunks)


class AdmissionApp:
    """An ASGI application behind the door. It is no function: Starlette would take that for a plain handler."""

    def __init__(self, door: Admission, serve: Serve) -> None:
        self._door = door
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.admit(self._serve, scope, receive, send)


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Does it; gives it up, and raises `ClientGone`, once the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def done() -> None:
        await work

    working, leaving = asyncio.create_task(done()), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
