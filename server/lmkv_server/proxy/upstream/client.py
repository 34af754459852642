"""HTTP client of engines. No other module imports aiohttp."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from lmkv.runtime.reload import Reloadable
from lmkv_server.http.json_text import Encoded
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.openai import EventSplitter, EventTooLong, Json

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
PART_BYTES = 64 << 10
"""Bytes of a large body that are sent at a time."""
KEEP_ALIVE_SECONDS = 2.0
"""vLLM closes connections that were idle for 5 s; an older one may be closed at the moment it is used."""
MAX_RESPONSE_BYTES = 256 << 20
"""Maximum size of a response that is not streamed: enough for the ids and logprobs of the longest prompts."""
_DROPPED_HEADERS = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "content-type", "expect", "host", "keep-alive"),
        *("proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Request headers that belong to one connection, or that the proxy sets itself."""
_RETURNED_HEADERS = ("content-type", "retry-after", "www-authenticate", "x-request-id")
"""Headers of an engine's response that the client receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """A complete response, of an engine or of the proxy."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


class EngineFailed(Exception):
    """An engine failed to serve a request. Another engine may succeed."""

    def __init__(self, engine: Engine, reason: str, response: HttpResponse | None = None) -> None:
        super().__init__(f"{engine.url}: {reason}")
        self.reason = reason
        self.response = response
        """The engine's error response, if it sent one."""
        self.is_final = False
        """Whether the request cannot be repeated on another engine."""


class EngineRejected(Exception):
    """An engine rejected a request as invalid. Every engine would."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


def open_session() -> aiohttp.ClientSession:
    """A connection pool for all engines. Admission bounds the number of connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ttl_dns_cache=10)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # each request has its own deadline
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's request that engines receive, such as credentials, trace and request id."""
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED_HEADERS}


@dataclass(frozen=True, slots=True)
class Upstream:
    """The connections to all engines."""

    session: aiohttp.ClientSession
    contexts: Reloadable[ssl.SSLContext]
    """TLS for engines whose URL is https."""


class UpstreamClient:
    """Sends requests to one engine. A request that ends before its response is read closes its connection."""

    def __init__(self, engine: Engine, upstream: Upstream) -> None:
        self.engine = engine
        self._upstream = upstream
        self._timeouts: set[asyncio.Timeout] = set()

    def cancel_requests(self) -> None:
        """Ends all requests in flight with `EngineFailed`, so that their callers can use another engine."""
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(now)

    def mark_unhealthy(self, reason: str) -> None:
        """Excludes the engine from requests until it is healthy. Logs a change."""
        if self.engine.mark_unhealthy(reason):
            logger.warning("%s engine %s is unhealthy: %s", self.engine.role, self.engine.url, reason)

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: Encoded | None = None
    ) -> HttpResponse:
        """Returns the complete response. Raises `EngineRejected` or `EngineFailed`."""
        async with self._open(method, path, headers, body) as response:
            return _complete(response, await self._read(response))

    @asynccontextmanager
    async def stream(self, path: str, headers: Mapping[str, str], body: Encoded) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yields the events of the response as they arrive. Raises `EngineRejected` or `EngineFailed` at any time."""
        async with self._open("POST", path, headers, body) as response:
            yield _events(response)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, headers: Mapping[str, str], body: Encoded | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        own = {"Accept-Encoding": "identity"} | ({"Content-Type": "application/json"} if body is not None else {})
        pieces = [body or b""] if body is None or isinstance(body, bytes) else body
        size_bytes = sum(map(len, pieces))
        is_large = size_bytes > PART_BYTES
        if is_large:
            own["Content-Length"] = str(size_bytes)
        with self._translate_errors():
            async with asyncio.timeout(None) as timeout:
                self._timeouts.add(timeout)
                try:
                    async with self._upstream.session.request(
                        method,
                        self.engine.url + path,
                        data=_in_parts(pieces) if is_large else None if body is None else b"".join(pieces),
                        headers={**headers, **own},
                        allow_redirects=False,
                        ssl=self._upstream.contexts.get(),
                    ) as response:
                        if response.status != 200:
                            await self._raise_for(response)
                        yield response
                finally:
                    self._timeouts.discard(timeout)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raises `EngineFailed` for errors of the connection."""
        try:
            yield
        except aiohttp.ClientConnectorCertificateError as error:
            reason = f"its certificate is not issued by engine_tls_ca ({error.certificate_error})"
            self.mark_unhealthy(reason)
            raise EngineFailed(self.engine, reason) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = f"it cannot be reached ({_system_message(error)})"
            self.mark_unhealthy(reason)
            raise EngineFailed(self.engine, reason) from None
        except TimeoutError:
            raise EngineFailed(self.engine, self.engine.failure) from None
        except (aiohttp.ClientError, OSError, EventTooLong) as error:
            raise EngineFailed(self.engine, f"its response broke off ({error or type(error).__name__})") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for received in response.content.iter_any():
            body += received
            if len(body) > MAX_RESPONSE_BYTES:
                raise EngineFailed(self.engine, f"its response has more than {MAX_RESPONSE_BYTES} bytes")
        return bytes(body)

    async def _raise_for(self, response: aiohttp.ClientResponse) -> None:
        complete = _complete(response, await self._read(response))
        if response.status >= 500 or response.status == 429:
            raise EngineFailed(self.engine, f"it returned {response.status}", complete)
        raise EngineRejected(complete)


def json_of(data: bytes, engine: Engine) -> Json:
    """Decodes a JSON object of an engine's response. Raises `EngineFailed` if it is not one."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFailed(engine, f"its response is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise EngineFailed(engine, "its response is not a JSON object")
    return content


def _system_message(error: OSError) -> str:
    """The operating system's message, without the text that libraries add."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or "it does not respond"


def _complete(response: aiohttp.ClientResponse, body: bytes) -> HttpResponse:
    headers = {name: response.headers[name] for name in _RETURNED_HEADERS if name in response.headers}
    return HttpResponse(status=response.status, body=body, headers=headers)


async def _in_parts(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[memoryview]:
    """The parts of a large body: all of it at once would be copied before any other request is served."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PART_BYTES):
            yield view[start : start + PART_BYTES]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    splitter = EventSplitter()
    async for received in response.content.iter_any():
        for event in splitter.feed(received):
            yield event
