"""The coordinator: a gRPC and an HTTP server over the registry, and the task that expires leases."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_address
from typing import Self

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import CertificateEnd
from lmkv.config import CoordinatorConfig
from lmkv.telemetry.calls import BuildInfo, ServerCalls
from lmkv_server.coordinator.core.instances import JoinAdmission
from lmkv_server.coordinator.http.app import CoordinatorApp, make_app
from lmkv_server.coordinator.http.tokenizers import Tokenizers
from lmkv_server.coordinator.layout_store.shared_map import SharedMap, SharedMapMetrics
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.services.services import SERVICE_NAMES, Services, Tenants
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.server import HttpOptions, HttpServer, address, bind_grpc

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time that calls in flight get to end when the coordinator stops."""
STOP_POLL_SECONDS = 0.01
STOP_GRACE_SECONDS = 0.1
"""Time to send the last responses when it stops."""
SWEEP_STEP = 20_000
"""Chunks that are swept before other tasks run: about a millisecond."""
SWEEP_SECONDS = 0.5
"""Longest time until retired slots are swept."""


class Coordinator:
    """Serves `CacheService`, `RegistryService`, `ReportService`, `LookupService` and `Operations` while it is entered.

    The constructor raises `ConfigError` if a file or a URL of the configuration is invalid, entering if a port or a
    tokenizer is unavailable.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.host = config.host
        self.grpc_ports = dict(config.grpc_ports)
        """The gRPC ports by configuration key, as bound once the coordinator is entered."""
        self.http_ports = dict(config.http_ports)
        """The HTTP ports by configuration key, as bound once the coordinator is entered."""
        self._credentials = config.credentials
        self.authenticator = Authenticator(config.auth_tokens)
        """Admits callers, and maps them to tenants."""
        self._guard = HostGuard(bound=config.host, allowed=config.allowed_hosts)
        self._admission = JoinAdmission()
        self.shared = SharedMap(config.layout_map_url, lease_ttl=config.lease_ttl) if config.layout_map_url else None
        self.metrics = CollectorRegistry()
        """Its metrics, once it is entered."""
        self._calls = ServerCalls()
        self._tenants: Tenants | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        """The first gRPC port."""
        return next(iter(self.grpc_ports.values()))

    @property
    def address(self) -> str:
        """`host:port` of its first gRPC port."""
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
        """The services by tenant, once it is entered."""
        assert self._tenants is not None, "the coordinator has not been entered"
        return self._tenants

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        stack = self._stack
        tenants = self._tenants = Tenants(self._make_services)
        if self.shared is not None:
            stack.push_async_callback(self.shared.aclose)
        stack.push_async_callback(tenants.aclose)
        for tenant in self.authenticator.callers.tenants:
            tenants.of(tenant)
        server = await rpc.make_server(SERVICE_NAMES, self._calls, self.authenticator)
        tenants.add_to(server)
        app = self._make_app(tenants)
        self.metrics = app.metrics
        http: list[HttpServer] = []
        stack.push_async_callback(self._stop_serving, server, http)
        for key, port in self.http_ports.items():
            http.append(self._make_http_server(app, key, port))
            self.http_ports[key] = http[-1].port
        for key, port in self.grpc_ports.items():
            self.grpc_ports[key] = bind_grpc(server, self.host, port, key, self._credentials)
        if self.shared is not None:
            self.shared.address = address(_reachable(self.host), self.port)
            await self.shared.start(tenants)
        await server.start()
        for each in http:
            await each.start()
        self._sweeper = asyncio.create_task(_sweep(tenants), name="lmkv-coordinator-sweeper")
        stack.push_async_callback(_stop_sweeping, self._sweeper)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def wait(self) -> None:
        """Waits until the coordinator stops serving. Raises an unexpected error of the sweeper."""
        if self._sweeper is not None:
            await asyncio.shield(self._sweeper)

    async def aclose(self) -> None:
        """Stops serving: refuses new calls, waits up to `STOP_SECONDS` for calls in flight, then ends streams.

        Idempotent.
        """
        await self._stack.aclose()

    def _make_services(self, tenant: str) -> Services:
        return Services(
            self._config,
            tenant,
            authenticator=self.authenticator,
            admission=self._admission,
            layout_store=self.shared.of(tenant) if self.shared else None,
        )

    def _make_app(self, tenants: Tenants) -> CoordinatorApp:
        own: list[Collector] = [self._calls, CertificateEnd(self._credentials.cert), BuildInfo()]
        if self.shared is not None:
            own.append(SharedMapMetrics(self.shared))
        tokenizers = Tokenizers(self._config.tokenizers)
        return make_app(tenants, tokenizers, self._guard, self.authenticator, *own, grpc_port=lambda: self.port)

    def _make_http_server(self, app: CoordinatorApp, key: str, port: int) -> HttpServer:
        options = HttpOptions(
            host=self.host,
            port=port,
            key=key,
            credentials=self._credentials,
            max_connections_per_client=self._config.max_connections_per_client,
            grace_seconds=STOP_SECONDS,
        )
        return HttpServer(app, options)

    async def _stop_serving(self, server: grpc.aio.Server, http: Sequence[HttpServer]) -> None:
        refusing = asyncio.create_task(server.stop(STOP_SECONDS))  # also waits for streams, which never end
        async with asyncio.TaskGroup() as group:
            for each in http:
                group.create_task(each.aclose())
            await self._calls_end()
        refusing.cancel()
        await asyncio.gather(refusing, return_exceptions=True)
        await server.stop(STOP_GRACE_SECONDS)  # sends the last responses

    async def _calls_end(self) -> None:
        """Waits up to `STOP_SECONDS` until no unary call is in flight. Streams stay open: calls may need nodes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._calls.in_flight_count:  # noqa: ASYNC110 # a few times a second, once in its life
                    await asyncio.sleep(STOP_POLL_SECONDS)


def _reachable(host: str) -> str:
    """The host that a coordinator bound, or the host's name if it bound all addresses."""
    try:
        return socket.gethostname() if ip_address(host).is_unspecified else host
    except ValueError:  # a name
        return host or socket.gethostname()


async def _stop_sweeping(sweeper: asyncio.Task[None]) -> None:
    sweeper.cancel()
    await asyncio.wait([sweeper])


async def _sweep(tenants: Tenants) -> None:
    """Expires leases, sweeps retired slots and samples the fleet until cancelled."""
    lease_ttl = tenants.unnamed.core.instances.lease_ttl
    woken = time.monotonic()
    while True:
        now = time.monotonic()
        late_seconds = now - woken
        if late_seconds > lease_ttl / 3:
            # This process was paused and could not receive reports in that time.
            logger.warning("the process was paused for %.1f s; extending leases by that", late_seconds)
            for services in tenants:
                services.core.instances.postpone(late_seconds)
        pause = min(_sweep_once(services.core, now) for services in tenants)
        for services in tenants:
            services.history.take_if_due(services.core.instances, time.time())
        woken = now + pause
        await asyncio.sleep(pause)


def _sweep_once(registry: Registry, now: float) -> float:
    """Expires leases and sweeps one step; returns the seconds until the next call."""
    for instance in registry.expire(now):
        info = instance.info
        logger.warning("instance %s at %s is gone: its lease expired", info.instance_id, info.peer_address)
    if registry.layout.sweep(SWEEP_STEP):
        return 0.0
    expiry = registry.instances.next_expiry()
    return SWEEP_SECONDS if expiry is None else min(max(expiry - now, 0.001), SWEEP_SECONDS)
