"""Reads the JSON bodies of requests within bounds of size and memory, and discards the rest of refused ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request

from lmkv.auth.caller import http_client_identity
from lmkv.errors import TooManyRequests
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import JsonSize, Lease

DRAIN_SECONDS = 5.0
DRAIN_BYTES = 256 << 20
"""Limits of what is read and discarded of a body that is too large."""
PART_BYTES = 64 << 10
"""What a server reads at a time, at most."""
COPIES = 2
"""Copies of a body while it is read: its parts, and the whole that they are joined to."""


class BodyTooLarge(Exception):
    """A body has more bytes than its server accepts."""


def caller_of(request: Request) -> str:
    """Whose share of memory and of turns a request has: its token's, else that of its address."""
    return http_client_identity(request.client.host if request.client else "")


async def read_body(request: Request, lease: Lease, max_bytes: int) -> bytes:
    """The body of a request, which should be JSON: memory is taken for what it is decoded to, too.

    That of the text is taken before it is read: all of it if the request says its length. Waits for memory as
    `Lease.acquire` does; meanwhile the client's bytes stay in its connection. Discards the rest of a body that is
    refused. Raises `BodyTooLarge`, `TooManyRequests`, `ClientDisconnect`.
    """
    stream = request.stream()
    chunks: list[bytes] = []
    decoded = JsonSize()
    try:
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise BodyTooLarge
        if length.isdecimal():
            await lease.acquire(COPIES * int(length))
        elif "transfer-encoding" in request.headers:
            await lease.acquire(COPIES * PART_BYTES)
        async for chunk in stream:
            chunks.append(chunk)
            decoded.add(chunk)
            if decoded.text_bytes > max_bytes:
                raise BodyTooLarge
            if not length and COPIES * (decoded.text_bytes + PART_BYTES) > lease.size_bytes:
                lease.grow(lease.size_bytes)
            if decoded.text_bytes >= turns.LARGE_BYTES:
                await turns.of_loop().read(lease.caller)
        await lease.acquire(decoded.size_bytes)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except (BodyTooLarge, TooManyRequests):
        chunks.clear()
        lease.close()
        if "expect" not in request.headers or decoded.text_bytes:  # else the client waits before it sends the body
            await drain(stream)
        raise


async def drain(body: AsyncIterator[bytes]) -> None:
    """Discards the rest of a body, within bounds.

    A client reads no response before it has sent its body, and a server that closes with unread bytes resets the
    connection, which discards the response.
    """
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for part in body:
                size += len(part)
                if size > DRAIN_BYTES:
                    return
