"""Composition of the proxy: HTTP server, request handler, health monitor, and the line of latencies in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from lmkv.auth.authenticator import Authenticator, is_loopback
from lmkv.config import ProxyConfig
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.server import HttpOptions, HttpServer, address
from lmkv_server.proxy.admission import Admission
from lmkv_server.proxy.app import PROBES, client_routes, make_app, operator_routes, probe_routes
from lmkv_server.proxy.engine import BOTH, DECODE, PREFILL, Engine
from lmkv_server.proxy.engine_routes import engine_routes
from lmkv_server.proxy.engines import Endpoints, EngineEndpoint, EnginesFile, Resolve, resolve
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.passthrough import PassThrough
from lmkv_server.proxy.pd.handler import RequestHandler
from lmkv_server.proxy.pd.prefill import HandoffIssuer
from lmkv_server.proxy.router import Router
from lmkv_server.proxy.routing.lookup import PrefixLookup
from lmkv_server.proxy.routing.pools import EnginePool, EnginePools, SessionAffinity, cost_by
from lmkv_server.proxy.routing.replicas import Replicas

logger = logging.getLogger(__name__)

ROLES = {"route": (BOTH,), "pd": (PREFILL, DECODE)}
"""Roles of engines by mode."""
IDLE_CONNECTIONS = 1_000
"""Connections beyond those of admitted requests: for probes, pages, and clients between requests."""


class Proxy(Router):
    """Serves the OpenAI API while it is entered."""

    def __init__(self, config: ProxyConfig, *, resolve: Resolve = resolve) -> None:
        """`resolve` reaches DNS. Raises `ConfigError` if the file of engines is invalid."""
        pools = _engine_pools(config)
        self._metrics = ProxyMetrics(pools.engines)
        super().__init__(config, pools, self._metrics, resolve)
        self._config = config
        self._file = (
            EnginesFile(config.engines_file, ROLES[config.mode], self._metrics.engines_file_failures.inc)
            if config.engines_file
            else None
        )

    @property
    def url(self) -> str:
        """The URL that it serves."""
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{address(self._config.host, self.port)}"

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self._config
        endpoints = await self._open_endpoints(stack, self._file or _endpoints(config))
        clients = endpoints.clients
        lookup = None
        if config.policy == "kv_aware":
            coordinators = CoordinatorClient(config.coordinator_address, config.credentials, config.lookup_timeout)
            stack.push_async_callback(coordinators.aclose)
            if config.replicate and config.mode == "route":
                self.pools.decode.replicas = Replicas(coordinators, self._metrics)
            lookup = PrefixLookup(coordinators, self._metrics, keeps_prompts=self.pools.decode.replicas is not None)
        handoffs = HandoffIssuer(config.handoff_keys, clients)
        stack.push_async_callback(handoffs.aclose)
        handler = RequestHandler(
            pools=self.pools,
            clients=clients,
            lookup=lookup,
            handoffs=handoffs,
            metrics=self._metrics,
        )
        pass_through = PassThrough(self.pools, clients, lookup, config, self._metrics)
        authenticator = Authenticator(config.auth_tokens)
        admission = Admission(config, self._metrics, self._client_salts(authenticator))
        guard = HostGuard(bound=config.host, allowed=config.allowed_hosts)
        changes = engine_routes(endpoints, ROLES[config.mode], _refusal(config, authenticator))
        routes = [
            *client_routes(admission, handler, pass_through),
            *operator_routes(self.pools, self._metrics, authenticator, changes),
            *probe_routes(admission, self.pools),
        ]
        options = HttpOptions(
            host=config.host,
            port=config.port,
            credentials=config.client_tls,
            name="lmkv-proxy-http",
            max_concurrent_requests=config.max_concurrent_requests + IDLE_CONNECTIONS,
            max_connections_per_client=config.max_connections_per_client,
            probes=PROBES,
            grace_seconds=config.stop_timeout,
        )
        http = HttpServer(make_app(routes, guard), options)
        stack.push_async_callback(self._stop_background)  # after the last request: the monitor ends requests that hang
        stack.push_async_callback(http.aclose)
        stack.callback(setattr, admission, "is_closed", True)
        self.port = http.port
        await http.start()
        self._background = asyncio.create_task(self._run_background(endpoints), name="lmkv-proxy-background")

    async def _run_background(self, endpoints: Endpoints) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(endpoints.run())
            group.create_task(self._log_latencies_periodically())
            if replicas := self.pools.decode.replicas:
                group.create_task(replicas.run())

    async def _log_latencies_periodically(self) -> None:
        """Logs the latencies periodically while there are requests, and once at the end."""
        logged = 0
        try:
            while True:
                await asyncio.sleep(self._config.stats_interval)
                if self._metrics.latencies.request_count != logged:
                    logged = self._metrics.latencies.request_count
                    self._log_latencies()
        finally:
            if self._metrics.latencies.request_count != logged:
                self._log_latencies()

    def _log_latencies(self) -> None:
        logger.info("latencies of %s", self._metrics.latencies.line())


def _refusal(config: ProxyConfig, authenticator: Authenticator) -> str:
    """Says why no client may change the engines; empty if clients of the right role may."""
    if is_loopback(config.host) or config.tls_client_ca or not authenticator.is_open:
        return ""
    return "engines cannot be changed at a port that others reach without a token; set auth_tokens at the proxy"


def _engine_pools(config: ProxyConfig) -> EnginePools:
    def pool(engines: list[Engine], reserve: Sequence[Engine] = ()) -> EnginePool:
        cost, affinity = cost_by(config.policy), SessionAffinity(config.session_ttl)
        return EnginePool(engines, cost, affinity, reserve=reserve)

    if config.mode == "route":
        return EnginePools(pool([]), None)
    prefillers: list[Engine] = []
    return EnginePools(pool([], reserve=prefillers), pool(prefillers))


def _endpoints(config: ProxyConfig) -> list[EngineEndpoint]:
    """The engines that the configuration names."""
    if config.mode == "route":
        return [EngineEndpoint(url=url, role=BOTH) for url in config.engines]
    scheme = "https" if config.engine_tls_ca else "http"
    by_role = {PREFILL: config.prefillers, DECODE: config.decoders}
    return [
        EngineEndpoint(url=f"{scheme}://{one}", role=role) for role, addresses in by_role.items() for one in addresses
    ]
