"""Composition of the endpoint picker: gRPC server, routing, the engines' health, and HTTP for metrics and probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.config import PickerConfig
from lmkv.config.kinds import OFF
from lmkv.ext_proc.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.endpoints import HealthService
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.server import HttpOptions, HttpServer, address, bind_grpc, metrics_response
from lmkv_server.proxy.app import ProxyApp, authenticated
from lmkv_server.proxy.engine import BOTH
from lmkv_server.proxy.engine_routes import explain_route
from lmkv_server.proxy.engines import Endpoints, Resolve, name_of, resolve
from lmkv_server.proxy.metrics import PickerMetrics
from lmkv_server.proxy.picker.selection import EnginePicker
from lmkv_server.proxy.picker.service import SERVICE, ExternalProcessorService
from lmkv_server.proxy.router import Router
from lmkv_server.proxy.routing.key_lookup import KeyLookup
from lmkv_server.proxy.routing.pools import EnginePool, EnginePools, SessionAffinity, cost_by
from lmkv_server.proxy.routing.replicas import Replicas

logger = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
"""Services of gRPC's health protocol that the endpoint picker protocol names."""
MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Headers and metadata of a message, beside its body."""
READY_POLL_SECONDS = 0.1

OpenClient = Callable[[Sequence[str], Credentials, float], CoordinatorClient]
"""Makes the client of the coordinators: of their addresses, with credentials, and the timeout of lookups."""


class Picker(Router):
    """Serves `ext_proc` while it is entered."""

    def __init__(
        self, config: PickerConfig, *, open_client: OpenClient = CoordinatorClient, resolve: Resolve = resolve
    ) -> None:
        """`open_client` and `resolve` reach the coordinators and DNS.

        Raises `ConfigError` if no engine, or for its policy no coordinator, is configured.
        """
        config.check_complete()
        pools = EnginePools(EnginePool([], cost_by(config.policy), SessionAffinity(config.session_ttl)), None)
        self.engines = pools.engines
        """The engines that are known now."""
        self._metrics = PickerMetrics(self.engines)
        super().__init__(config, pools, self._metrics, resolve)
        self.metrics_port: int | None = None
        """The bound HTTP port once it is entered, if there is one."""
        self._config = config
        self._open_client = open_client
        self._is_closed = False
        self._checks = HealthService(["", LIVENESS, READINESS, SERVICE])
        self._lookup: KeyLookup | None = None

    @property
    def address(self) -> str:
        """`host:port` of its gRPC server."""
        return address(self._config.host, self.port)

    @property
    def unavailable_reason(self) -> str:
        """The reason why no request can be served; empty if requests can be."""
        if self._is_closed:
            return "the picker is stopping"
        if any(engine.is_available for engine in self.engines):
            return ""
        return (
            "; ".join(f"{engine.url}: {engine.unavailable_reason}" for engine in self.engines) or "no engine is known"
        )

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self._config
        endpoints = await self._open_endpoints(stack, [name_of(url, BOTH) for url in config.engines])
        if config.policy == "kv_aware":
            client = self._open_client(config.coordinator_address, config.credentials, config.lookup_timeout)
            stack.push_async_callback(client.aclose)
            self._lookup = KeyLookup(client, self._metrics, config.cluster_secret.encode())
            stack.push_async_callback(self._lookup.aclose)
            if config.replicate:
                self.pools.decode.replicas = Replicas(client, self._metrics)
        picker = EnginePicker(self.pools.decode, endpoints.clients, self._lookup, self._metrics, config.session_header)
        authenticator = Authenticator(config.auth_tokens)
        service = ExternalProcessorService(
            picker,
            endpoints,
            self._metrics,
            self._client_salts(authenticator),
            config,
        )
        server = await rpc.make_server(
            [SERVICE],
            authenticator=authenticator,
            checks=self._checks,
            max_message_bytes=config.max_body_bytes + MESSAGE_OVERHEAD_BYTES,
        )
        add_ExternalProcessorServicer_to_server(service, server)
        await self._set_ready(False)
        stack.push_async_callback(self._stop_background)
        stack.push_async_callback(self._stop, server)
        self.port = bind_grpc(server, config.host, config.port, "port", config.client_tls)
        if config.metrics_port not in (None, OFF):
            options = HttpOptions(
                host=config.host,
                port=config.metrics_port,
                key="metrics_port",
                credentials=config.client_tls,
                name="lmkv-picker-http",
            )
            http = HttpServer(self._app(authenticator), options)
            stack.push_async_callback(http.aclose)
            self.metrics_port = http.port
            await http.start()
        await server.start()
        self._background = asyncio.create_task(self._run_background(endpoints), name="lmkv-picker-background")

    async def _run_background(self, endpoints: Endpoints) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(endpoints.run())
            group.create_task(self._report_readiness())
            if self._lookup is not None:
                group.create_task(self._lookup.run())
            if replicas := self.pools.decode.replicas:
                group.create_task(replicas.run())

    async def _report_readiness(self) -> None:
        """Reports ready once an engine is healthy. Later failures of engines are answered request by request."""
        while self.unavailable_reason:  # noqa: ASYNC110 # only until an engine is healthy
            await asyncio.sleep(READY_POLL_SECONDS)
        await self._set_ready(True)

    async def _set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", LIVENESS):
            await self._checks.set(name, status.Value("SERVING"))
        for name in (READINESS, SERVICE):
            await self._checks.set(name, status.Value("SERVING" if is_ready else "NOT_SERVING"))

    async def _stop(self, server: grpc.aio.Server) -> None:
        self._is_closed = True
        await self._set_ready(False)
        await server.stop(self._config.stop_timeout)

    def _app(self, authenticator: Authenticator) -> ProxyApp:
        async def alive(_: Request) -> Response:
            return _json({"status": "ok"})

        async def ready(_: Request) -> Response:
            reason = self.unavailable_reason
            return _json({"status": "not ready", "detail": reason}, 503) if reason else _json({"status": "ok"})

        async def show_metrics(_: Request) -> Response:
            return metrics_response(self.metrics)

        routes = [
            authenticated(Route("/metrics", show_metrics), authenticator),
            authenticated(explain_route(self.pools), authenticator),
            Route("/healthz", alive),
            Route("/readyz", ready),
        ]
        guard = HostGuard(bound=self._config.host, allowed=self._config.allowed_hosts)
        return ProxyApp(Starlette(routes=routes), guard)


def _json(content: dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
