"""The node: one host's cache, put together. Started by `lmkv node`, or by a connector beside its engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import TracebackType

import lmkv
from lmkv import config as configuration
from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.certificates import CertificateEnd
from lmkv.config import NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.pool.pool import LEFT_BYTES
from lmkv.pool.socket import PoolSocket
from lmkv.telemetry.calls import ServerCalls
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.files import NixlFiles
from lmkv.units import format_bytes
from lmkv.v1 import engine_service_pb2, engine_service_pb2_grpc, registry_service_pb2
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.eviction import POLICIES
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.ledger import Ledger
from lmkv_server.node.cache.pool import make_pool, open_file
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.fleet import holdings
from lmkv_server.node.fleet.context import FleetContext
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.instance_lock import InstanceLock, instance_secret
from lmkv_server.node.metrics.collector import Metrics
from lmkv_server.node.metrics.server import MetricsServer
from lmkv_server.node.serving.server import STOP_GRACE_SECONDS, PeerServer, bind
from lmkv_server.node.sessions.sessions import Engines
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.backend import store_for
from lmkv_server.node.tiers.remote.tier import RemoteTier

logger = logging.getLogger(__name__)

ENGINE_SERVICE = "lmkv.v1.EngineService"
MIN_POOL_SHARE = 8
"""A node whose memory ends before this share of the pool, one so many-th, does not go on."""
FIRST_ENGINE_SECONDS = 20.0
"""A node that an engine has started waits so long for it, whatever `node_linger` says."""

SERVED_PAUSE_SECONDS = 0.2
"""Names that engines announce are registered at most this often: each time is a registration at every coordinator."""
MAX_TRAFFIC = 64
"""Peers whose traffic is reported to the fleet: those with the most bytes."""


class Node:
    """A running node. Raises `ConfigError` from `__aenter__` if it cannot start as configured."""

    def __init__(self, config: NodeConfig, *, started_by_connector: bool = False) -> None:
        """Engines may replace a node without engines only if it was `started_by_connector`."""
        self.config = config
        self._started_by_connector = started_by_connector
        self._replaced = asyncio.Event()
        self.epoch = time.time_ns()
        self.metrics_port: int | None = None
        """The port of `/metrics`, once started, if it is served."""
        self._calls = ServerCalls()
        self.disk: DiskTier | None = None
        """The disk tier, if there is one."""
        self.remote: RemoteTier | None = None
        """The remote tier, if there is one."""
        self.warm: WarmStart | None = None
        """What an earlier life has left, if `persist_pool` is on."""
        self._peer_side: PeerServer | None = None
        self._stack = AsyncExitStack()
        self.events = CacheEvents()
        """What the tiers store and remove."""
        self._idle_since = time.monotonic() + FIRST_ENGINE_SECONDS
        self._served_timer: asyncio.TimerHandle | None = None

    @property
    def peer_address(self) -> str:
        """`host:port` of its `PeerService`, once started; empty without P2P."""
        return self._peer_side.address if self._peer_side else ""

    async def __aenter__(self) -> Node:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        config.make_instance_dir()
        self._stack.enter_context(InstanceLock(config.lock_path, config.instance_id))
        file = self._stack.enter_context(open_file(config)) if config.persist_pool else None
        self.pool = file.pool if file else self._stack.enter_context(make_pool(config))
        self.tier = HostTier(self.pool.size_bytes, self.events, POLICIES[config.eviction_policy]())
        if file:
            ledger = Ledger(file.table)
            self.events.subscribe(ledger)
            self.warm = await self._stack.enter_async_context(WarmStart(file, ledger, self.tier))
        self.engines = Engines(self.tier)
        if config.local_disk:
            self.disk = await self._stack.enter_async_context(
                DiskTier(
                    config.disk_folders,
                    config.disk_bytes,
                    tier=self.tier,
                    pool=self.pool,
                    events=self.events,
                    io=self._disk_io(),
                )
            )
        if config.remote_url:
            self.remote = await self._stack.enter_async_context(
                RemoteTier(
                    store_for(config),
                    tier=self.tier,
                    pool=self.pool,
                    events=self.events,
                    lookup_seconds=config.remote_lookup_timeout,
                )
            )
        if config.enable_p2p:
            self._peer_side = await self._stack.enter_async_context(
                PeerServer(
                    config,
                    epoch=self.epoch,
                    tier=self.tier,
                    pool=self.pool,
                    engines=self.engines,
                    disk=self.disk,
                    calls=self._calls,
                )
            )
            self.events.subscribe(self._peer_side.senders)
        side = self._peer_side
        peers = side.peers if side else None
        self.orders = await self._stack.enter_async_context(
            OrderRunner(
                instance_id=config.instance_id,
                tier=self.tier,
                engines=self.engines,
                peers=peers,
                disk=self.disk,
                remote=self.remote,
            )
        )
        self.fleet = FleetMembership(
            config.coordinator_address,
            FleetContext(node=self, orders=self.orders, secret=instance_secret(config.secret_path)),
            credentials=config.credentials,
        )
        if side:
            side.directory.locate = self.fleet.locate
        pool_socket = PoolSocket(
            config.pool_socket,
            self.pool,
            self.epoch,
            on_worker=self.engines.worker_came,
            on_worker_gone=self._worker_went,
        )
        await self._stack.enter_async_context(pool_socket)
        self._service = service = EngineService(
            tier=self.tier,
            engines=self.engines,
            sources=TierStack(
                self.tier,
                self.fleet,
                peers=peers,
                receiver=side.receiver if side else None,
                disk=self.disk,
                remote=self.remote,
                locate_timeout_seconds=config.coordinator_timeout,
            ),
            senders=side.senders if side else None,
            welcome=engine_service_pb2.Welcome(
                instance_id=config.instance_id,
                epoch=self.epoch,
                pool_socket=str(config.pool_socket),
                pool_size_bytes=self.pool.size_bytes,
                node_pid=os.getpid(),
                peer_address=self.peer_address,
            ),
            config=configuration.to_comparison(config),
            on_attach=self._engines_changed,
            on_detach=self._engines_changed,
            on_replace=self._replace if self._started_by_connector else None,
            on_served=self._served_changed,
        )
        self.metrics = Metrics(
            tier=self.tier,
            disk=self.disk,
            remote=self.remote,
            warm=self.warm,
            engines=self.engines,
            orders=self.orders,
            fleet=self.fleet,
            side=side,
            lookups=service.lookups,
            calls=self._calls,
        )
        self.metrics.registry.register(CertificateEnd(config.tls_cert))
        await self._serve_metrics()
        await self._stack.enter_async_context(self.fleet)
        self.events.subscribe(self.fleet)
        await self.fleet.started()
        await self._serve_engines(service)
        self._populating = asyncio.create_task(self._populate())
        self._stack.push_async_callback(stopped, self._populating)
        logger.info(
            "lmkv node %s ready: %s for chunks, engines at %s, peers at %s",
            config.instance_id,
            format_bytes(self.pool.size_bytes),
            config.engine_socket,
            self.peer_address or "none (enable_p2p is off)",
        )

    def _disk_io(self) -> FileIo:
        """Raises `ConfigError` if NIXL is wanted and not there."""
        if self.config.local_disk_io == "plain":
            return PlainIo()
        region = Region(address=self.pool.address, size_bytes=self.pool.size_bytes)
        return NixlFiles(region, "GDS" if self.config.local_disk_io == "gds" else "POSIX")

    async def _serve_metrics(self) -> None:
        """Serves `/metrics` if it has a port."""
        port = self.config.metrics_port
        if port is not None and port != OFF:
            gate = Authenticator(self.config.auth_tokens, self.config.credentials.token)
            server = MetricsServer(
                self.metrics.registry,
                self.config.p2p_host,
                port,
                self.config.metrics_tls,
                gate,
                self.config.allowed_hosts,
                self.config.runtime_path,
            )
            self.metrics_port = (await self._stack.enter_async_context(server)).port
            scheme = "https" if self.config.tls_cert else "http"
            logger.info("metrics at %s://%s:%d/metrics", scheme, self.config.p2p_host, self.metrics_port)

    async def _serve_engines(self, service: EngineService) -> None:
        server = await rpc.make_server([ENGINE_SERVICE], self._calls)
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
        bind(server, f"unix:{self.config.engine_socket}", "runtime_dir")
        await server.start()
        self._stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)

    async def _populate(self) -> None:
        """Touches the pool's pages ahead of the first stores, beside everything else.

        Where memory ends on the way the node goes on with what it has. Raises `ConfigError` if that is next to nothing.
        """
        started, size_bytes = time.monotonic(), self.pool.size_bytes
        try:
            await asyncio.to_thread(self.pool.populate, 0, size_bytes, leave_bytes=LEFT_BYTES)
        except ConfigError as error:
            size_bytes = int(error.metadata["populated_bytes"])
            if size_bytes < self.pool.size_bytes // MIN_POOL_SHARE:
                raise
            logger.error("%s; going on with %s", error, format_bytes(size_bytes))
            self.tier.end_at(size_bytes)
            self.fleet.refresh()
        logger.info(
            "pool of %s is resident after %.1f s%s%s",
            format_bytes(size_bytes),
            time.monotonic() - started,
            f", in huge pages of {format_bytes(self.pool.huge_page_bytes)}" if self.pool.huge_page_bytes else "",
            "" if self.pool.numa_node is None else f", on NUMA node {self.pool.numa_node}",
        )

    def describe(self) -> registry_service_pb2.Instance:
        """The node as it is now, for registrations and heartbeats."""
        return registry_service_pb2.Instance(
            instance_id=self.config.instance_id,
            epoch=self.epoch,
            peer_address=self.peer_address,
            specs=[spec.to_proto() for spec in self.engines.specs],
            version=lmkv.__version__,
            tiers=holdings.usages(self.tier, self.disk),
            engine_count=self.engines.attached_count,
            served_models=[model.to_proto() for model in self.engines.served if self.engines.spec(model.fingerprint)],
            stats=self._stats(),
        )

    def snapshot(self) -> Iterator[HeldChunk]:
        """Every chunk in memory and on disk."""
        return holdings.held(self.tier, self.disk)

    def conflicts_changed(self, conflicts: list[registry_service_pb2.SpecConflict]) -> None:
        """Sends the conflicts to the engines."""
        self._service.tell_conflicts(conflicts)

    def _stats(self) -> registry_service_pb2.InstanceStats:
        """Statistics since the start. Chunks in the remote tier count as the node's own."""
        lookups = self._service.lookups.stats()
        traffic = self._peer_side.peers.traffic.values() if self._peer_side else ()
        return registry_service_pb2.InstanceStats(
            asked_chunks=lookups.asked_chunks,
            own_chunks=lookups.own_chunks,
            peer_chunks=lookups.peer_chunks,
            evicted_chunks=self.tier.evicted_count,
            traffic=sorted(traffic, key=lambda peer: -peer.transferred_bytes)[:MAX_TRAFFIC],
        )

    def _engines_changed(self) -> None:
        self._idle_since = time.monotonic()
        self.fleet.refresh()

    def _served_changed(self) -> None:
        """Registers again soon: once for all the names that engines announce within `SERVED_PAUSE_SECONDS`."""
        if self._served_timer is None:
            self._served_timer = asyncio.get_running_loop().call_later(SERVED_PAUSE_SECONDS, self._register_served)

    def _register_served(self) -> None:
        self._served_timer = None
        self.fleet.refresh()

    def _worker_went(self, engine_id: str, rank: int) -> None:
        self.engines.worker_went(engine_id, rank)
        self._idle_since = time.monotonic()

    async def wait(self) -> None:
        """Lasts until the node cannot run: raises `ConfigError` if there is no memory for its pool."""
        await asyncio.shield(self._populating)
        await asyncio.get_running_loop().create_future()

    def _replace(self, reason: str) -> None:
        logger.info("ending: %s", reason)
        self._replaced.set()

    async def replaced(self) -> None:
        """Returns once an engine has replaced this node."""
        await self._replaced.wait()

    async def linger(self) -> None:
        """Returns once no engine has been here for `node_linger` seconds."""
        while True:
            left = self._idle_since + self.config.node_linger - time.monotonic()
            if self.engines.mapped_count:
                left = self.config.node_linger
            elif left <= 0:
                logger.info("ending: no engine for %.0f s (node_linger)", self.config.node_linger)
                return
            await asyncio.sleep(min(max(left, 0.1), 5.0))


async def stopped(task: asyncio.Task[None]) -> None:
    """Cancels the task and waits for it; what it raised is for those who waited for it before."""
    task.cancel()
    await asyncio.wait([task])
