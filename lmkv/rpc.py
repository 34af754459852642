"""gRPC as lmkv uses it: one set of channel options, servers with health and reflection, errors both ways."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from lmkv import telemetry
from lmkv.errors import Full, LmkvError, Unreachable
from lmkv.fresh import Fresh
from lmkv.renewed_channel import RenewedChannel
from lmkv.telemetry.calls import Calls
from lmkv.tls import Tls

logger = logging.getLogger(__name__)

Response = TypeVar("Response")

DOMAIN = "lmkv.v1"
PLAINTEXT = Tls()
MAX_MESSAGE_BYTES = 1 << 20
"""Bytes never ride gRPC; this limit, the same on every end, keeps it true."""
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # nodes of one fleet reach each other directly
)
SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


MAX_TEXT = 500
"""Characters of a message, or of a value in its metadata, that travel: trailers have a limit, and inputs are quoted."""


def short(text: str) -> str:
    """The text, cut off if it is too long to travel."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def to_status(error: LmkvError) -> status_pb2.Status:
    """The error as `google.rpc.Status` with one `ErrorInfo`, and `RetryInfo` if it knows when to come back."""
    status = status_pb2.Status(code=getattr(code_pb2, error.code), message=short(str(error)))
    metadata = {name: short(value) for name, value in error.metadata.items()}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if isinstance(error, Full):
        delay = float(error.metadata.get("retry_seconds", 1.0))
        details.append(
            error_details_pb2.RetryInfo(
                retry_delay=duration_pb2.Duration(nanos=round(delay % 1 * 1e9), seconds=int(delay))
            )
        )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail, deterministic=True)  # the same refusal is the same bytes
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> LmkvError:
    """The error in a status; a plain `LmkvError` where it names no reason that this version knows."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in LmkvError.by_reason:
            return LmkvError.by_reason[info.reason](status.message, **info.metadata)
    return LmkvError(status.message, code=status.code)


def from_rpc_error(error: grpc.RpcError) -> LmkvError:
    """What a failed call means: the other side's error, or `Unreachable` if it gave none."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # the status in the trailers contradicts the call's own
        status = None
    if status is not None:
        return from_status(status)
    code = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    text = error.details() if callable(getattr(error, "details", None)) else str(error)
    kind = Unreachable if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) else LmkvError
    fix = next((f"; {fix}" for sign, fix in _TLS_FIXES.items() if sign in str(text)), "")
    return kind(f"{code.name}: {text}{fix}", grpc_code=code.name)


_TLS_FIXES = {
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: unset tls_ca here, or set tls_cert and tls_key there",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of those whom tls_ca names, or out of date",
    "Hostname Verification Check failed": "the server's certificate is for another name than the address has",
    "failed to connect to all addresses; last error: UNAVAILABLE": (
        "if the server speaks TLS, set tls_ca here, and if it asks for certificates, tls_cert and tls_key too"
    ),
}
"""What to do, by what gRPC says when the two ends do not agree on TLS."""


class _Errors(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns what handlers raise into statuses, so that handlers only translate; and counts unary calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None  # type: ignore[return-value]
        method = handler_call_details.method
        if handler.response_streaming:
            inner_stream = handler.stream_stream or handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    responses = inner_stream(request, context)
                    if inspect.isawaitable(responses):  # it writes them itself, as gRPC's own health service does
                        await responses
                        return
                    async for response in responses:
                        yield response
                except Exception as error:
                    await _abort(_refusal(error, method), context)

            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(stream, handler.request_deserializer, handler.response_serializer)

        inner = handler.unary_unary or handler.stream_unary

        metadata = handler_call_details.invocation_metadata

        async def unary(request: Any, context: Any) -> Any:
            with self._calls.observe(method, metadata) as call:
                try:
                    return await inner(request, context)
                except grpc.aio.AbortError:  # the handler aborted the call itself
                    call.failed(_code_name(context.code()))
                    raise
                except Exception as error:
                    refusal = _refusal(error, method)
                    call.failed(refusal.code)
                    await _abort(refusal, context)

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, handler.request_deserializer, handler.response_serializer)


def _refusal(error: Exception, method: str) -> LmkvError:
    """The error that the caller is told. Raises what is none: the handler has aborted the call itself."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, LmkvError):
        return error
    logger.exception("%s failed unexpectedly", method)
    return LmkvError(f"{method} failed unexpectedly: {error!r}; see the server's log")


def _code_name(code: Any) -> str:
    """The name of a status code, which gRPC gives as what it was set to: the code, or its number."""
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return next((known.name for known in grpc.StatusCode if known.value[0] == number), "UNKNOWN")


async def _abort(error: LmkvError, context: Any) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


async def make_server(service_names: Sequence[str], calls: Calls | None = None) -> grpc.aio.Server:
    """A server with lmkv's limits and error handling; health and reflection already serve the named services.

    Unary calls are counted in `calls`.

    The caller registers its handlers, binds, starts and stops it.
    """
    server = grpc.aio.server(interceptors=[_Errors(calls or Calls())], options=SERVER_OPTIONS)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", *service_names):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


def add_port(server: grpc.aio.Server, address: str, tls: Tls = PLAINTEXT) -> int:
    """Has a server listen at `host:port` or `unix:PATH`, with TLS if there is a certificate; returns the port.

    Raises `RuntimeError` if the address cannot be had.
    """
    if not tls.cert:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(tls)))


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials that gRPC asks for before each handshake, in a thread of its own."""

    def make() -> Any:
        tls.__post_init__()
        pair = (tls.pem("key") or b"", tls.pem("cert") or b"")
        return grpc.ssl_server_certificate_configuration([pair], tls.pem("client_ca"))

    fresh = Fresh(tls.paths, make)
    told = fresh.get()

    def news() -> Any:
        nonlocal told
        known, told = told, fresh.get()
        return None if told is known else told

    return grpc.dynamic_ssl_server_credentials(told, news, require_client_authentication=bool(tls.client_ca))


def open_channel(address: str, tls: Tls = PLAINTEXT) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH` with lmkv's limits. It connects by itself, and again after a loss.

    It speaks TLS if there is somebody to trust.
    """
    if not tls.ca:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return RenewedChannel(tls.paths, lambda: _secure_channel(address, tls))


def _secure_channel(address: str, tls: Tls) -> grpc.aio.Channel:
    tls.__post_init__()
    credentials = grpc.ssl_channel_credentials(tls.pem("ca"), tls.pem("key"), tls.pem("cert"))
    named = (("grpc.ssl_target_name_override", tls.name),) if tls.name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *named))


async def call(
    method: Callable[..., Awaitable[Response]], name: str, address: str, request: object, timeout_seconds: float
) -> Response:
    """One unary call of `SERVICE/METHOD`, told to the trace that the task is in, and continued there.

    Raises the other side's error, or `Unreachable`, also where the channel is closed under the call.
    """
    with telemetry.call(name, address) as span:
        try:
            response = await method(request, timeout=timeout_seconds, metadata=span.metadata)
        except grpc.RpcError as error:
            meaning = from_rpc_error(error)
            span.answered(meaning.metadata.get("grpc_code", meaning.code))
            raise meaning from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None  # not we were cancelled, but the call
        span.answered("OK")
        return response
