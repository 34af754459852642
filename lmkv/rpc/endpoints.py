"""gRPC as lmkv uses it: one set of channel options, servers with health and reflection, errors both ways."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lmkv import telemetry
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.rpc.error_status import DOMAIN, MAX_TEXT, from_rpc_error, from_status, short, to_status
from lmkv.rpc.interceptor import Interceptor
from lmkv.rpc.reloading_channel import ReloadingChannel
from lmkv.runtime.reload import Reloadable
from lmkv.telemetry.calls import ServerCalls

__all__ = [
    "CHANNEL_OPTIONS",
    "DOMAIN",
    "MAX_MESSAGE_BYTES",
    "MAX_TEXT",
    "PLAINTEXT",
    "SERVER_OPTIONS",
    "add_port",
    "call",
    "from_rpc_error",
    "from_status",
    "make_server",
    "open_channel",
    "short",
    "to_status",
]

Response = TypeVar("Response")

PLAINTEXT = Credentials()
MAX_MESSAGE_BYTES = 1 << 20
"""Bytes never ride gRPC; this limit, the same on every end, keeps it true."""
MAX_CALLS_PER_CONNECTION = 1_000
"""Further ones wait in the client until one has ended."""
HANDSHAKE_MS = 10_000
"""Most time from a connection until TLS and HTTP/2 have begun; gRPC would wait two minutes."""
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, and keepalive waits for pings that are on their way
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # nodes of one fleet reach each other directly
)
SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
)


async def make_server(
    service_names: Sequence[str], calls: ServerCalls | None = None, authenticator: Authenticator = OPEN_AUTHENTICATOR
) -> grpc.aio.Server:
    """A server with lmkv's limits and error handling; health and reflection already serve the named services.

    Every call passes `gate`, and unary ones are counted in `calls`.

    The caller registers its handlers, binds, starts and stops it.
    """
    server = grpc.aio.server(interceptors=[Interceptor(calls or ServerCalls(), authenticator)], options=SERVER_OPTIONS)
    checks = HealthService(["", *service_names])
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", *service_names):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


class HealthService(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # the stubs lack it
    """gRPC's health service with its `List`, which the library does not implement."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    async def List(  # noqa: N802  # its name in the proto
        self, _request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """The status of every service of this server."""
        response = health_pb2.HealthListResponse()
        for name in self._names:
            response.statuses[name].CopyFrom(await self.Check(health_pb2.HealthCheckRequest(service=name), context))
        return response


def add_port(server: grpc.aio.Server, address: str, credentials: Credentials = PLAINTEXT) -> int:
    """Has a server listen at `host:port` or `unix:PATH`, with TLS if there is a certificate; returns the port.

    Raises `RuntimeError` if the address cannot be had.
    """
    if not credentials.cert:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(credentials)))


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Credentials that gRPC asks for before each handshake, in a thread of its own."""

    def make() -> Any:
        credentials.__post_init__()
        pair = (credentials.pem("key") or b"", credentials.pem("cert") or b"")
        return grpc.ssl_server_certificate_configuration([pair], credentials.pem("client_ca"))

    reloadable = Reloadable(credentials.paths, make)
    told = reloadable.get()

    def news() -> Any:
        nonlocal told
        known, told = told, reloadable.get()
        return None if told is known else told

    return grpc.dynamic_ssl_server_credentials(told, news, require_client_authentication=bool(credentials.client_ca))


def open_channel(address: str, credentials: Credentials = PLAINTEXT) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH` with lmkv's limits. It connects by itself, and again after a loss.

    It speaks TLS if there is somebody to trust, and shows the token if there is one.
    """
    _keep_poller()
    if not (credentials.ca or credentials.token):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return ReloadingChannel(credentials.paths, lambda: _bare_channel(address, credentials), credentials.token.headers)


@functools.cache
def _keep_poller() -> None:
    """Keeps gRPC's polling thread for as long as the process lives.

    gRPC ends it when the process's last channel is collected, whatever thread that happens in, and waits for its end
    under a lock that a channel being made in another thread needs: with two event loops, both can stand still.
    """
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it


def _bare_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    if not credentials.ca:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials.__post_init__()
    shown = grpc.ssl_channel_credentials(credentials.pem("ca"), credentials.pem("key"), credentials.pem("cert"))
    named = (("grpc.ssl_target_name_override", credentials.name),) if credentials.name else ()
    return grpc.aio.secure_channel(address, shown, options=(*CHANNEL_OPTIONS, *named))


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
            span.set_rpc_status(meaning.metadata.get("grpc_code", meaning.code))
            raise meaning from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None  # not we were cancelled, but the call
        span.set_rpc_status("OK")
        return response
