"""The coordinator's RPCs as HTTP: `POST /lmkv.v1.CacheService/Lookup` with the request as JSON.

Calls the same handlers as gRPC. A stream is sent as one JSON object per line, or as server-sent events to clients that
accept `text/event-stream`, such as a browser's `EventSource`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, status_pb2
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lmkv.auth.caller import check_caller
from lmkv.errors import BadRequest, BadTokens
from lmkv.rpc.requests import check_times
from lmkv_server.coordinator.http.bodies import (
    CallAborted,
    body_of,
    decode,
    json_response,
    status_of,
    to_json,
    token_array,
    turn,
)
from lmkv_server.http.server import ENDLESS

logger = logging.getLogger(__name__)

RPC_TIMEOUT_SECONDS = 60.0
"""Timeout of an RPC. Only `WaitOperation` may take that long, and it returns before the deadline."""
TOKENS_AT_ONCE = 32_768
"""Token ids that are added to a request before other tasks run: a millisecond or two."""
KEYS_AT_ONCE = 2048

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_texts = msgspec.json.Decoder(list[str])
_value = msgspec.json.Decoder()


class HttpContext:
    """The part of grpc's servicer context that the handlers use."""

    def __init__(self, timeout_seconds: float | None, peer: str = "") -> None:
        self._peer = peer
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._callbacks: list[Callable[[HttpContext], None]] = []

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with a status."""
        raise CallAborted(status_pb2.Status(code=getattr(code_pb2, code.name), message=details))

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Empty: handlers do not read HTTP headers."""
        return ()

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Empty: the HTTP server does not pass client certificates to applications."""
        return {}

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        return self._peer

    def add_done_callback(self, callback: Callable[[HttpContext], None]) -> None:
        """Registers a callback for the end of the call."""
        self._callbacks.append(callback)

    def finish(self) -> None:
        """Calls the callbacks. Idempotent."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


def methods(services: Mapping[str, object], only: Mapping[str, tuple[str, ...]]) -> Iterator[MethodDescriptor]:
    """The RPCs that HTTP can serve, of services by full name; for a service in `only` just the methods named there."""
    for name in services:
        for method in Default().FindServiceByName(name).methods:
            if not method.client_streaming and method.name in only.get(name, (method.name,)):
                yield method


def routes(services: Mapping[str, object], only: Mapping[str, tuple[str, ...]]) -> list[Route]:
    """A route for each of `methods`. `services` are servicers by the full name of their service."""
    return [
        _route(method, getattr(services[method.containing_service.full_name], method.name))
        for method in methods(services, only)
    ]


def path_of(method: MethodDescriptor) -> str:
    """The path of an RPC, which is the same as in gRPC."""
    return f"/{method.containing_service.full_name}/{method.name}"


def _route(method: MethodDescriptor, handler: Callable[[Any, Any], Any]) -> Route:
    message_class = GetMessageClass(method.input_type)

    async def unary(request: Request) -> Response:
        async with body_of(request) as body:
            message = await read_message(request, message_class(), body)
            return json_response(to_json(await call(handler, message)))

    async def stream(request: Request) -> Response:
        if task := asyncio.current_task():
            ENDLESS.add(task)
        if request.method == "GET":
            message = parse(message_class(), dict(request.query_params))
        else:
            async with body_of(request) as body:
                message = await read_message(request, message_class(), body)
        is_events = "text/event-stream" in request.headers.get("accept", "")
        frame = _as_event if is_events else _as_line
        responses = _responses(handler, message, _peer_of(request))
        # The first response is awaited here, so that an error can still set the HTTP status.
        first = await anext(responses, None)
        return StreamingResponse(
            _frames(first, responses, frame),
            media_type="text/event-stream" if is_events else "application/x-ndjson",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    if method.server_streaming:
        return Route(path_of(method), stream, methods=["GET", "POST"])
    return Route(path_of(method), unary, methods=["POST"])


async def call(handler: Callable[[Any, Any], Any], message: Message) -> Any:
    """Calls a unary handler. Raises its errors, and `CallAborted`."""
    context = HttpContext(RPC_TIMEOUT_SECONDS)
    try:
        async with asyncio.timeout(RPC_TIMEOUT_SECONDS):
            return await handler(message, context)
    except TimeoutError:
        seconds = f"{RPC_TIMEOUT_SECONDS:g}"
        late = status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message=f"no answer within {seconds} s")
        raise CallAborted(late) from None
    finally:
        context.finish()


async def read_message(request: Request, message: Message, body: bytes) -> Message:
    """Fills a request from a body. Raises `HttpError`, `BadRequest`.

    Other tasks run while long lists of token ids are read, and between slices of them.
    """
    async with turn(request, body) as is_large:
        texts: dict[str, msgspec.Raw] = decode(body, _fields)
        return parse(message, await _read_lists(message, texts) if is_large else _values(texts))


async def _read_lists(message: Message, texts: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Adds the lists of token ids and of keys in a JSON object to a message; returns the rest of its fields."""
    rest: dict[str, Any] = {}
    for name, text in texts.items():
        field = _field_of(message, name)
        if field is not None and _is_token_ids(field) and await _extend(message, field.name, text):
            continue
        if field is not None and _is_keys(field) and await _extend_keys(message, field.name, text):
            continue
        if field is not None and _is_message(field) and bytes(text).lstrip().startswith(b"{"):
            rest[name] = await _read_lists(getattr(message, field.name), decode(bytes(text), _fields))
            continue
        rest[name] = decode(bytes(text), _value)
    return rest


def _values(texts: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: decode(bytes(text), _value) for name, text in texts.items()}


def parse(message: Message, fields: dict[str, Any]) -> Message:
    """Fills a request from its JSON. Raises `BadRequest`."""
    try:
        json_format.ParseDict(_without_tokens(message, fields), message)
    except (json_format.ParseError, TypeError, ValueError) as error:
        raise BadRequest(f"the body is not a {message.DESCRIPTOR.full_name}: {' '.join(str(error).split())}") from None
    check_times(message)
    return message


def _without_tokens(message: Message, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the lists of token ids in a JSON object to a message; returns the rest of its fields."""
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        field = _field_of(message, name)
        if field is not None and _is_token_ids(field) and isinstance(value, list):
            message.ClearField(field.name)
            try:
                getattr(message, field.name).extend(value)  # a hundred times faster than json_format
                continue
            except (TypeError, ValueError):
                message.ClearField(field.name)
        if field is not None and _is_message(field) and isinstance(value, dict):
            value = _without_tokens(getattr(message, field.name), value)
        rest[name] = value
    return rest


def _field_of(message: Message, name: str) -> Any:
    """The descriptor of a field, by either of its names in JSON; None if there is none."""
    fields = message.DESCRIPTOR
    return fields.fields_by_name.get(name) or fields.fields_by_camelcase_name.get(name)


def _is_token_ids(field: Any) -> bool:
    """Whether a field, by its descriptor, is a list of token ids."""
    return bool(field.is_repeated and field.type == field.TYPE_INT32)


def _is_keys(field: Any) -> bool:
    """Whether a field, by its descriptor, is a list of keys."""
    return bool(field.is_repeated and field.type == field.TYPE_BYTES)


def _is_message(field: Any) -> bool:
    """Whether a field, by its descriptor, is one message of ours: those of protobuf have a JSON of their own."""
    return bool(
        not field.is_repeated and field.message_type is not None and field.message_type.file.package.startswith("lmkv.")
    )


async def _extend(message: Message, name: str, text: msgspec.Raw) -> bool:
    """Adds the token ids of a JSON list to a field; whether they could be read."""
    message.ClearField(name)
    values = getattr(message, name)
    try:
        tokens = await asyncio.to_thread(token_array, text)
        for start in range(0, tokens.size, TOKENS_AT_ONCE):
            values.extend(tokens[start : start + TOKENS_AT_ONCE].tolist())
            await asyncio.sleep(0)
    except (BadTokens, ValueError):
        message.ClearField(name)
        return False
    return True


async def _extend_keys(message: Message, name: str, text: msgspec.Raw) -> bool:
    """Adds the keys of a JSON list to a field; whether they could be read."""
    message.ClearField(name)
    values = getattr(message, name)
    try:
        keys = _texts.decode(text)
        for start in range(0, len(keys), KEYS_AT_ONCE):
            # As json_format reads them: padded or not, in either alphabet.
            values.extend(urlsafe_b64decode(key + "=" * (-len(key) % 4)) for key in keys[start : start + KEYS_AT_ONCE])
            await asyncio.sleep(0)
    except (msgspec.DecodeError, ValueError):
        message.ClearField(name)
        return False
    return True


def _peer_of(request: Request) -> str:
    """The client's address in gRPC's format."""
    if request.client is None:
        return ""
    host, port = request.client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def _responses(handler: Callable[[Any, Any], Any], message: Message, peer: str) -> AsyncIterator[dict[str, Any]]:
    context = HttpContext(None, peer)
    try:
        async with aclosing(handler(message, context)) as responses:
            async for response in responses:
                check_caller()
                yield to_json(response)
    finally:
        context.finish()


async def _frames(
    first: dict[str, Any] | None, rest: AsyncIterator[dict[str, Any]], frame: Callable[[Any, bool], bytes]
) -> AsyncIterator[bytes]:
    """The body of a stream. An error ends it with one more frame, because the HTTP status was sent before."""
    async with aclosing(rest):  # type: ignore[type-var]  # it is a generator
        try:
            if first is not None:
                yield frame(first, False)
                async for response in rest:
                    yield frame(response, False)
        except Exception as error:
            known = status_of(error)
            if known is None:
                logger.exception("a stream over HTTP failed unexpectedly")
            status = known[1] if known else status_pb2.Status(code=code_pb2.INTERNAL, message="see the server's log")
            yield frame(to_json(status), True)


def _as_line(content: Any, is_error: bool) -> bytes:
    return json.dumps({"error": content} if is_error else content, separators=(",", ":")).encode() + b"\n"


def _as_event(content: Any, is_error: bool) -> bytes:
    name = b"event: error\n" if is_error else b""
    return name + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
