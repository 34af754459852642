"""The coordinator: a gRPC and an HTTP server over the registry, and the sweeper that ends leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from lmkv import rpc
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.certificates import CertificateEnd
from lmkv.auth.credentials import Credentials
from lmkv.errors import ConfigError
from lmkv.telemetry.calls import ServerCalls
from lmkv_server.coordinator.core.join_admission import JoinAdmission
from lmkv_server.coordinator.http.app import make_app
from lmkv_server.coordinator.http.tokenizers import Tokenizers
from lmkv_server.coordinator.layout_store.metrics import SharedMapMetrics
from lmkv_server.coordinator.layout_store.shared_map import SharedMap
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.services.services import SERVICE_NAMES, Services
from lmkv_server.coordinator.tenants import Tenants
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.ports import address, listen
from lmkv_server.http.server import MAX_CONNECTIONS_PER_CLIENT, HttpServer

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Most time that calls in flight get to end when the coordinator stops."""
STOP_POLL_SECONDS = 0.01
STOP_GRACE_SECONDS = 0.1
"""Time for answers that are being sent when it stops."""
SWEEP_STEP = 20_000
"""Chunks that are swept between two looks at what else there is to do: about a millisecond."""
SWEEP_SECONDS = 0.5
"""Longest time until what was given up is swept."""


class Coordinator:
    """Serves `CacheService`, `RegistryService` and `Operations` while it is entered.

    It speaks gRPC on `port`, or on `grpc_ports` if they are given, and HTTP on `http_ports`. Ports are given by the
    configuration key that sets them; 0 takes a free one. All speak TLS if `credentials` have a certificate, and let in
    whom `gate` knows, each to its tenant. Leases last `lease_ttl` seconds, operations that ended are kept for
    `operation_ttl`. It makes tokens of text for the models whose folders `tokenizers` names, and shares its layout map
    at `layout_map_url`, if there is one. Making it raises `ConfigError` if that cannot be used, entering it if a port
    or a tokenizer cannot be had. `HostGuard` has the meaning of `allowed_hosts`, `Connections` of
    `max_connections_per_client`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 9000,
        grpc_ports: Mapping[str, int] | None = None,
        http_ports: Mapping[str, int] | None = None,
        lease_ttl: float = 3.0,
        operation_ttl: float = 3600.0,
        cluster_secret: str = "",
        tokenizers: Mapping[str, str] | None = None,
        credentials: Credentials = rpc.PLAINTEXT,
        gate: Authenticator = OPEN_AUTHENTICATOR,
        layout_map_url: str = "",
        allowed_hosts: Sequence[str] = (),
        max_connections_per_client: int = MAX_CONNECTIONS_PER_CLIENT,
    ) -> None:
        self.host = host
        self.grpc_ports = dict(grpc_ports or {"port": port})
        """The ports that speak gRPC, by the key that set each; the real ones once it is entered."""
        self.http_ports = dict(http_ports or {})
        """The ports that speak HTTP, likewise."""
        self._lease_ttl = lease_ttl
        self._operation_ttl = operation_ttl
        self._secret = cluster_secret.encode()
        self._tokenizers = tokenizers or {}
        self._credentials = credentials
        self._gate = gate
        self._guard = HostGuard(bound=host, allowed=allowed_hosts)
        self._max_connections_per_client = max_connections_per_client
        self._admission = JoinAdmission()
        self.shared = SharedMap(layout_map_url, lease_ttl=lease_ttl) if layout_map_url else None
        """The layout map that it shares with others, if it is to."""
        self.metrics = CollectorRegistry()
        """What it knows and has done, once it is entered."""
        self._calls = ServerCalls()
        self._tenants: Tenants | None = None
        self._server: grpc.aio.Server | None = None
        self._http: list[HttpServer] = []
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The first port that speaks gRPC."""
        return next(iter(self.grpc_ports.values()))

    @property
    def address(self) -> str:
        """`host:port` to call it at."""
        return address(self.host, self.port)

    @property
    def http_address(self) -> str:
        """`host:port` of its HTTP server; empty if it has none."""
        return next((address(self.host, port) for port in self.http_ports.values()), "")

    @property
    def url(self) -> str:
        """`http://host:port`, or `https://`; empty if it has no HTTP server."""
        scheme = "https" if self._credentials.cert else "http"
        return f"{scheme}://{self.http_address}" if self.http_address else ""

    @property
    def tenants(self) -> Tenants:
        """What it knows, by tenant, once it is entered."""
        assert self._tenants is not None, "the coordinator has not been entered"
        return self._tenants

    async def __aenter__(self) -> Self:
        tenants = self._tenants = Tenants(self._make_services)
        calls = self._calls
        for tenant in self._gate.callers.tenants:
            tenants.of(tenant)
        server = await rpc.make_server(SERVICE_NAMES, calls, self._gate)
        tenants.add_to(server)
        own: tuple[Collector, ...] = (calls, CertificateEnd(self._credentials.cert))
        if self.shared is not None:
            own = (*own, SharedMapMetrics(self.shared))
        tokenizers = Tokenizers(self._tokenizers)
        app = make_app(tenants, tokenizers, self._guard, self._gate, *own, grpc_port=lambda: self.port)
        self.metrics = app.metrics
        try:
            for key, port in self.grpc_ports.items():
                self.grpc_ports[key] = _bind(server, self.host, port, key, self._credentials)
            for key, port in self.http_ports.items():
                http = HttpServer(
                    self.host,
                    port,
                    key,
                    app,
                    self._credentials,
                    max_connections_per_client=self._max_connections_per_client,
                    grace_seconds=STOP_SECONDS,
                )
                self.http_ports[key] = http.port
                self._http.append(http)
            if self.shared is not None:
                await self.shared.start(tenants)
            await server.start()
            for http in self._http:
                await http.start()
        except BaseException:
            await self._stop_serving(server)
            await self._stop_sharing()
            raise
        self._server = server
        self._sweeper = asyncio.create_task(_sweep(tenants), name="lmkv-coordinator-sweeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def wait(self) -> None:
        """Lasts as long as the coordinator serves. Raises whatever, against all expectation, stopped its sweeper."""
        if self._sweeper is not None:
            await asyncio.shield(self._sweeper)

    async def aclose(self) -> None:
        """Stops serving: refuses new calls, waits up to `STOP_SECONDS` for those in flight, then ends streams.

        Idempotent.
        """
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await self._stop_serving(server)
        await self._stop_sharing()
        if self._tenants is not None:
            await self._tenants.aclose()

    def _make_services(self, tenant: str) -> Services:
        return Services(
            lease_ttl=self._lease_ttl,
            operation_ttl=self._operation_ttl,
            cluster_secret=self._secret,
            quota=lambda: self._gate.quota(tenant),
            admission=self._admission,
            layout_store=self.shared.of(tenant) if self.shared else None,
        )

    async def _stop_sharing(self) -> None:
        if self.shared is not None:
            await self.shared.aclose()

    async def _stop_serving(self, server: grpc.aio.Server) -> None:
        http, self._http = self._http, []
        refusing = asyncio.create_task(server.stop(STOP_SECONDS))  # would wait for streams, too, which never end
        async with asyncio.TaskGroup() as group:
            for each in http:
                group.create_task(each.aclose())
            await self._calls_end()
        refusing.cancel()
        await asyncio.gather(refusing, return_exceptions=True)
        await server.stop(STOP_GRACE_SECONDS)  # time to send the last answers

    async def _calls_end(self) -> None:
        """Waits until no unary call is in flight, at most `STOP_SECONDS`. Streams stay open: calls may need nodes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._calls.in_flight_count:  # noqa: ASYNC110 # a few times a second, once in its life
                    await asyncio.sleep(STOP_POLL_SECONDS)


async def _sweep(tenants: Tenants) -> None:
    """Ends leases on time and cleans up behind those who left, for ever."""
    lease_ttl = tenants.unnamed.core.instances.lease_ttl
    woken = time.monotonic()
    while True:
        now = time.monotonic()
        late_seconds = now - woken
        if late_seconds > lease_ttl / 3:
            # This process stood still, and so could not hear anybody: that time is not the nodes' silence.
            logger.warning("stood still for %.1f s; leases are longer by that", late_seconds)
            for services in tenants:
                services.core.instances.postpone(late_seconds)
        pause = min(_sweep_once(services.core, now) for services in tenants)
        woken = now + pause
        await asyncio.sleep(pause)


def _sweep_once(registry: Registry, now: float) -> float:
    """Does what is due, or a step of it; returns the seconds until it should be done again."""
    for instance in registry.expire(now):
        info = instance.info
        logger.warning("instance %s at %s is gone: its lease ran out", info.instance_id, info.peer_address)
    if registry.layout.sweep(SWEEP_STEP):
        return 0.0
    expiry = registry.instances.next_expiry()
    return SWEEP_SECONDS if expiry is None else min(max(expiry - now, 0.001), SWEEP_SECONDS)


def _bind(server: grpc.aio.Server, host: str, port: int, key: str, credentials: Credentials) -> int:
    """Binds one port of the server and returns it. Raises `ConfigError` that names the key and the fix."""
    listen(host, port, key).close()  # says why a port cannot be had, which gRPC does not: it only logs
    try:
        return rpc.add_port(server, address(host, port), credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{key} {port} on {host} cannot be had ({error}); set {key} to a free port", key=key
        ) from None
