"""Admission control: bounds the number, size and duration of concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from lmkv import telemetry
from lmkv.config import ProxyConfig
from lmkv.errors import Full, TooManyRequests, forget_frames
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv.runtime.places import Places, most_of
from lmkv.telemetry.spans import TRACEPARENT
from lmkv_server.http.guard import BodyTooLarge, caller_of, read_body
from lmkv_server.http.json_text import JsonText, NotJson
from lmkv_server.proxy.client_salts import Client, ClientSalts, NotAdmitted
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import Json
from lmkv_server.proxy.response import ResponseWriter
from lmkv_server.proxy.routing.health import NoHealthyEngine
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, forwarded_headers

BODY_TIMEOUT_SECONDS = 30.0
"""Deadline for a request's body. Until it is complete, the request takes no place of others."""
RETRY_AFTER = {"retry-after": "1"}


class InvalidRequest(Exception):
    """The proxy rejects a request without sending it to an engine."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Rejected(Exception):
    """The proxy has no place for the request now."""


class ClientDisconnected(Exception):
    """The client has disconnected before the response was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedRequest:
    """An admitted request with its complete body."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Headers that are forwarded to engines."""
    session: str
    """The value of the session header; empty if there is none."""
    client: Client
    caller: str
    """The caller that shares of the proxy's limits are counted for: a token, or an address."""
    body: JsonText
    writer: ResponseWriter


Serve = Callable[[AdmittedRequest], Awaitable[None]]


def fields_of(request: AdmittedRequest, needed: Container[str]) -> Json:
    """The fields of a request's body, as `JsonText.fields` returns them. Raises `InvalidRequest`."""
    try:
        return request.body.fields(needed)
    except NotJson as error:
        raise InvalidRequest(400, f"the body must be a JSON object: {error}") from None


class Admission:
    """Admits at most `max_concurrent_requests`, each for `request_timeout`, with at most `max_body_size`.

    A request counts from the time when its body is complete, and clients have shares of the limit; see `Places`.
    """

    def __init__(self, config: ProxyConfig, metrics: ProxyMetrics, salts: ClientSalts) -> None:
        self.is_closed = False
        """Whether all requests are rejected, since the proxy is stopping."""
        self._metrics = metrics
        self._places = Places[ResponseWriter](
            "concurrent requests", config.max_concurrent_requests, most_of(config.max_concurrent_requests)
        )
        self._max_body_bytes = config.max_body_bytes
        self._memory = of_process()
        self._timeout_seconds = config.request_timeout
        self._session_header = config.session_header
        self._salts = salts

    async def run(self, serve: Serve, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs `serve` for a request if it is admitted. Sends the client an error for what `serve` raises."""
        request = Request(scope, receive)
        path = request.url.path
        writer = ResponseWriter(send, self._metrics)
        with telemetry.serve_http(request.method, path, request.headers.get(TRACEPARENT, "")) as span:
            outcome = await self._run(serve, request, writer, span.traceparent)
            span.set_http_status(writer.status)
        self._metrics.requests.labels(path, writer.strategy, outcome).inc()

    async def _run(self, serve: Serve, request: Request, writer: ResponseWriter, traceparent: str) -> str:
        """Returns the outcome, a label of the metric."""
        try:
            try:
                await self._admit(serve, request, writer, traceparent)
            except BaseException as error:
                forget_frames(error)  # they have the body, whose memory has been given back
                raise
        except ClientDisconnected:
            return "cancelled"
        except TimeoutError:
            await writer.fail(504, f"the response was not complete within {self._timeout_seconds:g} s")
            return "timeout"
        except NotAdmitted as error:
            await writer.fail(error.status, str(error), error.headers)
            return "refused"
        except Rejected as error:
            await writer.fail(503, f"the proxy does not admit the request: {error}", RETRY_AFTER)
            return "rejected"
        except InvalidRequest as error:
            await writer.fail(error.status, str(error), RETRY_AFTER if error.status == 503 else None)
            return "refused"
        except EngineRejected as error:
            await writer.fail_with(error.response)
            return "refused"
        except EngineFailed as error:
            if error.response:
                await writer.fail_with(error.response)
            else:
                await writer.fail(502, f"no engine could serve the request: {error}")
            return "failed"
        except NoHealthyEngine:
            await writer.fail(503, "no engine is available to serve the request", RETRY_AFTER)
            return "failed"
        return "ok"

    async def _admit(self, serve: Serve, request: Request, writer: ResponseWriter, traceparent: str) -> None:
        """Reads a request and serves it."""
        self._check_open()
        with self._salts.client(request.headers) as client, Lease(self._memory, caller_of(request)) as lease:
            async with asyncio.timeout(self._timeout_seconds):
                headers = client.headers(forwarded_headers(request.headers))
                admitted = AdmittedRequest(
                    method=request.method,
                    path=request.url.path,
                    headers=headers | ({TRACEPARENT: traceparent} if traceparent else {}),
                    session=request.headers.get(self._session_header, ""),
                    client=client,
                    caller=lease.caller,
                    body=await self._read(request, lease),
                    writer=writer,
                )
                with self._place(lease.caller, writer):
                    await _while_connected(partial(serve, admitted), request.receive)

    def _check_open(self) -> None:
        if self.is_closed:
            raise Rejected("it is stopping")

    @contextmanager
    def _place(self, caller: str, writer: ResponseWriter) -> Iterator[None]:
        """A place for a request whose body is complete, of the share of its caller. Raises `Rejected`."""
        self._check_open()
        try:
            self._places.take(writer, caller)
        except Full as error:
            raise Rejected(f"{error} (max_concurrent_requests)") from None
        try:
            yield
        finally:
            self._places.release(writer)

    async def _read(self, request: Request, lease: Lease) -> JsonText:
        """Reads the body. Raises `InvalidRequest` if it is too large or slow, `ClientDisconnected` if it ends early."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await read_body(request, lease, self._max_body_bytes, "max_body_size")
        except BodyTooLarge as error:
            raise InvalidRequest(413, f"the body has {error}") from None
        except TimeoutError:
            raise InvalidRequest(408, f"the body was not complete within {BODY_TIMEOUT_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ClientDisconnected from None
        except TooManyRequests:
            raise InvalidRequest(503, "the bodies of the requests in flight take too much memory") from None
        return body


class AdmissionApp:
    """An ASGI application behind admission control. A class, since Starlette treats functions as request handlers."""

    def __init__(self, admission: Admission, serve: Serve) -> None:
        self._admission = admission
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._admission.run(self._serve, scope, receive, send)


async def _while_connected(work: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Does `work`. Cancels it and raises `ClientDisconnected` when the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> None:
        await work()

    working, waiting = asyncio.create_task(run()), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
