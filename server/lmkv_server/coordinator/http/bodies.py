"""JSON over HTTP: bodies and token ids, read with limits of size, memory and time; paths that take them; errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv import rpc
from lmkv.errors import BadTokens, LmkvError
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv.runtime.turns import LARGE_BYTES, of_loop
from lmkv_kernels import token_ids
from lmkv_server.http.guard import BodyTooLarge, caller_of, read_body

HTTP_STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status by gRPC code, as `google/rpc/code.proto` maps them; other codes are 500."""


class HttpError(Exception):
    """A request that is refused before a handler is called. `code` is the closest gRPC code."""

    def __init__(self, http_status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.headers = headers
        self.status = status_pb2.Status(code=getattr(code_pb2, code), message=message)


class CallAborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def to_json(message: Message) -> dict[str, Any]:
    """A message in proto3's JSON: names in lowerCamelCase, 64-bit integers as text, unset fields omitted."""
    return MessageToDict(message)


def json_response(content: Any, http_status: int = 200) -> Response:
    """A response with a JSON body."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Response(text, http_status, media_type="application/json")


def status_of(error: Exception) -> tuple[int, status_pb2.Status] | None:
    """HTTP status and `google.rpc.Status` of an expected error; None for any other one."""
    if isinstance(error, HttpError):
        return error.http_status, error.status
    if isinstance(error, LmkvError):
        status = rpc.to_status(error)
    elif isinstance(error, CallAborted):
        status = error.status
    else:
        return None
    return HTTP_STATUS.get(code_pb2.Code.Name(status.code), 500), status


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
                body = (await read_body(request, lease, MAX_BODY_BYTES)).text
        except BodyTooLarge as error:
            raise HttpError(413, "INVALID_ARGUMENT", f"the body has {error}") from None
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


B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a path. Unknown fields are refused: a misspelt `copy` would turn a copy into a move."""


class Path(Generic[B]):
    """A path: type of its body, handler, and an example of the response; `tag` groups it in the documentation."""

    def __init__(
        self,
        body: type[B],
        summary: str,
        answer: Callable[[B], Awaitable[dict[str, Any]]],
        example: dict[str, Any],
        *,
        tag: str = "as in LMCache",
    ) -> None:
        self.body = body
        self.summary = summary
        self.answer = answer
        self.example = example
        self.tag = tag
        self._decoder = msgspec.json.Decoder(body)

    async def serve(self, request: Request) -> Response:
        """Answers a request. Raises the errors of `decode` and of the handler."""
        async with body_of(request) as whole:
            async with turn(request, whole) as is_large:
                rest, tokens = lift_tokens(whole)
                body: Any = decode(rest, self._decoder)
                if tokens is not None and bytes(body.tokens) == b"[]":  # the last one wins if the body has tokens twice
                    body.tokens = tokens
                if is_large and hasattr(body, "tokens"):
                    body.tokens = await asyncio.to_thread(token_array, body.tokens)
            return json_response(await self.answer(body))


def routes(paths: Mapping[str, Path[Any]]) -> list[Route]:
    return [Route(name, path.serve, methods=["POST"]) for name, path in paths.items()]


_OPENING = re.compile(rb'\s*\{\s*"tokens"\s*:\s*(?=\[)')


def token_array(text: msgspec.Raw | memoryview | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The token ids of a JSON list, if they are not read yet. Other threads run meanwhile. Raises `BadTokens`."""
    if isinstance(text, np.ndarray):
        return text
    try:
        return token_ids(memoryview(text))
    except ValueError as error:
        raise BadTokens(f"tokens must be a list of token ids: {error}") from None


def lift_tokens(body: bytes) -> tuple[bytes, memoryview | None]:
    """Splits a body that begins with `tokens` into the body with an empty list instead, and the text of the list.

    The decoder of the rest then does not parse the tokens. The second value is None if the body begins otherwise.
    """
    opening = _OPENING.match(body)
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is None or end < 0:
        return body, None
    return b'{"tokens":[]' + body[end + 1 :], memoryview(body)[opening.end() : end + 1]
