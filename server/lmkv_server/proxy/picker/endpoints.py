"""The engines behind host names: each address of a name is an engine. Follows changes of DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from lmkv.runtime.reload import Reloadable
from lmkv_server.http.ports import address
from lmkv_server.proxy.engine import BOTH, Engine
from lmkv_server.proxy.routing.health import HealthMonitor
from lmkv_server.proxy.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
"""Time between two resolutions of the names."""
RESOLVE_TIMEOUT_SECONDS = 5.0
MAX_ENGINES = 4096

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""The URLs of all addresses of a URL's host; empty if it cannot be resolved."""


class Endpoints:
    """The engines at `urls`, and their clients. `run` must run: it resolves names, and checks the engines' health."""

    def __init__(
        self,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        contexts: Reloadable[ssl.SSLContext],
        monitor: HealthMonitor,
        engines: list[Engine],
        resolve: Resolve,
    ) -> None:
        """`engines` is changed in place."""
        self.engines = engines
        self.clients: dict[Engine, UpstreamClient] = {}
        self._urls = urls
        self._session = session
        self._contexts = contexts
        self._monitor = monitor
        self._resolve = resolve
        self._addresses: dict[str, frozenset[str]] = {}
        """URLs of engines by configured URL, as last resolved."""

    async def run(self) -> None:
        """Follows the names until it is cancelled."""
        watching: dict[Engine, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                for url, found in zip(self._urls, await asyncio.gather(*map(self._resolve, self._urls)), strict=True):
                    if found:  # else DNS fails, or no pod is ready: the health checks decide
                        self._addresses[url] = found
                wanted = sorted(frozenset().union(*self._addresses.values()))[:MAX_ENGINES]
                for engine in [one for one in self.engines if one.url not in wanted]:
                    watching.pop(engine).cancel()
                    self.engines.remove(engine)
                    engine.mark_unhealthy("its address has left DNS")
                    del self.clients[engine]
                    logger.info("engine %s has left", engine.url)
                known = {engine.url for engine in self.engines}
                for url in wanted:
                    if url not in known:
                        engine = Engine(url, BOTH)
                        self.clients[engine] = UpstreamClient(engine, self._session, self._contexts)
                        self.engines.append(engine)
                        watching[engine] = group.create_task(self._monitor.watch(self.clients[engine]))
                await asyncio.sleep(RESOLVE_SECONDS)


async def resolve(url: str) -> frozenset[str]:
    """Resolves by the system's resolver."""
    scheme, _, host_port = url.partition("://")
    host, _, port = host_port.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        logger.debug("%s cannot be resolved: %s", host, error)
        return frozenset()
    return frozenset(f"{scheme}://{address(str(one[4][0]), int(port))}" for one in found)
