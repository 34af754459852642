"""Composes a node of its packages. Started by `lmkv node`, or by a connector beside its engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

from google.protobuf import duration_pb2, timestamp_pb2

import lmkv
from lmkv import config as configuration
from lmkv.auth.credentials import CertificateEnd
from lmkv.config import NodeConfig
from lmkv.hints import HintResult
from lmkv.internal.v1 import report_service_pb2
from lmkv.pool.socket import PoolSocket
from lmkv.runtime.memory_budget import budget_bytes, of_process
from lmkv.spec import KvSpec
from lmkv.telemetry.calls import BuildInfo, ServerCalls
from lmkv.tiers import DISK, HOST
from lmkv.units import format_bytes
from lmkv.v1 import chunk_pb2, engine_service_pb2, registry_service_pb2
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.build import open_host_cache, populate
from lmkv_server.node.cache.events import CacheEvents, Losses, PartialChunks
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.attach_socket import serve_engines
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.fetch.tier import PeerTier
from lmkv_server.node.fleet import reports
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.registration import FleetContext
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.hints.executor import HintExecutor, carry_out
from lmkv_server.node.instance_lock import InstanceLock, instance_secret
from lmkv_server.node.linger import Linger
from lmkv_server.node.metrics import NodeMetrics, serve_metrics
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.serving.build import PeerSide, open_peer_side
from lmkv_server.node.serving.service import ServedNode
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.base import SecondaryTier
from lmkv_server.node.tiers.build import ConfiguredTier, TierContext, make_tiers
from lmkv_server.node.tiers.disk.tier import DiskTier

logger = logging.getLogger(__name__)

FIRST_ENGINE_SECONDS = 20.0
"""Minimum time that a new node waits for its first engine, even if `node_linger` is shorter."""

SERVED_PAUSE_SECONDS = 0.2
"""Delay before announced model names are registered, to register several at once at every coordinator."""
MAX_TRAFFIC = 64
"""Peers whose traffic is reported to the fleet: those with the most bytes."""


class Node:
    """A running node. Raises `ConfigError` from `__aenter__` if it cannot start as configured."""

    def __init__(self, config: NodeConfig, *, started_by_connector: bool = False) -> None:
        """Engines may replace a node without engines only if it was `started_by_connector`."""
        self.config = config
        of_process().capacity_bytes = budget_bytes(config.pool_bytes)
        self._started_by_connector = started_by_connector
        self._replaced = asyncio.Event()
        self.epoch = time.time_ns()
        self.metrics_port: int | None = None
        """The port of `/metrics`, once started, if it is served."""
        self._calls = ServerCalls()
        self.disk: DiskTier | None = None
        self.warm: WarmStart | None = None
        """Brings back the chunks that an earlier process has left in the pool, if `persist_pool` is on."""
        self.stores: list[ConfiguredTier] = []
        """The secondary tiers that keep chunks for this node."""
        self.tiers: list[SecondaryTier] = []
        """All secondary tiers, in the order in which they are asked."""
        self.peer_side: PeerSide | None = None
        self._stack = AsyncExitStack()
        self._partial_chunks = PartialChunks()
        self._losses = Losses()
        self.events = CacheEvents(self._partial_chunks, self._losses)
        """The events of all tiers: chunks that they store and remove."""
        self._linger: Linger | None = None
        """The countdown to its end, if it ends without engines."""
        self._served_timer: asyncio.TimerHandle | None = None

    @property
    def peer_address(self) -> str:
        """`host:port` of its `PeerService`, once started; empty without P2P."""
        return self.peer_side.address if self.peer_side else ""

    async def __aenter__(self) -> Node:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config, stack = self.config, self._stack
        folder = stack.enter_context(config.open_instance_folder())
        stack.enter_context(InstanceLock(folder, config.instance_id))
        cache = await open_host_cache(config, self.events, stack)
        self.pool, self.tier, self.warm = cache.pool, cache.tier, cache.warm
        self.engines = EngineSessions(self.tier, self._partial_chunks)
        self.engines.on_take_over = lambda: self.fleet.refresh()
        self._partial_chunks.add_tier(HOST, self.tier)
        context = TierContext(config=config, cache=cache, specs=self.engines)
        self.stores = [await stack.enter_async_context(tier) for tier in make_tiers(context)]
        self.disk = next((tier for tier in self.stores if isinstance(tier, DiskTier)), None)
        if self.disk:
            self._partial_chunks.add_tier(DISK, self.disk)
            self.tier.on_supersede = self.disk.supersede
        self.peer_side = await self._open_peer_side()
        self.orders = await stack.enter_async_context(self._make_orders())
        self.fleet = FleetMembership(
            config.coordinator_address,
            FleetContext(node=self, orders=self.orders, secret=instance_secret(folder)),
            credentials=config.credentials,
        )
        if self.peer_side:
            self.peer_side.directory.locate = self.fleet.locate
        self.tiers = self._ordered_tiers()
        await stack.enter_async_context(self._make_pool_socket())
        self._tier_stack = self._make_tier_stack()
        self.hints = await stack.enter_async_context(HintExecutor(config.instance_id, self._tier_stack, self.orders))
        self.events.subscribe(self.hints.retentions)
        self.audits = Audits(self._tier_stack, self.orders, self.fleet, self.engines)
        stack.push_async_callback(self.audits.aclose)
        self.service = self._make_engine_service()
        if self.peer_side:
            self.peer_side.connections.on_connected = self._report_peer
        self.metrics = self._make_metrics()
        self.metrics_port = await serve_metrics(config, self.metrics.registry, stack)
        await stack.enter_async_context(self.fleet)
        self.events.subscribe(self.fleet)
        self._partial_chunks.on_found = self.fleet.stored
        self.events.subscribe(self.service)
        await self.fleet.started()
        await serve_engines(config, self.service, self._calls, stack)
        self._populating = asyncio.create_task(self._populate())
        stack.push_async_callback(stopped, self._populating)
        logger.info(
            "lmkv node %s ready: %s for chunks, engines at %s, peers at %s",
            config.instance_id,
            format_bytes(self.pool.size_bytes),
            config.engine_socket,
            self.peer_address or "none (enable_p2p is off)",
        )

    async def _open_peer_side(self) -> PeerSide | None:
        if not self.config.enable_p2p:
            return None
        node = ServedNode(
            instance_id=self.config.instance_id,
            epoch=self.epoch,
            tier=self.tier,
            pool=self.pool,
            engines=self.engines,
            disk=self.disk,
        )
        side = await open_peer_side(self.config, node, self._stack, self._calls)
        self.events.subscribe(side.senders)
        return side

    def _make_orders(self) -> OrderRunner:
        context = OrderContext(
            instance_id=self.config.instance_id,
            tier=self.tier,
            engines=self.engines,
            fetcher=self.peer_side.fetcher if self.peer_side else None,
            tiers=self.stores,
            host=self,
        )
        return OrderRunner(context)

    def _ordered_tiers(self) -> list[SecondaryTier]:
        """Returns the tiers in the order in which they are asked: on this host, at peers, elsewhere."""
        tiers: list[SecondaryTier] = [tier for tier in self.stores if tier.is_local]
        if side := self.peer_side:
            tiers.append(PeerTier(side.fetcher, self.fleet, self.config.coordinator_timeout))
        return tiers + [tier for tier in self.stores if not tier.is_local]

    def _make_pool_socket(self) -> PoolSocket:
        return PoolSocket(
            self.config.pool_socket,
            self.pool,
            self.epoch,
            on_worker=self.engines.worker_connected,
            on_worker_gone=self._worker_detached,
        )

    def _report_peer(self, peer: PeerConnection, spec: KvSpec) -> None:
        connected = engine_service_pb2.PeerConnected(
            peer_instance_id=peer.instance_id, peer_address=peer.address, channel=peer.channel
        )
        self.service.report_peer(connected, spec.fingerprint)

    def _make_engine_service(self) -> EngineService:
        senders = self.peer_side.senders if self.peer_side else None
        return EngineService(self, self.engines, self._tier_stack, self.hints, self.audits, senders)

    def _make_tier_stack(self) -> TierStack:
        receiver = self.peer_side.receiver if self.peer_side else None
        return TierStack(self.tier, self.tiers, receiver, self._partial_chunks, self._losses)

    def _make_metrics(self) -> NodeMetrics:
        metrics = NodeMetrics(self, self._calls)
        metrics.registry.register(CertificateEnd(self.config.tls_cert))
        metrics.registry.register(BuildInfo())
        return metrics

    async def _populate(self) -> None:
        """Populates the pool while the node serves already. Raises `ConfigError` if there is too little memory."""
        size_bytes = await populate(self.pool)
        if size_bytes < self.pool.size_bytes:
            self.tier.end_at(size_bytes)
            self.fleet.refresh()

    # --- `FleetNode` ---------------------------------------------------------------------------------------------

    def describe(self) -> registry_service_pb2.Instance:
        """The node as it is now, for registrations and heartbeats."""
        return registry_service_pb2.Instance(
            instance_id=self.config.instance_id,
            epoch=self.epoch,
            peer_address=self.peer_address,
            specs=[spec.to_proto() for spec in self.engines.specs if not spec.is_private],
            version=lmkv.__version__,
            tiers=reports.usages(self.tier, self.tiers),
            engine_count=self.engines.attached_count,
            end_time=self._end_time(),
            served_models=[
                model.to_proto()
                for model in self.engines.served
                if (spec := self.engines.spec(model.fingerprint)) and not spec.is_private
            ],
            stats=self._stats(),
            coordinator_count=self.fleet.coordinator_count,
        )

    def snapshot(self) -> Iterator[HeldChunk]:
        """Every chunk in memory and on disk."""
        chunk_sizes = {spec.fingerprint: spec.chunk_size for spec in self.engines.specs}
        return reports.held(self.tier, self.disk, chunk_sizes)

    def conflicts_changed(self, conflicts: list[registry_service_pb2.SpecConflict]) -> None:
        """Sends the conflicts to the engines."""
        self.service.report_conflicts(conflicts)

    def _stats(self) -> registry_service_pb2.InstanceStats:
        """Statistics since the start. Chunks in the remote tier count as the node's own."""
        lookups = self.service.lookups.stats()
        traffic = self.peer_side.pipeline.stats().traffic if self.peer_side else ()
        return registry_service_pb2.InstanceStats(
            asked_chunks=lookups.asked_chunks,
            own_chunks=lookups.own_chunks,
            peer_chunks=lookups.peer_chunks,
            evicted_chunks=self.tier.evicted_count,
            load_count=lookups.load_count,
            load_duration=_duration(lookups.load_seconds),
            avoided_prefill_duration=_duration(lookups.avoided_prefill_seconds),
            wrong_chunks=self.audits.wrong_count,
            stopped_models=sorted(set(self.audits.stopped.values())),
            traffic=[
                registry_service_pb2.PeerTraffic(
                    instance_id=peer.instance_id, chunk_count=peer.chunk_count, transferred_bytes=peer.transferred_bytes
                )
                for peer in sorted(traffic, key=lambda peer: -peer.transferred_bytes)[:MAX_TRAFFIC]
            ],
        )

    # --- `OrderHost` ---------------------------------------------------------------------------------------------

    async def explain(self, order: report_service_pb2.ExplainOrder) -> chunk_pb2.PromptExplanation:
        """Says where a prompt is, and why parts of it are missed."""
        return await self.service.explainer.explain(order)

    async def carry_out_hint(self, order: report_service_pb2.HintOrder) -> HintResult:
        """Carries out a hint of a client of the coordinator."""
        return await carry_out(order, self.hints, self.engines)

    # --- Engines -------------------------------------------------------------------------------------------------

    def welcome(self) -> engine_service_pb2.Welcome:
        """The message that every engine receives first."""
        config = self.config
        return engine_service_pb2.Welcome(
            instance_id=config.instance_id,
            epoch=self.epoch,
            pool_socket=str(config.pool_socket),
            pool_size_bytes=self.pool.size_bytes,
            node_pid=os.getpid(),
            peer_address=self.peer_address,
        )

    def comparison(self) -> Mapping[str, str]:
        """The configuration, to compare with what an engine expects."""
        return configuration.to_comparison(self.config)

    @property
    def conflicts(self) -> Sequence[registry_service_pb2.SpecConflict]:
        """The instances of the same models that share nothing with this one."""
        return self.fleet.conflicts

    @property
    def is_replaceable(self) -> bool:
        """Whether an engine may end the node in favor of its own: one that an engine has started."""
        return self._started_by_connector

    def engines_changed(self) -> None:
        """An engine has attached or detached."""
        self._restart_linger()
        self.fleet.refresh()

    def served_changed(self) -> None:
        """Registers again once for all model names that engines announce within `SERVED_PAUSE_SECONDS`."""
        if self._served_timer is None:
            self._served_timer = asyncio.get_running_loop().call_later(SERVED_PAUSE_SECONDS, self._register_served)

    def _register_served(self) -> None:
        self._served_timer = None
        self.fleet.refresh()

    def _worker_detached(self, engine_id: str, rank: int) -> None:
        self.engines.worker_disconnected(engine_id, rank)
        self._restart_linger()

    def _restart_linger(self) -> None:
        if self._linger:
            self._linger.restart()

    # --- End -----------------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Raises `ConfigError` once there is too little memory for the pool; never returns."""
        await asyncio.shield(self._populating)
        await asyncio.get_running_loop().create_future()

    def replace(self, reason: str) -> None:
        """Ends this node, so that an engine can start its own."""
        logger.info("ending: %s", reason)
        self._replaced.set()

    async def replaced(self) -> None:
        """Returns once an engine has replaced this node."""
        await self._replaced.wait()

    async def linger(self) -> None:
        """Returns once no engine has been attached for `node_linger` seconds, or for less where memory is wanted."""
        self._linger = Linger(
            self.config.node_linger, lambda: self.engines.mapped_count > 0, first_seconds=FIRST_ENGINE_SECONDS
        )
        await self._linger.wait()

    def _end_time(self) -> timestamp_pb2.Timestamp | None:
        """Returns when it ends unless an engine attaches; None while there are engines, or if it stays."""
        if self._linger is None or self.engines.mapped_count:
            return None
        end = timestamp_pb2.Timestamp()
        end.FromNanoseconds(time.time_ns() + round(self._linger.left_seconds * 1e9))
        return end


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


async def stopped(task: asyncio.Task[None]) -> None:
    """Cancels the task and waits for it. Raises nothing: `Node.wait` raises the task's error."""
    task.cancel()
    await asyncio.wait([task])
