"""The engines that requests may use: those that are configured, those of a file, those of DNS, and those of operators.

Each may name an engine by its URL, or a host name whose addresses are engines. What they name together is the set of
engines. An engine that is not in the set any more is drained: its requests end before it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmkv.config.router import engine_url
from lmkv.config.sources import read_file
from lmkv.errors import BadRequest, ConfigError, Conflict, EngineNotFound
from lmkv.runtime.reload import Reloadable
from lmkv.safe_text import safe_text
from lmkv_server.http.server import address
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.routing.health import HealthMonitor
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.upstream.client import EngineFailed, Upstream, UpstreamClient

logger = logging.getLogger(__name__)

NAME_SCHEME = "dns"
"""`dns://` and `dns+https://` URLs stand for all addresses of their host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEndpoint:
    """The place of engines: one engine at a URL, or one at each address of the host of a `dns://` URL."""

    url: str
    role: str

    @property
    def is_name(self) -> bool:
        """Whether each address of its host is an engine."""
        return self.url.startswith(NAME_SCHEME)

    @property
    def target(self) -> str:
        """The URL of its engines, with the name as host."""
        scheme, separator, rest = self.url.partition("://")
        own = scheme.removeprefix(NAME_SCHEME).removeprefix("+") if self.is_name else scheme
        return f"{own or 'http'}{separator}{rest}"


def name_of(url: str, role: str) -> EngineEndpoint:
    """The engines at all addresses of a URL's host."""
    scheme, separator, rest = url.partition("://")
    named = {"http": NAME_SCHEME, "https": f"{NAME_SCHEME}+https"}.get(scheme, scheme)
    return EngineEndpoint(url=f"{named}{separator}{rest}", role=role)


def read_endpoint(raw: object, roles: Collection[str]) -> EngineEndpoint:
    """An endpoint of an operator: a URL, or an object with `url` and `role`. `roles` are those that the proxy knows.

    The role may be missing if there is only one. Raises `BadRequest`.
    """
    given = {"url": raw} if isinstance(raw, str) else raw
    if not isinstance(given, dict) or not given.keys() <= {"url", "role"}:
        raise BadRequest("an engine must be a URL, or an object of url and role")
    url, role = given.get("url"), given.get("role") or (next(iter(roles)) if len(roles) == 1 else None)
    parsed = read_url(url)
    if role not in roles:
        known = " or ".join(sorted(roles))
        raise BadRequest(f"the role of {parsed} must be {known}, not {role!r}; mode of the proxy decides which exist")
    assert isinstance(role, str)
    return EngineEndpoint(url=parsed, role=role)


def read_url(raw: object) -> str:
    """The URL of an endpoint. Raises `BadRequest`."""
    try:
        return engine_url(raw)
    except (TypeError, ValueError):
        raise BadRequest(f"url must be http://HOST:PORT, https:// or dns://, not {safe_text(repr(raw), 200)}") from None


class EnginesFile:
    """The endpoints that a YAML file lists under `engines`. Raises `ConfigError` if it is invalid at first."""

    def __init__(self, path: str, roles: Collection[str], count_failure: Callable[[], None]) -> None:
        """`count_failure` is called for each change that is not applied."""
        self.path = path
        self.count_failure = count_failure
        self._roles = roles
        self._is_read = False
        self._value = Reloadable([path], self._read)
        self._is_read = True

    def get(self) -> tuple[EngineEndpoint, ...]:
        """The endpoints of the current file, or of the last valid one."""
        return self._value.get()

    def _read(self) -> tuple[EngineEndpoint, ...]:
        try:
            return read_engines(Path(self.path), self._roles)
        except ConfigError:
            if self._is_read:
                self.count_failure()
            raise


def read_engines(path: Path, roles: Collection[str]) -> tuple[EngineEndpoint, ...]:
    """Reads the file. Raises `ConfigError` that names the entry."""
    entries = read_file(path, "engines_file")
    unknown = [entry.spelling for entry in entries if entry.spelling != "engines"]
    raw = next((entry.raw for entry in entries if entry.spelling == "engines"), None)
    if unknown or not isinstance(raw, list):
        problem = f"has the key {unknown[0]}" if unknown else "has no list engines"
        raise ConfigError(f"{path} {problem}; it must hold `engines:` and a list of URLs", key="engines_file")
    found: dict[str, EngineEndpoint] = {}
    for number, item in enumerate(raw, 1):
        try:
            endpoint = read_endpoint(item, roles)
            if endpoint.url in found:
                raise BadRequest(f"{endpoint.url} is listed twice")
        except BadRequest as error:
            raise ConfigError(f"engine {number} of {path}: {error}", key="engines_file") from None
        found[endpoint.url] = endpoint
    return tuple(found.values())


RESOLVE_SECONDS = 2.0
"""Time between two resolutions of the names."""
RESOLVE_TIMEOUT_SECONDS = 5.0
FILE_SECONDS = 1.0
"""Time between two checks of the file. A change is applied once the file has not changed for this time."""
DRAIN_POLL_SECONDS = 0.1
MAX_ENGINES = 4096
REMOVED = "it was removed"

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""The URLs of all addresses of a URL's host; empty if it cannot be resolved."""


class Clients(dict[Engine, UpstreamClient]):
    """The clients of the engines. That of an engine that was removed raises `EngineFailed`: another engine may serve.

    A request may have selected the engine before, and use it only now.
    """

    def __missing__(self, engine: Engine) -> UpstreamClient:
        raise EngineFailed(engine, REMOVED)


class Endpoints:
    """The engines of `pools`, and their clients.

    Engines that are configured by their URL are available at once. `run` must run: it resolves names, follows the file,
    removes drained engines, and checks the health of all.
    """

    def __init__(
        self,
        source: Sequence[EngineEndpoint] | EnginesFile,
        upstream: Upstream,
        monitor: HealthMonitor,
        pools: EnginePools,
        resolve: Resolve,
    ) -> None:
        """`source` names the engines: the configuration, or a file, which is followed.

        The engines of `pools` are changed in place. Raises `ConfigError` if the file is invalid.
        """
        self.clients = Clients()
        self._upstream = upstream
        self._monitor = monitor
        self._pools = pools
        self._resolve = resolve
        self._file = source if isinstance(source, EnginesFile) else None
        self._configured = () if isinstance(source, EnginesFile) else tuple(source)
        self._listed = self._file.get() if self._file else ()
        """The endpoints of the file, as last applied."""
        self._added: list[EngineEndpoint] = []
        """Engines that operators have added."""
        self._removed: set[str] = set()
        """URLs that operators have removed, though the configuration, the file or DNS still name them."""
        self._addresses: dict[EngineEndpoint, frozenset[str]] = {}
        """URLs of the engines behind each name, as last resolved."""
        self._watching: dict[Engine, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._draining = asyncio.Event()
        self._apply()

    @property
    def engines(self) -> list[Engine]:
        """All engines, those that are drained included."""
        return self._pools.engines

    async def run(self) -> None:
        """Follows the names and the file until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for engine in self.engines:
                self._watch(engine)
            group.create_task(self._follow_names())
            group.create_task(self._finish_drains())
            if self._file is not None:
                group.create_task(self._follow_file(self._file))

    async def add(self, endpoint: EngineEndpoint) -> None:
        """Adds an engine or a name. Idempotent; also ends a drain.

        Raises `BadRequest` if its host cannot be resolved, and `Conflict` if it has another role.
        """
        found = await self._resolve(endpoint.target)
        if not found:
            raise BadRequest(f"the host of {endpoint.url} cannot be resolved")
        for known in self._endpoints():
            if known.url == endpoint.url and known.role != endpoint.role:
                raise Conflict(f"{known.url} is a {known.role} engine; remove it before you add it as {endpoint.role}")
        if endpoint not in self._endpoints():
            if len(self._added) >= MAX_ENGINES:
                raise Conflict(f"{MAX_ENGINES} engines were added; remove some")
            self._added.append(endpoint)
        self._removed.discard(endpoint.url)
        if endpoint.is_name:
            self._removed -= found
            self._addresses[endpoint] = found
        self._apply()

    def drain(self, url: str) -> None:
        """Sends no new request to an engine, or to those of a name, and removes it after its last one.

        Raises `EngineNotFound`.
        """
        self._exclude(url)
        self._apply()

    def remove(self, url: str) -> None:
        """Removes an engine, or those of a name, at once: its requests fail, and are repeated elsewhere.

        Raises `EngineNotFound`.
        """
        leaving = self._exclude(url)
        self._apply()
        for engine in leaving:
            if engine in self.clients:
                self._leave(engine)

    def _exclude(self, url: str) -> list[Engine]:
        """Takes a URL out of the set. Returns the engines that it stands for."""
        urls = {url}
        for endpoint in self._endpoints():
            if endpoint.url == url:
                urls |= self._addresses.get(endpoint, frozenset())
        leaving = [engine for engine in self.engines if engine.url in urls]
        is_named = url not in self._removed and any(endpoint.url == url for endpoint in self._endpoints())
        if not leaving and not is_named:
            raise EngineNotFound(f"no engine has the URL {url}; `lmkv engines` lists them", url=url)
        self._added = [endpoint for endpoint in self._added if endpoint.url != url]
        self._removed.add(url)
        return leaving

    def _endpoints(self) -> list[EngineEndpoint]:
        return [*self._configured, *self._listed, *self._added]

    def _wanted(self) -> dict[str, str]:
        """Roles of the engines that requests may use, by URL. What is named itself precedes the addresses of names."""
        wanted: dict[str, str] = {}
        endpoints = sorted(self._endpoints(), key=lambda endpoint: endpoint.is_name)
        for endpoint in endpoints:
            if endpoint.url in self._removed:
                continue
            urls = sorted(self._addresses.get(endpoint, ())) if endpoint.is_name else [endpoint.url]
            for url in urls:
                if url not in self._removed and len(wanted) < MAX_ENGINES:
                    wanted.setdefault(url, endpoint.role)
        return wanted

    def _apply(self) -> None:
        """Makes the engines those that are wanted."""
        endpoints = set(self._endpoints())
        self._addresses = {endpoint: urls for endpoint, urls in self._addresses.items() if endpoint in endpoints}
        named = {endpoint.url for endpoint in endpoints}.union(*self._addresses.values())
        self._removed &= named  # what is not named any more returns if it is named again
        wanted = self._wanted()
        for engine in list(self.engines):
            is_wanted = wanted.get(engine.url) == engine.role
            if is_wanted and engine.is_draining:
                engine.is_draining = False
                logger.info("%s engine %s serves again", engine.role, engine.url)
            elif not is_wanted and not engine.is_draining:
                engine.is_draining = True
                if engine.is_busy:
                    logger.info("%s engine %s drains: its requests end first", engine.role, engine.url)
            if engine.is_draining:
                self._draining.set()
        self._remove_drained()
        known = {(engine.url, engine.role) for engine in self.engines}
        for url, role in wanted.items():
            if (url, role) not in known:
                self._join(Engine(url, role))

    def _join(self, engine: Engine) -> None:
        self.clients[engine] = UpstreamClient(engine, self._upstream)
        self._pools.add(engine)
        self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        if self._group is not None:
            self._watching[engine] = self._group.create_task(self._monitor.watch(self.clients[engine]))

    def _leave(self, engine: Engine) -> None:
        """Removes an engine. Requests that are in flight fail."""
        watching = self._watching.pop(engine, None)
        if watching is not None:
            watching.cancel()
        self._pools.remove(engine)
        client = self.clients.pop(engine)
        is_busy = engine.is_busy
        engine.mark_unhealthy(REMOVED)
        if is_busy:
            client.cancel_requests()
        logger.info("%s engine %s has left", engine.role, engine.url)

    def _remove_drained(self) -> None:
        for engine in [one for one in self.engines if one.is_draining and not one.is_busy]:
            self._leave(engine)

    async def _finish_drains(self) -> None:
        while True:
            await self._draining.wait()
            self._remove_drained()
            if not any(engine.is_draining for engine in self.engines):
                self._draining.clear()
                continue
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _follow_names(self) -> None:
        while True:
            await self._resolve_names(self._endpoints())
            self._apply()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _resolve_names(self, endpoints: Sequence[EngineEndpoint]) -> None:
        names = [endpoint for endpoint in endpoints if endpoint.is_name]
        for name, found in zip(names, await asyncio.gather(*(self._resolve(one.target) for one in names)), strict=True):
            if found:  # else DNS fails, or no pod is ready: the health checks decide
                self._addresses[name] = found

    async def _follow_file(self, file: EnginesFile) -> None:
        """Applies the file after each change. A file that cannot be applied leaves the engines as they are."""
        seen: tuple[EngineEndpoint, ...] = self._listed
        reported: tuple[EngineEndpoint, ...] | None = None
        while True:
            await asyncio.sleep(FILE_SECONDS)
            now = file.get()
            is_stable, seen = now is seen, now  # a file that changes may be half written
            if now is self._listed or not is_stable:
                continue
            new = [endpoint for endpoint in now if endpoint not in self._listed]
            found = await asyncio.gather(*(self._resolve(endpoint.target) for endpoint in new))
            unknown = [endpoint.url for endpoint, urls in zip(new, found, strict=True) if not urls]
            if unknown:
                if reported is not now:
                    reported = now
                    file.count_failure()
                    logger.warning("keeping the engines: %s in %s cannot be resolved", ", ".join(unknown), file.path)
                continue
            self._listed = now
            self._addresses |= {endpoint: urls for endpoint, urls in zip(new, found, strict=True) if endpoint.is_name}
            self._apply()


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
