"""Server interceptor: authentication, decoding of requests, errors as statuses, and metrics of unary calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.caller import check_caller, client_identity
from lmkv.errors import BadMessage, LmkvError
from lmkv.rpc.error_status import to_status
from lmkv.rpc.requests import Requests
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import DECODED_PROTOBUF_FACTOR, Lease, of_process
from lmkv.telemetry.calls import ServerCalls
from lmkv.telemetry.logs import LimitedLogger

logger = logging.getLogger(__name__)

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
            error.__traceback__ = error.__context__ = error.__cause__ = None
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
