"""Asking engines over HTTP: the only place that knows the client library."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from lmkv.runtime.reload import Reloadable
from lmkv_server.proxy.routing.engines import Engine
from lmkv_server.proxy.upstream.events import EventTooLong, Splitter

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 2.0
"""vLLM closes connections that were idle for 5 s; one that is older might be gone when it is used."""
MAX_ANSWER_BYTES = 256 << 20
"""Of an answer that is not streamed: room for the ids and logprobs of the longest prompts."""
_DROPPED = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "content-type", "expect", "host", "keep-alive"),
        *("proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers that are between two ends of one connection, or that the proxy sets itself."""
_RETURNED = ("content-type", "retry-after", "www-authenticate", "x-request-id")
"""Headers of an engine's answer that the client gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine, or the proxy, says to a request."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


class EngineFailed(Exception):
    """An engine did not do what it was asked; another may."""

    def __init__(self, engine: Engine, trouble: str, answer: Answer | None = None) -> None:
        super().__init__(f"{engine.url}: {trouble}")
        self.trouble = trouble
        self.answer = answer
        """What it said, if it said anything."""
        self.is_final = False
        """Whether it is too late for another."""


class Refused(Exception):
    """An engine says that the request is wrong; every engine would."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


def open_session() -> aiohttp.ClientSession:
    """The connections to all engines. Their number has a bound: that of the requests that are let in."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ttl_dns_cache=10)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # each request has its own deadline
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's headers as an engine gets them: who asks, as part of which trace, under which id."""
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED}


class Upstream:
    """One engine to ask. Leaving a call, by whatever way, closes its connection unless the answer was read whole."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, contexts: Reloadable[ssl.SSLContext]) -> None:
        """`contexts` say how to speak to an engine whose URL says https."""
        self.engine = engine
        self._session = session
        self._contexts = contexts
        self._limits: set[asyncio.Timeout] = set()

    def cut(self) -> None:
        """Ends all calls under way: who asked gets `EngineFailed`, and can ask another engine."""
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    def lose(self, trouble: str) -> None:
        """No further request goes to it until it is admitted again."""
        if self.engine.exclude(trouble):
            logger.warning("%s engine %s is out: %s", self.engine.role, self.engine.url, trouble)

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """Its whole answer. Raises `Refused` or `EngineFailed`."""
        async with self._opened(method, path, headers, body) as response:
            return _answer(response, await self._read(response))

    @asynccontextmanager
    async def stream(self, path: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of its answer, as they come. Raises `Refused` or `EngineFailed`, also between events."""
        async with self._opened("POST", path, headers, body) as response:
            yield _events(response)

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        own = {"Accept-Encoding": "identity"} | ({"Content-Type": "application/json"} if body is not None else {})
        with self._failures():
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    async with self._session.request(
                        method,
                        self.engine.url + path,
                        data=body,
                        headers={**headers, **own},
                        allow_redirects=False,
                        ssl=self._contexts.get(),
                    ) as response:
                        if response.status != 200:
                            await self._refuse(response)
                        yield response
                finally:
                    self._limits.discard(limit)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Says of the engine what the library says of its connections."""
        try:
            yield
        except aiohttp.ClientConnectorCertificateError as error:
            trouble = f"its certificate is not of those whom engine_tls_ca names ({error.certificate_error})"
            self.lose(trouble)
            raise EngineFailed(self.engine, trouble) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            trouble = f"it cannot be reached ({_why(error)})"
            self.lose(trouble)
            raise EngineFailed(self.engine, trouble) from None
        except TimeoutError:
            raise EngineFailed(self.engine, self.engine.trouble) from None
        except (aiohttp.ClientError, OSError, EventTooLong) as error:
            raise EngineFailed(self.engine, f"it broke off ({error or type(error).__name__})") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for received in response.content.iter_any():
            body += received
            if len(body) > MAX_ANSWER_BYTES:
                raise EngineFailed(self.engine, f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        answer = _answer(response, await self._read(response))
        if response.status >= 500 or response.status == 429:
            raise EngineFailed(self.engine, f"it answered {response.status}", answer)
        raise Refused(answer)


def json_of(data: bytes, engine: Engine) -> dict[str, Any]:
    """The JSON object that an engine has said. Raises `EngineFailed` if it is none."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFailed(engine, f"it said what is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise EngineFailed(engine, "it said what is no JSON object")
    return content


def _why(error: OSError) -> str:
    """The system's own word for it, which the libraries between wrap each in its way."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or "it does not answer"


def _answer(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    headers = {name: response.headers[name] for name in _RETURNED if name in response.headers}
    return Answer(status=response.status, body=body, headers=headers)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    splitter = Splitter()
    async for received in response.content.iter_any():
        for event in splitter.feed(received):
            yield event
