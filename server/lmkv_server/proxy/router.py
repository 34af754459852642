"""The common part of proxy and picker: engines and their health, clients' salts, and the lifetime."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import CertificateEnd
from lmkv.config import PickerConfig, ProxyConfig
from lmkv.telemetry.calls import BuildInfo
from lmkv_server.proxy.client_salts import ClientSalts
from lmkv_server.proxy.engines import Endpoints, EngineEndpoint, EnginesFile, Resolve
from lmkv_server.proxy.metrics import RouterMetrics
from lmkv_server.proxy.routing.health import HealthMonitor
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.upstream.client import Upstream, open_session


class Router(ABC):
    """Serves while it is entered. Entering raises `ConfigError` if a port cannot be bound."""

    def __init__(
        self, config: ProxyConfig | PickerConfig, pools: EnginePools, metrics: RouterMetrics, resolve: Resolve
    ) -> None:
        """`resolve` reaches DNS."""
        self.port = config.port
        """The bound port once it is entered."""
        self.pools = pools
        """The engines once it is entered."""
        self.metrics = metrics.registry
        self.metrics.register(CertificateEnd(config.tls_cert))
        self.metrics.register(BuildInfo())
        self._settings = config
        self._resolve = resolve
        self._stack = AsyncExitStack()
        self._background: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def wait(self) -> None:
        """Waits while it serves. Raises the error that stopped its background tasks, if one did."""
        if self._background is not None:
            await asyncio.shield(self._background)

    async def aclose(self) -> None:
        """Stops serving; requests in flight get `stop_timeout`. Idempotent."""
        await self._stack.aclose()

    # --- Used by subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    async def _start(self, stack: AsyncExitStack) -> None:
        """Starts serving until the stack is closed."""

    async def _open_endpoints(
        self, stack: AsyncExitStack, engines: EnginesFile | Sequence[EngineEndpoint]
    ) -> Endpoints:
        """The engines, reached through one HTTP client."""
        config = self._settings
        session = await stack.enter_async_context(open_session())
        monitor = HealthMonitor(
            interval_seconds=config.health_interval,
            timeout_seconds=config.health_timeout,
            api_key=config.engine_api_key,
        )
        upstream = Upstream(session, config.engine_tls.client_contexts())
        return Endpoints(engines, upstream, monitor, self.pools, self._resolve)

    def _client_salts(self, authenticator: Authenticator) -> ClientSalts:
        config = self._settings
        return ClientSalts(
            config.cache_salt_policy, config.cluster_secret, config.user_header, authenticator, config.engine_api_key
        )

    async def _stop_background(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
