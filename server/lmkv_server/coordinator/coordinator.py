"""The coordinator: one gRPC server over the registry, and the sweeper that ends leases."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv import rpc
from lmkv.errors import ConfigError
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv_server.coordinator.cache_service import CacheService
from lmkv_server.coordinator.operations_service import OperationsService
from lmkv_server.coordinator.registry import Registry
from lmkv_server.coordinator.registry_service import RegistryService

logger = logging.getLogger(__name__)

SERVICE_NAMES = ("lmkv.v1.CacheService", "lmkv.v1.RegistryService", "google.longrunning.Operations")
STOP_GRACE_SECONDS = 0.1
SWEEP_STEP = 5_000
"""Keys that are swept between two looks at what else there is to do: about a millisecond."""


class Coordinator:
    """Serves `CacheService`, `RegistryService` and `Operations` while it is entered.

    `port` 0 takes a free one. `monitor_ports` are further ports that serve the same. Leases last `lease_ttl` seconds.
    Entering raises `ConfigError` if a port cannot be had.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 9000,
        monitor_ports: Mapping[str, int] | None = None,
        lease_ttl: float = 3.0,
        cluster_secret: str = "",
    ) -> None:
        self.host = host
        self.port = port
        """The port it serves on, once it is entered."""
        self._monitor_ports = dict(monitor_ports or {})
        self._lease_ttl = lease_ttl
        self._secret = cluster_secret.encode()
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """`host:port` to call it at."""
        return _address(self.host, self.port)

    async def __aenter__(self) -> Self:
        # Beginning at the time of day keeps revisions rising across restarts.
        registry = Registry(lease_ttl=self._lease_ttl, now=time.monotonic(), revision=time.time_ns() // 1_000)
        server = await rpc.make_server(SERVICE_NAMES)
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(registry, self._secret), server)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(registry), server)
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsService(), server)
        try:
            self.port = _bind(server, self.host, self.port, "port")
            for name, port in self._monitor_ports.items():
                if port != self.port:
                    _bind(server, self.host, port, f"monitor_ports[{name!r}]")
            await server.start()
        except BaseException:
            await server.stop(None)
            raise
        self._server = server
        self._sweeper = asyncio.create_task(_sweep(registry), name="lmkv-coordinator-sweeper")
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
        """Stops serving; streams that are open break. Repeating it is safe."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_SECONDS)


async def _sweep(registry: Registry) -> None:
    """Ends leases on time and cleans up behind those who left, for ever."""
    lease_ttl = registry.instances.lease_ttl
    woken = time.monotonic()
    while True:
        now = time.monotonic()
        if now - woken > lease_ttl / 3:
            # This process stood still, and so could not hear anybody: that time is not the nodes' silence.
            logger.warning("stood still for %.1f s; leases are longer by that", now - woken)
            registry.instances.postpone(now - woken)
        for instance in registry.expire(now):
            said = instance.said
            logger.warning("instance %s at %s is gone: its lease ran out", said.instance_id, said.peer_address)
        if registry.layout.sweep(SWEEP_STEP):
            pause = 0.0
        else:
            expiry = registry.instances.next_expiry()
            pause = lease_ttl if expiry is None else min(max(expiry - now, 0.001), lease_ttl)
        woken = now + pause
        await asyncio.sleep(pause)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int, key: str) -> int:
    """Binds one port of the server and returns it. Raises `ConfigError` that names the key and the fix."""
    _try_port(host, port, key)
    try:
        return server.add_insecure_port(_address(host, port))
    except RuntimeError as error:
        raise ConfigError(
            f"{key} {port} on {host} cannot be had ({error}); set {key} to a free port", key=key
        ) from None


def _try_port(host: str, port: int, key: str) -> None:
    """Says why a port cannot be had, which gRPC does not: it only logs."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is unknown ({error.strerror}); set host", key="host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"{key} {port} on {host} is in use; set {key} to a free port, or stop who uses it"
        elif error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host {host} is no address of this machine; set host", key="host") from None
        else:
            fix = f"{key} {port} on {host} cannot be used ({error.strerror}); set {key} to another port"
        raise ConfigError(fix, key=key) from None
