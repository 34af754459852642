"""The Prometheus metrics of a node, collected at each scrape, and the server that exposes them.

`docs/reference/metrics.md` lists the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import chain
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv.auth.authenticator import Authenticator
from lmkv.config import NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.telemetry.calls import ServerCalls
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.ports import describe_port
from lmkv_server.node.serving.build import PeerSide
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import SecondaryTier

logger = logging.getLogger(__name__)

PREFIX = "lmkv_node_"

TIER_COUNTERS = {
    "written_chunks": "Chunks written to the tier.",
    "written_bytes": "Bytes written to the tier.",
    "present_chunks": "Chunks not written because the tier had them.",
    "skipped_chunks": "Chunks never written: evicted first, no room, or refused.",
    "read_chunks": "Chunks read from the tier into the pool; from peers, those of handoffs included.",
    "read_bytes": "Bytes read from the tier into the pool.",
    "damaged_chunks": "Chunks dropped because they were damaged or gone when they were read.",
    "undecryptable_chunks": "Damaged chunks that could not be decrypted: of another key, or changed.",
    "evicted_chunks": "Chunks evicted from the tier to make room.",
    "failures": "Failures of a folder, store or peer of the tier.",
    "late_lookups": "Lookups that the tier did not answer in time.",
}
TIER_GAUGES = {
    "waiting_chunks": "Chunks queued for writing to the tier.",
    "down_backends": "Folders and stores of the tier that cannot be used now.",
}
"""The fields of `TierStats`, all in one of the two."""
TIER_USAGES = {
    "capacity_bytes": "Bytes that chunks may take in the tier now; 0 if there is no limit.",
    "used_bytes": "Bytes that chunks take in the tier.",
    "chunk_count": "Chunks in the tier.",
}
"""The fields of `TierUsage`."""


class MeasuredNode(Protocol):
    """The node as its metrics see it. Its implementation, `Node`, imports this module: the floor stays."""

    tier: HostTier
    tiers: list[SecondaryTier]
    warm: WarmStart | None
    engines: EngineSessions
    orders: OrderRunner
    fleet: FleetMembership
    hints: HintExecutor
    service: EngineService
    peer_side: PeerSide | None


class NodeMetrics(Collector):
    """The node's metrics, in a registry of its own, so that several nodes may run in one process."""

    def __init__(self, node: MeasuredNode, calls: ServerCalls) -> None:
        self._node = node
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(calls)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """No metrics: keeps the registry from collecting at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics with their present values."""
        node = self._node
        sides = [self._fetching(node.peer_side), self._handing(node.peer_side)] if node.peer_side else []
        warm = self._warm_start(node.warm) if node.warm else ()
        tiers = self._in_tiers() if node.tiers else ()
        served = (self._serving(), *sides, self._order_metrics(), self._hint_metrics())
        return chain(self._holdings(), warm, tiers, *served)

    def _holdings(self) -> Iterator[Metric]:
        yield _gauge("pool_capacity_bytes", "Bytes of the pool.", self._node.tier.size_bytes)
        yield _gauge("pool_used_bytes", "Bytes of the pool used by chunks and grants.", self._node.tier.used_bytes)
        yield _gauge(
            "pool_chunk_bytes", "Bytes of the pool used by chunks that lookups can find.", self._node.tier.chunk_bytes
        )
        yield _gauge(
            "pool_reserved_bytes",
            "Bytes of the pool reserved for writers.",
            self._node.tier.reserved_bytes,
        )
        yield _gauge("chunks", "Chunks held, each part of a chunk counted.", len(self._node.tier))
        yield _counter("evicted_chunks", "Chunks evicted to make room.", self._node.tier.evicted_count)

    def _warm_start(self, warm: WarmStart) -> Iterator[Metric]:
        yield _gauge(
            "pool_sealed",
            "1 while workers of a previous node map the pool: nothing is stored.",
            int(self._node.tier.sealed),
        )
        stats = warm.stats()
        yield _gauge("warm_waiting_chunks", "Recovered chunks that are not yet verified.", stats.waiting_chunks)
        yield _counter("warm_chunks", "Chunks recovered after a restart.", stats.found_chunks)
        yield _counter("warm_bytes", "Bytes of the chunks recovered after a restart.", stats.found_bytes)
        yield _counter("warm_damaged_chunks", "Recovered chunks that were damaged and dropped.", stats.damaged_chunks)
        yield _counter(
            "warm_unrecorded_chunks",
            "Chunks that the ledger has no room for: they will not survive a restart.",
            stats.unrecorded_chunks,
        )

    def _in_tiers(self) -> Iterator[Metric]:
        """Yields the work of each secondary tier, and its usage if the node knows it; the label `tier` is its name."""
        stats = {tier.name: tier.stats() for tier in self._node.tiers}
        usages = {tier.name: usage for tier in self._node.tiers if (usage := tier.usage())}
        yield from _by_tier(CounterMetricFamily, TIER_COUNTERS, stats)
        yield from _by_tier(GaugeMetricFamily, TIER_GAUGES, stats)
        yield from _by_tier(GaugeMetricFamily, TIER_USAGES, usages)

    def _serving(self) -> Iterator[Metric]:
        yield _gauge("engines", "Engines attached.", self._node.engines.attached_count)
        lookups = self._node.service.lookups.stats()
        yield _counter("lookups", "Lookups of engines.", lookups.count)
        yield _counter("lookup_asked_chunks", "Chunks that engines looked up.", lookups.asked_chunks)
        found = CounterMetricFamily(
            f"{PREFIX}lookup_found_chunks", "Chunks of lookups that were found, by tier.", labels=["tier"]
        )
        _add(found, lookups.found_chunks)
        yield found
        yield _counter("fetches_refused_slower", "Lookups with peer hits that computing beats.", lookups.refused_slower)
        fleet = self._node.fleet.stats()
        yield _gauge("coordinators_connected", "Coordinators connected.", fleet.connected_count)
        yield _gauge(
            "coordinators_refusing", "Coordinators at which another node has this instance id.", fleet.refused_count
        )
        yield _counter(
            "lookup_failures", "Lookups that a coordinator refused or did not answer in time.", fleet.lookup_failures
        )
        yield _gauge(
            "spec_conflicts", "Instances of the same models with incompatible chunks.", len(self._node.fleet.conflicts)
        )

    def _hint_metrics(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            f"{PREFIX}hints", "Actions of hints of engines and clients, by outcome.", labels=["action", "outcome"]
        )
        for (action, outcome), count in self._node.hints.counts.items():
            ended.add_metric([action, outcome], count)
        yield ended
        retentions = self._node.hints.retentions
        yield _gauge("retained_chunks", "Chunks that hints retain: evicted after others.", len(retentions))
        yield _gauge("retained_bytes", "Bytes of the chunks that hints retain.", retentions.size_bytes)

    def _fetching(self, side: PeerSide) -> Iterator[Metric]:
        transfers, fetches = side.pipeline.stats(), side.fetcher.stats()
        yield _gauge("read_grants", "Grants that peers have on chunks here.", len(side.service.grants))
        yield _counter(
            "refused_reads",
            "Reads over tcp and ucx without a live grant: a few are slow readers, many a peer that reads too much.",
            side.channels.access.refused_count,
        )
        yield _counter(
            "damaged_chunks",
            "Chunks dropped because they were damaged in this node's memory.",
            side.inspector.damaged_count,
        )
        yield _counter("hedged_fetches", "Fetches repeated at another peer because one was late.", fetches.hedge_count)
        yield _gauge(
            "quarantined_batches",
            "Batches of transfers that were given up and have not stopped.",
            transfers.quarantined_batches,
        )
        yield _gauge(
            "quarantined_bytes",
            "Bytes of the pool to which such transfers may still write.",
            transfers.quarantined_bytes,
        )

    def _handing(self, side: PeerSide) -> Iterator[Metric]:
        """Both sides of handoffs from prefill to decode."""
        receiver, handoffs = side.receiver, side.receiver.handoffs
        sent, received, admitted = side.senders.stats(), receiver.stats(), handoffs.stats()
        yield _gauge("handoffs_sending", "Handoffs in progress, prefill side.", len(side.senders))
        yield _counter("handoffs_sent", "Complete handoffs, prefill side.", sent.done_count)
        yield _counter("handoffs_unsent", "Incomplete handoffs, prefill side.", sent.failed_count)
        yield _counter("handoff_sent_bytes", "Bytes of handoffs that other nodes read.", sent.sent_bytes)
        yield _gauge("handoffs_receiving", "Handoffs in progress, decode side.", len(handoffs))
        yield _gauge("handoff_buffer_bytes", "Bytes of the pool used by handoffs.", handoffs.used_bytes)
        yield _gauge("handoff_buffer_limit_bytes", "Maximum bytes of the pool for handoffs.", handoffs.buffer_bytes)
        yield _counter("handoff_received_bytes", "Bytes of handoffs received.", received.received_bytes)
        yield _counter("handoff_device_bytes", "Bytes of handoffs received in device buffers.", received.device_bytes)
        yield _gauge(
            "device_buffer_bytes",
            "GPU memory that engines lend for handoffs (pd_buffer_device).",
            receiver.buffers.lent_bytes,
        )
        yield _gauge(
            "device_buffer_used_bytes", "GPU memory lent for handoffs that is in use.", receiver.buffers.used_bytes
        )
        ended = CounterMetricFamily(
            f"{PREFIX}handoffs_received",
            "Ended handoffs, decode side, by end: committed, aborted or expired.",
            labels=["end"],
        )
        for state, count in admitted.ended_counts.items():
            ended.add_metric([state.value], count)
        yield ended
        yield _counter("handoffs_abandoned", "Handoffs without a request, decode side.", admitted.abandoned_count)
        yield _counter("handoffs_refused", "Handoffs without room, decode side.", admitted.refused_count)

    def _order_metrics(self) -> Iterator[Metric]:
        orders = self._node.orders.stats()
        ended = CounterMetricFamily(
            f"{PREFIX}orders_ended",
            "Orders of coordinators that ended, such as moves, clears and pins.",
            labels=["kind", "state"],
        )
        for state, counts in (("done", orders.done_counts), ("failed", orders.failed_counts)):
            _add(ended, counts, state)
        yield ended
        chunks = CounterMetricFamily(f"{PREFIX}order_chunks", "Chunks of ended orders.", labels=["kind"])
        _add(chunks, orders.chunk_counts)
        yield chunks
        yield _gauge("orders_running", "Orders that run or are queued.", orders.running_count)


def _by_tier(
    family_type: type[CounterMetricFamily | GaugeMetricFamily], texts: Mapping[str, str], values: Mapping[str, object]
) -> Iterator[Metric]:
    for name, text in texts.items():
        family = family_type(f"{PREFIX}tier_{name.replace('chunk_count', 'chunks')}", text, labels=["tier"])
        for tier, value in values.items():
            family.add_metric([tier], getattr(value, name))
        yield family


def _add(family: CounterMetricFamily, counts: Mapping[str, int], *labels: str) -> None:
    for first, count in counts.items():
        family.add_metric([first, *labels], count)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)


INSTANCE_LABEL = "instance_id"
"""The same label as in the coordinator's metrics: Prometheus's own `instance` is an address."""

MAX_CONCURRENT_REQUESTS = 32
MAX_CONNECTIONS_PER_CLIENT = 16
"""Concurrent requests and connections, in total and from one address; see `ConnectionLimiter`."""


class LabelledRegistry(CollectorRegistry):
    """The metrics of another registry, each sample with the label `instance_id`."""

    def __init__(self, registry: CollectorRegistry, instance_id: str) -> None:
        super().__init__()
        self._registry = registry
        self._labels = {INSTANCE_LABEL: instance_id}

    def collect(self) -> Iterator[Metric]:
        """All metrics of the other registry with their present values."""
        for metric in self._registry.collect():
            metric.samples = [sample._replace(labels=self._labels | sample.labels) for sample in metric.samples]
            yield metric


async def serve_metrics(config: NodeConfig, registry: CollectorRegistry, stack: AsyncExitStack) -> int | None:
    """Serves `/metrics` until the stack is closed. Returns its port; None if `metrics_port` is off or not set.

    Raises `ConfigError` if the port cannot be bound.
    """
    if config.metrics_port is None or config.metrics_port == OFF:
        return None
    # Imported here: a node without a metrics port saves the memory of the web server.
    from lmkv_server.http.guard import HostGuard
    from lmkv_server.http.server import HttpOptions, HttpServer, make_metrics_app

    authenticator = Authenticator(config.auth_tokens, config.credentials.token)
    guard = HostGuard(bound=config.p2p_host, allowed=config.allowed_hosts)
    options = HttpOptions(
        host=config.p2p_host,
        port=config.metrics_port,
        key="metrics_port",
        host_key="p2p_host",
        credentials=config.metrics_tls,
        name="lmkv-node-http",
        max_concurrent_requests=MAX_CONCURRENT_REQUESTS,
        max_connections_per_client=MAX_CONNECTIONS_PER_CLIENT,
        probes=frozenset(),
    )
    try:
        app = make_metrics_app(LabelledRegistry(registry, config.instance_id), authenticator, guard)
        server = HttpServer(app, options)
    except ConfigError as error:
        if owner := describe_port(config.runtime_path, config.metrics_port):
            reason = f"metrics_port: cannot listen on {config.p2p_host}:{config.metrics_port}; {owner}"
            raise ConfigError(reason, key="metrics_port") from None
        raise error from None
    stack.push_async_callback(server.aclose)
    await server.start()
    scheme = "https" if config.tls_cert else "http"
    logger.info("metrics at %s://%s:%d/metrics", scheme, config.p2p_host, server.port)
    return server.port
