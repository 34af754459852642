"""Serves requests: authenticates callers, decodes and checks messages, and returns errors as statuses; pages of lists.

The interceptor does so for every RPC; HTTP uses the same checks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.caller import check_caller, client_identity
from lmkv.errors import BadMessage, BadPageToken, LmkvError, forget_frames
from lmkv.rpc.error_status import to_status
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import DECODED_PROTOBUF_FACTOR, Lease, of_process
from lmkv.telemetry.calls import ServerCalls
from lmkv.telemetry.logs import LimitedLogger

logger = logging.getLogger(__name__)

MAX_DURATION_SECONDS = 315_576_000_000
MIN_TIME_SECONDS, MAX_TIME_SECONDS = -62_135_596_800, 253_402_300_799
"""Ranges of `google.protobuf.Duration` (10,000 years) and `Timestamp` (the years 1 to 9999)."""
_DURATION, _TIMESTAMP = "google.protobuf.Duration", "google.protobuf.Timestamp"


class Requests(AsyncIterator[Any]):
    """The messages of one call, decoded from the bytes that gRPC delivers.

    Raises `BadMessage` for invalid bytes, and `Unauthenticated` once the caller's token is revoked. gRPC's own decoding
    would answer `INTERNAL` and log a traceback, outside of handlers and interceptors. Each message holds memory of the
    process' budget until the next one is requested, or `lease` is closed: a call waits for it, and
    raises `TooManyRequests` if it waits too long. Large messages are decoded in turn.
    """

    def __init__(self, parts: AsyncIterator[bytes], decode: Callable[[bytes], Any], lease: Lease) -> None:
        self._parts = parts
        self._decode = decode
        self._lease = lease

    async def __anext__(self) -> Any:
        if self._lease.size_bytes and self._has_begun:
            self._lease.close()
        self._has_begun = True
        return await self._decoded(await anext(self._parts), is_streamed=True)

    async def only(self) -> Any:
        """The one message of a call that has no other."""
        data = await anext(self._parts)
        await self.aclose()
        return await self._decoded(data, is_streamed=False)

    async def _decoded(self, data: bytes, *, is_streamed: bool) -> Any:
        check_caller()
        self._lease.add(max(len(data) - self._lease.size_bytes, 0))  # it counts while it waits to be decoded
        await self._lease.acquire(len(data) * DECODED_PROTOBUF_FACTOR)
        if len(data) < turns.LARGE_BYTES:  # most messages, which wait for no turn
            return checked(data, self._decode)
        async with turns.of_loop().take(self._lease.caller, len(data), is_streamed=is_streamed):
            return checked(data, self._decode)

    async def aclose(self) -> None:
        """Reads nothing more. gRPC would keep the last message in a cycle, until that is collected."""
        with suppress(RuntimeError):  # another task reads
            await cast(AsyncGenerator[bytes], aiter(self._parts)).aclose()

    _has_begun = False


def checked(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """The message in `data`. Raises `BadMessage` if `decode` fails, or a time in the message is out of range."""
    try:
        message = decode(data)
    except DecodeError:
        raise BadMessage("the request is not a valid protobuf message of this RPC; encode it by its proto") from None
    check_times(message)
    return message


def check_times(message: Any) -> None:
    """Raises `BadMessage` if a `Duration` or `Timestamp` of the message is outside the range that protobuf gives it.

    The conversions of the protobuf library accept such values or raise `ValueError`.
    """
    if isinstance(message, Message):
        _check_fields(message, "")


def _check_fields(message: Message, path: str) -> None:
    for field in _fields_with_times(message.DESCRIPTOR):
        for value in _values(message, field):
            name = f"{path}{field.name}"
            kind = value.DESCRIPTOR.full_name
            if kind not in (_DURATION, _TIMESTAMP):
                _check_fields(value, f"{name}.")
            elif not (_is_duration(value) if kind == _DURATION else _is_timestamp(value)):
                raise BadMessage(
                    f"{name} ({value.seconds} s, {value.nanos} ns) is out of the range of {kind}; send a valid value",
                    field=name,
                )


def _values(message: Message, field: FieldDescriptor) -> Any:
    """The messages in a field; empty if it is not set."""
    if not field.is_repeated:
        return (getattr(message, field.name),) if message.HasField(field.name) else ()
    values = getattr(message, field.name)
    return values.values() if _is_map(field) else values


@functools.cache
def _fields_with_times(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields of a message type whose values are, or contain, a `Duration` or `Timestamp`."""
    return tuple(field for field in kind.fields if _leads_to_time(field, frozenset({kind.full_name})))


def _leads_to_time(field: FieldDescriptor, above: frozenset[str]) -> bool:
    kind = field.message_type
    if kind is not None and _is_map(field):
        kind = kind.fields_by_name["value"].message_type
    if kind is None or kind.full_name in above:
        return False
    if kind.full_name in (_DURATION, _TIMESTAMP):
        return True
    return any(_leads_to_time(inner, above | {kind.full_name}) for inner in kind.fields)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_duration(value: Any) -> bool:
    seconds, nanos = int(value.seconds), int(value.nanos)
    return seconds * nanos >= 0 and abs(seconds) <= MAX_DURATION_SECONDS and abs(nanos) < 1_000_000_000


def _is_timestamp(value: Any) -> bool:
    return MIN_TIME_SECONDS <= int(value.seconds) <= MAX_TIME_SECONDS and 0 <= int(value.nanos) < 1_000_000_000


DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_CHECK_BYTES = 8


def page_limit(page_size: int) -> int:
    """The number of entries of a page, from the requested size."""
    return min(page_size, MAX_PAGE_SIZE) if page_size > 0 else DEFAULT_PAGE_SIZE


def page_token(call: str, last: str) -> str:
    """The token with which `call` continues after the entry `last`."""
    return base64.urlsafe_b64encode(_check(call, last) + last.encode()).decode()


def read_page_token(call: str, token: str) -> str:
    """The entry after which the page begins; empty for the first page. Raises `BadPageToken`."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        last = raw[_CHECK_BYTES:].decode()
    except (binascii.Error, UnicodeError):
        raw, last = b"", ""
    if raw[:_CHECK_BYTES] != _check(call, last):
        raise BadPageToken(f"page_token was not made by {call}; leave it empty for the first page", call=call)
    return last


def _check(call: str, last: str) -> bytes:
    return sha256(f"{call}\0{last}".encode()).digest()[:_CHECK_BYTES]


MESSAGE_SECONDS = 10.0
"""Timeout for the message of a unary request."""


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Authenticates calls, converts errors of handlers to statuses, and counts unary calls."""

    def __init__(self, calls: ServerCalls, authenticator: Authenticator, max_message_bytes: int) -> None:
        self._calls = calls
        self._authenticator = authenticator
        self._budget = of_process()
        self._max_message_bytes = max_message_bytes
        self._log = LimitedLogger(logger)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        turns.of_loop().count_arrival()
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # unknown method: grpc answers UNIMPLEMENTED
            return None  # type: ignore[return-value]
        method = handler_call_details.method
        name, metadata = method.removeprefix("/"), handler_call_details.invocation_metadata
        # All methods are registered as request-streaming, so that gRPC calls the handler before the first message has
        # arrived: unauthenticated callers are refused before they use memory, and a message that never ends blocks
        # nothing. `Requests` decodes the messages, so that a decoding error is answered like any other error.
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        decode = handler.request_deserializer

        async def stream(parts: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            try:
                async with self._admitted(parts, decode, name, metadata, context) as (requests, lease):
                    responses = inner(
                        requests if handler.request_streaming else await self._whole(requests, lease), context
                    )
                    if inspect.isawaitable(responses):  # it writes the responses itself, as gRPC's health service does
                        await responses
                        return
                    async for response in responses:
                        check_caller()
                        yield response
                return
            except Exception as error:
                refusal = self._to_lmkv_error(error, method)
            await _abort(refusal, context)

        async def unary(parts: AsyncIterator[Any], context: Any) -> Any:
            with self._calls.observe(method, metadata) as call:
                try:
                    async with self._admitted(parts, decode, name, metadata, context) as (requests, lease):
                        return await inner(
                            requests if handler.request_streaming else await self._whole(requests, lease), context
                        )
                except grpc.aio.AbortError:  # the handler aborted the call itself
                    call.fail(_code_name(context.code()))
                    raise
                except Exception as error:
                    refusal = self._to_lmkv_error(error, method)
                    call.fail(refusal.code)
            return await _abort(refusal, context)  # a delay is no part of the duration that `call` measures

        codecs = (None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codecs)
        return grpc.stream_unary_rpc_method_handler(unary, *codecs)

    @asynccontextmanager
    async def _admitted(
        self, parts: AsyncIterator[Any], decode: Callable[[bytes], Any], name: str, metadata: Any, context: Any
    ) -> AsyncIterator[tuple[Requests, Lease]]:
        """The scope of a call: its messages, and memory for them, of its caller's share. Raises as authentication."""
        with (
            self._authenticator.authorized_call(name, metadata),
            Lease(self._budget, client_identity(context)) as lease,
        ):
            async with aclosing(Requests(parts, decode, lease)) as requests:
                yield requests, lease

    async def _whole(self, requests: Requests, lease: Lease) -> Any:
        """The message of a unary request. Memory for the largest one is taken before it is read.

        A caller that sends large ones takes what such a message is decoded to: more would be read than can be answered.

        Raises `BadMessage` if it does not arrive in time, `TooManyRequests` if there is no memory in time.
        """
        factor = DECODED_PROTOBUF_FACTOR if turns.of_loop().sends_large(lease.caller) else 1
        await lease.acquire(self._max_message_bytes * factor)
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                return await requests.only()
        except TimeoutError:
            raise BadMessage(f"no message within {MESSAGE_SECONDS:g} s; send it at once") from None
        except StopAsyncIteration:
            raise BadMessage("the call ended without a message; send one") from None

    def _to_lmkv_error(self, error: Exception, method: str) -> LmkvError:
        """The error to answer with. Re-raises `grpc.aio.AbortError`: the handler has aborted the call itself.

        It names no frames: they would keep the request in memory for a delay, and in a cycle with it after that.
        """
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, LmkvError):
            forget_frames(error)
            return error
        self._log.error("%s failed unexpectedly", method, exc_info=error)
        return LmkvError(f"{method} failed unexpectedly: {error!r}; see the server's log")


def _code_name(code: Any) -> str:
    """The name of a status code, which gRPC returns as it was set: as the code or its number."""
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return next((known.name for known in grpc.StatusCode if known.value[0] == number), "UNKNOWN")


async def _abort(error: LmkvError, context: Any) -> Any:
    if error.delay_seconds:
        await delay_refusal(error.delay_seconds, context)
    return await context.abort_with_status(rpc_status.to_status(to_status(error)))


MAX_DEADLINE_FRACTION = 0.5
"""Fraction of a call's remaining time that a delay takes at most: the client still receives the answer."""


async def delay_refusal(seconds: float, context: Any) -> None:
    """Waits for `LmkvError.delay_seconds` before a call is answered, within the call's deadline."""
    left = context.time_remaining()
    await asyncio.sleep(seconds if left is None else min(seconds, left * MAX_DEADLINE_FRACTION))
