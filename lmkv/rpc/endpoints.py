"""gRPC channels and servers: their options, TLS, health checks and reflection, unary calls, and the names of hosts."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lmkv import telemetry
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.requests import Interceptor
from lmkv.runtime.reload import Reloadable
from lmkv.telemetry import NO_SPAN
from lmkv.telemetry.calls import ServerCalls

Response = TypeVar("Response")

PLAINTEXT = Credentials()
MAX_MESSAGE_BYTES = 1 << 20
"""KV bytes are never sent by gRPC; clients and servers enforce this limit."""
MAX_CALLS_PER_CONNECTION = 1_000
"""Further calls wait in the client."""
HANDSHAKE_MS = 10_000
"""Timeout of the TLS and HTTP/2 handshake; gRPC's default is two minutes."""
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),  # default: a minute, for which keepalive would wait
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # nodes of a fleet connect directly
)
SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
)


async def make_server(
    service_names: Sequence[str],
    calls: ServerCalls | None = None,
    authenticator: Authenticator = OPEN_AUTHENTICATOR,
    *,
    checks: HealthService | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """Makes a server with lmkv's limits and error handling, and with health and reflection for the named services.

    `authenticator` checks every call, and `calls` counts unary ones. The caller registers handlers, binds, starts and
    stops the server. With `checks` the caller also sets the statuses; otherwise all services are healthy.
    """
    options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": max_message_bytes}
    options["grpc.max_send_message_length"] = max_message_bytes
    interceptor = Interceptor(calls or ServerCalls(), authenticator, MAX_MESSAGE_BYTES)
    server = grpc.aio.server(interceptors=[interceptor], options=tuple(options.items()))
    if checks is None:
        checks = HealthService(["", *service_names])
        for name in ("", *service_names):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


class HealthService(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # missing in the stubs
    """gRPC's health service with the RPC `List`, which the library does not implement."""

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
    """Binds a server to `host:port` or `unix:PATH`, with TLS if there is a certificate; returns the port.

    Raises `RuntimeError` if the address cannot be bound.
    """
    if not credentials.cert:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(credentials)))


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Server credentials that follow changes of the files. gRPC polls them before each handshake, in its own thread."""

    def make() -> Any:
        credentials.__post_init__()
        pair = (credentials.pem("key") or b"", credentials.pem("cert") or b"")
        return grpc.ssl_server_certificate_configuration([pair], credentials.pem("client_ca"))

    reloadable = Reloadable(credentials.paths, make)
    current = reloadable.get()

    def changed() -> Any:
        nonlocal current
        before, current = current, reloadable.get()
        return None if current is before else current

    return grpc.dynamic_ssl_server_credentials(
        current, changed, require_client_authentication=bool(credentials.client_ca)
    )


def open_channel(address: str, credentials: Credentials = PLAINTEXT) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH` with lmkv's limits, which reconnects on its own.

    It uses TLS if `credentials.ca` is set, and sends the token if there is one.
    """
    _keep_poller()
    if not (credentials.ca or credentials.token):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return ReloadingChannel(credentials.paths, lambda: _bare_channel(address, credentials), credentials.token.headers)


@functools.cache
def _keep_poller() -> None:
    """Keeps gRPC's polling thread alive until the process exits.

    gRPC stops the thread when the last channel is garbage-collected, and joins it under a lock that the creation of a
    channel needs in another thread: two event loops in one process can deadlock.
    """
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # missing in the stubs


def _bare_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    if not credentials.ca:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials.__post_init__()
    tls = grpc.ssl_channel_credentials(credentials.pem("ca"), credentials.pem("key"), credentials.pem("cert"))
    override = (("grpc.ssl_target_name_override", credentials.name),) if credentials.name else ()
    return grpc.aio.secure_channel(address, tls, options=(*CHANNEL_OPTIONS, *override))


async def call(
    method: Callable[..., Awaitable[Response]],
    name: str,
    address: str,
    request: object,
    timeout_seconds: float,
) -> Response:
    """Makes a unary call of `SERVICE/METHOD`, as a span of the current trace, or without one if `name` is empty.

    Raises the error that the server returned, or `Unreachable` if it does not answer or the channel is closed.
    """
    with telemetry.call(name, address) if name else NO_SPAN as span:
        try:
            response: Response = await answer_of(method(request, timeout=timeout_seconds, metadata=span.metadata))
        except grpc.RpcError as error:
            lmkv_error = from_rpc_error(error)
            span.set_rpc_status(lmkv_error.metadata.get("grpc_code", lmkv_error.code))
            raise lmkv_error from None
        except grpc.aio.UsageError:
            raise Unreachable("the connection was closed before the call") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None  # the call was cancelled, not this task
        span.set_rpc_status("OK")
        return response


OLD_CALLS_SECONDS = 60.0
"""Maximum duration of calls over a connection whose certificates were replaced. Streams then reconnect."""

Metadata = Sequence[tuple[str, str]]


class ReloadingChannel(grpc.aio.Channel):
    """The channel that `make` opens, reopened when one of the files changes; sends `headers` with each call.

    gRPC for Python reads a client's certificates once, and stubs are bound to a channel: so this wraps another one,
    which is replaced. Calls in flight end over the old one.
    """

    def __init__(
        self, paths: Sequence[str], make: Callable[[], grpc.aio.Channel], headers: Callable[[], Metadata]
    ) -> None:
        self._channels = Reloadable(paths, make)
        self._current = self._channels.get()
        self._headers = headers
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        newest = self._channels.get()
        if newest is not self._current:
            old, self._current = self._current, newest
            task = asyncio.create_task(old.close(OLD_CALLS_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._current

    @property
    def headers(self) -> Metadata:
        """The metadata to send with the next call."""
        return self._headers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        """Ends calls within `grace` seconds, at once if it is None. Idempotent."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._current.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the state differs from `last_observed_state`."""
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when it is connected."""
        await self.current.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A method for stubs, as the next three."""
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", args, options)


class _Method:
    """One method, called over the current channel."""

    def __init__(self, channel: ReloadingChannel, kind: str, args: Sequence[Any], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._args = args
        self._options = options
        self._bound: tuple[grpc.aio.Channel, Any] | None = None

    def __call__(self, *args: Any, metadata: Metadata | None = None, **options: Any) -> Any:
        channel = self._channel.current
        if self._bound is None or self._bound[0] is not channel:
            self._bound = channel, getattr(channel, self._kind)(*self._args, **self._options)
        return self._bound[1](*args, metadata=(*(metadata or ()), *self._channel.headers), **options)


async def answer_of(call: Any) -> Any:
    """The answer of a unary call. Raises as the call does; cancelled, it cancels the call.

    gRPC frees what it has allocated for a call when it has received the call's end, and nothing if the task that waits
    for the end is cancelled: about 1 KB per call, for ever (https://github.com/grpc/grpc/issues/43360).
    """
    try:
        await call.code()  # of its end; not the call, whose task would be cancelled
    except asyncio.CancelledError:
        cancel(call)
        raise
    return await call


def cancel(call: Any) -> None:
    """Cancels a call at the server, while gRPC's task waits for its end. Idempotent."""
    core = getattr(call, "_cython_call", None)  # without it, memory is lost
    if core is None:
        call.cancel()
    elif not core.done():
        core.cancel("cancelled by the client")


RESOLVE_TIMEOUT_SECONDS = 2.0


async def resolve(address: str) -> list[str]:
    """The addresses of `host:port`, sorted: IPv4 addresses, or IPv6 ones if there are no others.

    Raises `Unreachable` if the name is unknown or not resolved in time.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except TimeoutError:
        raise Unreachable(
            f"the name {host} was not resolved within {RESOLVE_TIMEOUT_SECONDS:g} s", address=address
        ) from None
    except OSError as error:
        raise Unreachable(f"the name {host} is unknown: {error.strerror}", address=address) from None
    # One address family only: a node registers once at each coordinator.
    four = {f"{place[0]}:{port}" for family, *_, place in found if family == socket.AF_INET}
    six = {f"[{place[0]}]:{port}" for family, *_, place in found if family == socket.AF_INET6}
    return sorted(four or six)
