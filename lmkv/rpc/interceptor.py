"""What lies between gRPC and the handlers of every server: the gate, errors as statuses, counts."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.caller import check_caller
from lmkv.errors import BadMessage, LmkvError
from lmkv.rpc.error_status import to_status
from lmkv.rpc.requests import Requests
from lmkv.telemetry.calls import ServerCalls
from lmkv.telemetry.log_limit import LimitedLogger

logger = logging.getLogger(__name__)

MESSAGE_SECONDS = 10.0
"""Most time that a call's only message may take to come."""


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns what the gate and handlers raise into statuses, so that handlers only translate; and counts unary calls."""

    def __init__(self, calls: ServerCalls, authenticator: Authenticator) -> None:
        self._calls = calls
        self._authenticator = authenticator
        self._log = LimitedLogger(logger)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None  # type: ignore[return-value]
        method = handler_call_details.method
        name, metadata = method.removeprefix("/"), handler_call_details.invocation_metadata
        # gRPC is told that all requests come in parts: it then calls handlers before the first has come. So the gate
        # refuses strangers before they have made us hold anything, and nobody is waited for who never ends a message.
        # It does not decode them either: `Requests` does, where what fails is answered like every other error.
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        decode = handler.request_deserializer

        async def stream(parts: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            try:
                with self._authenticator.authorized_call(name, metadata):
                    requests = Requests(parts, decode)
                    responses = inner(requests if handler.request_streaming else await _whole(requests), context)
                    if inspect.isawaitable(responses):  # it writes them itself, as gRPC's own health service does
                        await responses
                        return
                    async for response in responses:
                        check_caller()
                        yield response
            except Exception as error:
                await _abort(self._refusal(error, method), context)

        async def unary(parts: AsyncIterator[Any], context: Any) -> Any:
            with self._calls.observe(method, metadata) as call:
                try:
                    with self._authenticator.authorized_call(name, metadata):
                        requests = Requests(parts, decode)
                        return await inner(requests if handler.request_streaming else await _whole(requests), context)
                except grpc.aio.AbortError:  # the handler aborted the call itself
                    call.fail(_code_name(context.code()))
                    raise
                except Exception as error:
                    refusal = self._refusal(error, method)
                    call.fail(refusal.code)
                    await _abort(refusal, context)

        codecs = (None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codecs)
        return grpc.stream_unary_rpc_method_handler(unary, *codecs)

    def _refusal(self, error: Exception, method: str) -> LmkvError:
        """The error to answer with. Raises `grpc.aio.AbortError` again: the handler has ended the call itself."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, LmkvError):
            return error
        self._log.error("%s failed unexpectedly", method, exc_info=error)
        return LmkvError(f"{method} failed unexpectedly: {error!r}; see the server's log")


async def _whole(parts: AsyncIterator[Any]) -> Any:
    """The only message of a request. Raises `BadMessage` if it does not come, or not in time."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(parts)
    except TimeoutError:
        raise BadMessage(f"no message within {MESSAGE_SECONDS:g} s; send it at once") from None
    except StopAsyncIteration:
        raise BadMessage("the call ended without a message; send one") from None


def _code_name(code: Any) -> str:
    """The name of a status code, which gRPC gives as what it was set to: the code, or its number."""
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return next((known.name for known in grpc.StatusCode if known.value[0] == number), "UNKNOWN")


async def _abort(error: LmkvError, context: Any) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
