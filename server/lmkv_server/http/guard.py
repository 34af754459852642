"""Guards HTTP servers: refuses requests that a web page of another site has a browser send, reads credentials, and
reads JSON bodies within bounds of size and memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from lmkv.auth.authenticator import TENANT_HEADER, is_loopback
from lmkv.auth.caller import http_client_identity
from lmkv.auth.credentials import HEADER
from lmkv.errors import TooManyRequests
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import MAX_JSON_OBJECTS, MAX_JSON_VALUES, Lease
from lmkv_server.http.json_text import JsonText


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGuard:
    """Knows by which names a server is called.

    A page of another site has another origin. Where its owner lets its own name resolve to this machine (DNS
    rebinding), origin and host agree, but the name is not one of the server's.
    """

    bound: str
    """Address or name that the server is bound to."""
    allowed: Sequence[str] = ()
    """Names from `allowed_hosts`. Without any, a server that is not bound to loopback accepts every name."""

    def refusal(self, host: str, origin: str | None) -> str:
        """Says why a request with these headers is refused; empty if it is not."""
        try:
            if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
                return f"pages of {origin} may not call this server"
        except ValueError:
            return "the Origin header is not an origin"
        name = host_name(host)
        if self._knows(name):
            return ""
        return f"this server is not called {name}; use its address, or add the name to allowed_hosts"

    def _knows(self, name: str) -> bool:
        if name in ("", "localhost", self.bound.strip("[]").lower()) or _is_address(name):
            return True  # no name that the owner of another site could point here
        if not self.allowed:
            return not is_loopback(self.bound)
        return any(_matches(name, pattern) for pattern in self.allowed)


def host_name(authority: str) -> str:
    """The host in `host:port`, in lower case, without the brackets of an IPv6 address and a final dot."""
    name = authority[: authority.rfind("]") + 1] if authority.startswith("[") else authority.partition(":")[0]
    return name.strip("[]").lower().removesuffix(".")


def _matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern, or is below `*.DOMAIN`."""
    return pattern == "*" or name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


VIEW_RPC = "lmkv.v1.RegistryService/ListInstances"
"""The RPC whose permission also covers pages and metrics."""
CHALLENGE = {"WWW-Authenticate": 'Basic realm="lmkv: any name, and a token as the password"'}
"""Makes a browser ask for a token. It names no other scheme: browsers read only one per line."""


def credentials_of(request: Request) -> list[tuple[str, str]]:
    """The headers that authenticate a request, as gRPC metadata carries them."""
    return [(name, request.headers[name]) for name in (HEADER, TENANT_HEADER) if name in request.headers]


DRAIN_SECONDS = 5.0
DRAIN_BYTES = 256 << 20
"""Limits of what is read and discarded of a body that is too large."""
PART_BYTES = 64 << 10
"""Most bytes that a server reads at a time."""
COPIES = 2
"""Copies of a body while it is read: its parts, and the whole that they are joined to."""


class BodyTooLarge(Exception):
    """A body has more bytes, or more values, than its server accepts. The text says of what it has too much."""


def caller_of(request: Request) -> str:
    """Returns the caller that shares of memory and turns are counted for: the token, else the address."""
    return http_client_identity(request.client.host if request.client else "")


JOINED_APART_BYTES = 1 << 20
"""Larger bodies are joined in a thread. Python copies as much without its lock."""


async def read_body(request: Request, lease: Lease, max_bytes: int, setting: str = "") -> JsonText:
    """The body of a request, which should be JSON: memory is taken for what it is decoded to, too.

    That of the text is taken before it is read: all of it if the request says its length. Waits for memory as
    `Lease.acquire` does; meanwhile the client's bytes stay in its connection. Discards the rest of a body that is
    refused. `setting` is the key that sets `max_bytes`. Raises `BodyTooLarge`, `TooManyRequests`, `ClientDisconnect`.
    """
    stream = request.stream()
    chunks: list[bytes] = []
    body = JsonText()
    too_large = BodyTooLarge(f"more than {max_bytes} bytes{setting and f'; see {setting}'}")
    try:
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        if length.isdecimal():
            await lease.acquire(COPIES * int(length))
        elif "transfer-encoding" in request.headers:
            await lease.acquire(COPIES * PART_BYTES)
        async for chunk in stream:
            chunks.append(chunk)
            if body.text_bytes + len(chunk) > max_bytes:
                raise too_large
            for start in range(0, len(chunk), PART_BYTES):
                if body.text_bytes + PART_BYTES > turns.LARGE_BYTES:
                    await turns.of_loop().read(lease.caller)
                body.add(chunk[start : start + PART_BYTES])
                check_values(body)
            if not length and COPIES * (body.text_bytes + PART_BYTES) > lease.size_bytes:
                lease.grow(lease.size_bytes)
        await lease.acquire(body.size_bytes)
        is_large = body.text_bytes > JOINED_APART_BYTES
        body.text = await asyncio.to_thread(b"".join, chunks) if is_large else b"".join(chunks)
        return body
    except (BodyTooLarge, TooManyRequests):
        chunks.clear()
        lease.close()
        if "expect" not in request.headers or body.text_bytes:  # else the client waits before it sends the body
            await drain(stream, lease.caller)
        raise


def check_values(body: JsonText) -> None:
    """Raises `BodyTooLarge` if a body that has arrived in part would take too long to decode."""
    if body.has_too_many_values:
        raise BodyTooLarge(
            f"more than {MAX_JSON_VALUES} values, or more than {MAX_JSON_OBJECTS} objects, lists and texts"
        )


async def drain(body: AsyncIterator[bytes], caller: str) -> None:
    """Discards the rest of a body, within bounds, in turn with the parts of other large bodies.

    A client reads no response before it has sent its body, and a server that closes with unread bytes resets the
    connection, which discards the response.
    """
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for part in body:
                await turns.of_loop().read(caller)
                size += len(part)
                if size > DRAIN_BYTES:
                    return
