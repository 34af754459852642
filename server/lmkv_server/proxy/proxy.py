"""The proxy: an HTTP server over an exchange, the watch over its engines, and the table on the log."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.certificates import CertificateEnd
from lmkv.config import ProxyConfig
from lmkv_server.http.guard import HostGuard
from lmkv_server.http.ports import address
from lmkv_server.http.server import HttpServer
from lmkv_server.proxy.admission import Admission
from lmkv_server.proxy.app import PROBES, make_app
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.pd.handler import RequestHandler
from lmkv_server.proxy.pd.handoffs import Handoffs
from lmkv_server.proxy.routing.affinity import Sessions
from lmkv_server.proxy.routing.engines import BOTH, DECODE, PREFILL, Engine, Fleet, Pool
from lmkv_server.proxy.routing.health import HealthWatch
from lmkv_server.proxy.routing.lookups import Lookups
from lmkv_server.proxy.routing.policies import cost_by
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream.client import Upstream, open_session

logger = logging.getLogger(__name__)

IDLE_CONNECTIONS = 1_000
"""Connections beyond those of the requests that are let in: for probes, pages, and clients between two requests."""


class Proxy:
    """Serves the OpenAI API while it is entered. Entering raises `ConfigError` if the port cannot be had."""

    def __init__(self, config: ProxyConfig) -> None:
        self.port = config.port
        """The real one once it is entered."""
        self.fleet = _fleet(config)
        self.statistics = Statistics()
        self._metrics = Metrics(self.fleet.engines)
        self.metrics = self._metrics.registry
        """What it knows and has done."""
        self.metrics.register(CertificateEnd(config.tls_cert))
        self._config = config
        self._stack = AsyncExitStack()
        self._chores: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{address(self._config.host, self.port)}"

    async def __aenter__(self) -> Self:
        config = self._config
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            contexts = config.engine_tls.client_contexts()
            upstreams = {engine: Upstream(engine, session, contexts) for engine in self.fleet.engines}
            lookups = None
            if config.policy == "kv_aware":
                lookups = Lookups(config.coordinator_address, config.credentials, config.lookup_timeout, self._metrics)
                stack.push_async_callback(lookups.aclose)
            handoffs = Handoffs(config.handoff_keys, upstreams)
            stack.push_async_callback(handoffs.aclose)
            exchange = RequestHandler(
                fleet=self.fleet,
                upstreams=upstreams,
                lookups=lookups,
                handoffs=handoffs,
                statistics=self.statistics,
                metrics=self._metrics,
            )
            door = Admission(
                self.statistics,
                self._metrics,
                limit=config.max_concurrent_requests,
                max_body_bytes=config.max_body_bytes,
                timeout_seconds=config.request_timeout,
                session_header=config.session_header,
            )
            gate = Authenticator(config.auth_tokens)
            guard = HostGuard(bound=config.host, allowed=config.allowed_hosts)
            app = make_app(door, exchange, self.fleet, self.statistics, self._metrics, gate, guard)
            http = HttpServer(
                config.host,
                config.port,
                "port",
                app,
                config.client_tls,
                name="lmkv-proxy-http",
                max_concurrent_requests=config.max_concurrent_requests + IDLE_CONNECTIONS,
                max_connections_per_client=config.max_connections_per_client,
                probes=PROBES,
                grace_seconds=config.stop_timeout,
            )
            stack.push_async_callback(self._stop_chores)  # after the last request: they are what ends calls that hang
            stack.push_async_callback(http.aclose)
            stack.callback(setattr, door, "is_closing", True)
            self.port = http.port
            await http.start()
            watch = HealthWatch(
                list(upstreams.values()),
                interval_seconds=config.health_interval,
                timeout_seconds=config.health_timeout,
                api_key=config.engine_api_key,
            )
            self._chores = asyncio.create_task(self._do_chores(watch), name="lmkv-proxy-chores")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def wait(self) -> None:
        """Lasts as long as the proxy serves. Raises whatever, against all expectation, stopped its watch."""
        if self._chores is not None:
            await asyncio.shield(self._chores)

    async def aclose(self) -> None:
        """Stops serving; requests under way get `stop_timeout`. Repeating it is safe."""
        await self._stack.aclose()

    async def _stop_chores(self) -> None:
        chores, self._chores = self._chores, None
        if chores is not None:
            chores.cancel()
            await asyncio.gather(chores, return_exceptions=True)

    async def _do_chores(self, watch: HealthWatch) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run())
            group.create_task(self._tell_latencies())

    async def _tell_latencies(self) -> None:
        """Logs the table while there is traffic, for ever, and once more in the end."""
        told = 0
        try:
            while True:
                await asyncio.sleep(self._config.stats_interval)
                if self.statistics.request_count != told:
                    told = self.statistics.request_count
                    self._log_latencies()
        finally:
            if self.statistics.request_count != told:
                self._log_latencies()

    def _log_latencies(self) -> None:
        """Logs the table, a record a line: the message of a record has one line."""
        logger.info("latencies")
        for line in self.statistics.table().splitlines():
            logger.info("%s", line)


def _fleet(config: ProxyConfig) -> Fleet:
    def pool(engines: list[Engine]) -> Pool:
        return Pool(engines, cost_by(config.policy, config.load_tokens), Sessions(config.session_ttl))

    if config.mode == "route":
        return Fleet(pool([Engine(url, BOTH) for url in config.engines]), None)
    scheme = "https" if config.engine_tls_ca else "http"
    return Fleet(
        pool([Engine(f"{scheme}://{place}", DECODE) for place in config.decoders]),
        pool([Engine(f"{scheme}://{place}", PREFILL) for place in config.prefillers]),
    )
