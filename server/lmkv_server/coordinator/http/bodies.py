"""Reads the JSON body of a request, with limits of size, memory and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from lmkv.runtime.memory_budget import Lease, of_process
from lmkv.runtime.turns import LARGE_BYTES, of_loop
from lmkv_server.coordinator.http.replies import HttpError
from lmkv_server.http.bodies import BodyTooLarge, caller_of, read_body

MAX_BODY_BYTES = 4 << 20
"""Room for half a million tokens."""
BODY_TIMEOUT_SECONDS = 10.0


@asynccontextmanager
async def body_of(request: Request) -> AsyncIterator[bytes]:
    """The body of a request, which must be JSON or empty. Inside, memory is held for what it is decoded to.

    Memory is of the share of the request's caller. Raises `HttpError` 400, 408, 413 or 415, and `TooManyRequests`.
    """
    with Lease(of_process(), caller_of(request)) as lease:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await read_body(request, lease, MAX_BODY_BYTES)
        except BodyTooLarge:
            raise HttpError(413, "INVALID_ARGUMENT", f"the body has more than {MAX_BODY_BYTES} bytes") from None
        except TimeoutError:
            raise HttpError(408, "DEADLINE_EXCEEDED", f"no body within {BODY_TIMEOUT_SECONDS:g} s") from None
        except ClientDisconnect:
            raise HttpError(400, "CANCELLED", "the connection closed during the body") from None
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media_type != "application/json":
            given = f"not {media_type}" if media_type else "without a media type"
            raise HttpError(
                415,
                "INVALID_ARGUMENT",
                f"the body must be JSON ({given}); send the header Content-Type: application/json",
            )
        yield body


@asynccontextmanager
async def turn(request: Request, body: bytes) -> AsyncIterator[bool]:
    """Large bodies are decoded in turn, inside this: between two of them the event loop serves other requests.

    Yields whether it is a large one.
    """
    async with of_loop().take(caller_of(request), len(body)):
        yield len(body) >= LARGE_BYTES


def decode(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decodes a JSON object. Raises `HttpError` 400, which contains the position of the error."""
    try:
        return decoder.decode(body if body.strip() else b"{}")
    except msgspec.ValidationError as error:
        if body.lstrip().startswith(b"{"):
            raise _invalid(error) from None
        raise HttpError(400, "INVALID_ARGUMENT", "the body must be a JSON object, such as {}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(error) from None


def _invalid(error: Exception) -> HttpError:
    return HttpError(400, "INVALID_ARGUMENT", f"the body is invalid: {error}")
