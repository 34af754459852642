"""Reads the JSON body of a request, with limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request

from lmkv.runtime.memory_budget import json_bytes, of_process
from lmkv_server.coordinator.http.replies import HttpError
from lmkv_server.http.bodies import drain

MAX_BODY_BYTES = 4 << 20
"""Room for half a million tokens."""
BODY_TIMEOUT_SECONDS = 10.0

_decoder = msgspec.json.Decoder()


async def read_body(request: Request) -> bytes:
    """The body of a request, which must be JSON or empty. Raises `HttpError` 400, 408, 413 or 415."""
    length = request.headers.get("content-length", "0")
    is_too_large = length.isdecimal() and int(length) > MAX_BODY_BYTES
    if is_too_large and "expect" in request.headers:  # the client waits before it sends the body
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in stream:
                size += len(chunk)
                if is_too_large or size > MAX_BODY_BYTES:
                    await drain(stream)
                    raise _too_large()
                chunks.append(chunk)
    except TimeoutError:
        raise HttpError(408, "DEADLINE_EXCEEDED", f"no body within {BODY_TIMEOUT_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "CANCELLED", "the connection closed during the body") from None
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and media_type != "application/json":
        given = f"not {media_type}" if media_type else "without a media type"
        raise HttpError(
            415, "INVALID_ARGUMENT", f"the body must be JSON ({given}); send the header Content-Type: application/json"
        )
    return body


LARGE_BODY_BYTES = 64 << 10
"""Size of a body from which on it takes memory of the process' budget, and waits for its turn to be decoded."""
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@asynccontextmanager
async def memory_of(request: Request, body: bytes) -> AsyncIterator[None]:
    """Holds memory for a decoded body until its request is answered. Raises `TooManyRequests`.

    The bodies of one address share half of the budget. Large bodies are decoded in turn: between two of them the event
    loop serves other requests.
    """
    if len(body) < LARGE_BODY_BYTES:
        yield
        return
    with await of_process().acquire(request.client.host if request.client else "", json_bytes(body)):
        async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
        yield


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body; an empty one if there is no body. Raises `HttpError`."""
    body = await read_body(request)
    async with memory_of(request, body):
        content: dict[str, Any] = decode(body, _decoder)
    return content


def decode(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decodes a body. Raises `HttpError` 400, which contains the position of the error."""
    try:
        content = decoder.decode(body if body.strip() else b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, "INVALID_ARGUMENT", f"the body is invalid: {error}") from None
    if isinstance(content, list | str | int | float | None):
        raise HttpError(400, "INVALID_ARGUMENT", "the body must be a JSON object, such as {}")
    return content


def _too_large() -> HttpError:
    return HttpError(413, "INVALID_ARGUMENT", f"the body has more than {MAX_BODY_BYTES} bytes")
