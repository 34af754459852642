"""The Prometheus metrics of a node, collected at each scrape, and the server that exposes them.

`docs/reference/metrics.md` lists the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from lmkv.auth.authenticator import Authenticator
from lmkv.config import NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.telemetry.calls import Scraped, ServerCalls
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.quotas import OwnerQuotas
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.reports import salt_quotas
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.ports import describe_port
from lmkv_server.node.serving.build import PeerSide
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import SecondaryTier

logger = logging.getLogger(__name__)

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
    audits: Audits
    service: EngineService
    peer_side: PeerSide | None


class NodeMetrics(Scraped):
    """The node's metrics, in a registry of its own, so that several nodes may run in one process."""

    prefix = "lmkv_node_"

    def __init__(self, node: MeasuredNode, calls: ServerCalls) -> None:
        self._node = node
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(calls)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics with their present values."""
        node = self._node
        sides = [self._fetching(node.peer_side), self._handing(node.peer_side)] if node.peer_side else []
        warm = self._warm_start(node.warm) if node.warm else ()
        tiers = self._in_tiers() if node.tiers else ()
        served = (self._serving(), *sides, self._order_metrics(), self._hint_metrics())
        return chain(self._holdings(), warm, tiers, *served)

    def _holdings(self) -> Iterator[Metric]:
        yield self.gauge("pool_capacity_bytes", "Bytes of the pool.", self._node.tier.size_bytes)
        yield self.gauge("pool_used_bytes", "Bytes of the pool used by chunks and grants.", self._node.tier.used_bytes)
        yield self.gauge(
            "pool_chunk_bytes", "Bytes of the pool used by chunks that lookups can find.", self._node.tier.chunk_bytes
        )
        yield self.gauge(
            "pool_reserved_bytes",
            "Bytes of the pool reserved for writers.",
            self._node.tier.reserved_bytes,
        )
        yield self.gauge("chunks", "Chunks held, each part of a chunk counted.", len(self._node.tier))
        yield self.counter("evicted_chunks", "Chunks evicted to make room.", self._node.tier.evicted_count)
        if quotas := salt_quotas(self._node.tier, self._node.tiers):
            yield from self._quotas(quotas)

    def _quotas(self, quotas: Mapping[str, OwnerQuotas]) -> Iterator[Metric]:
        limits = {tier: quota.limit_bytes for tier, quota in quotas.items()}
        yield self.gauges("salt_quota_bytes", "Bytes of the tier for one salt.", ["tier"], limits)
        most = {tier: quota.most_bytes for tier, quota in quotas.items()}
        yield self.gauges("salt_used_bytes_max", "Bytes of the salt that uses most of the tier.", ["tier"], most)
        counts = {tier: len(quota) for tier, quota in quotas.items()}
        yield self.gauges("salts", "Salts, models and adapters that have chunks in the tier.", ["tier"], counts)
        evicted = {tier: quota.evicted_count for tier, quota in quotas.items()}
        yield self.counters(
            "salt_evicted_chunks", "Chunks evicted because their salt had used its quota.", ["tier"], evicted
        )

    def _warm_start(self, warm: WarmStart) -> Iterator[Metric]:
        yield self.gauge(
            "pool_sealed",
            "1 while workers of a previous node map the pool: nothing is stored.",
            int(self._node.tier.sealed),
        )
        stats = warm.stats()
        yield self.gauge("warm_waiting_chunks", "Recovered chunks that are not yet verified.", stats.waiting_chunks)
        yield self.counter("warm_chunks", "Chunks recovered after a restart.", stats.found_chunks)
        yield self.counter("warm_bytes", "Bytes of the chunks recovered after a restart.", stats.found_bytes)
        yield self.counter(
            "warm_damaged_chunks", "Recovered chunks that were damaged and dropped.", stats.damaged_chunks
        )
        yield self.counter(
            "warm_unrecorded_chunks",
            "Chunks that the ledger has no room for: they will not survive a restart.",
            stats.unrecorded_chunks,
        )

    def _in_tiers(self) -> Iterator[Metric]:
        """Yields the work of each secondary tier, and its usage if the node knows it; the label `tier` is its name."""
        stats = {tier.name: tier.stats() for tier in self._node.tiers}
        usages = {tier.name: usage for tier in self._node.tiers if (usage := tier.usage())}
        yield from _by_tier(self.counters, TIER_COUNTERS, stats)
        yield from _by_tier(self.gauges, TIER_GAUGES, stats)
        yield from _by_tier(self.gauges, TIER_USAGES, usages)

    def _serving(self) -> Iterator[Metric]:
        yield self.gauge("engines", "Engines attached.", self._node.engines.attached_count)
        audits = self._node.audits
        yield self.counter(
            "wrong_chunks", "Chunks that engines have computed twice and found wrong.", audits.wrong_count
        )
        yield self.gauge(
            "stopped_specs",
            "Specs of which nothing is stored or found any more, because too many chunks were wrong.",
            len(audits.stopped),
        )
        lookups = self._node.service.lookups.stats()
        yield self.counter("lookups", "Lookups of engines.", lookups.count)
        yield self.counter("lookup_asked_chunks", "Chunks that engines looked up.", lookups.asked_chunks)
        found = lookups.found_chunks
        yield self.counters("lookup_found_chunks", "Chunks of lookups that were found, by tier.", ["tier"], found)
        yield self.counter(
            "fetches_refused_slower", "Lookups with peer hits that computing beats.", lookups.refused_slower
        )
        fleet = self._node.fleet.stats()
        yield self.gauge("coordinators_connected", "Coordinators connected.", fleet.connected_count)
        yield self.gauge(
            "coordinators_refusing", "Coordinators at which another node has this instance id.", fleet.refused_count
        )
        yield self.counter(
            "lookup_failures", "Lookups that a coordinator refused or did not answer in time.", fleet.lookup_failures
        )
        yield self.gauge(
            "spec_conflicts", "Instances of the same models with incompatible chunks.", len(self._node.fleet.conflicts)
        )

    def _hint_metrics(self) -> Iterator[Metric]:
        yield self.counters(
            "hints",
            "Actions of hints of engines and clients, by outcome.",
            ["action", "outcome"],
            self._node.hints.counts,
        )
        retentions = self._node.hints.retentions
        yield self.gauge("retained_chunks", "Chunks that hints retain: evicted after others.", len(retentions))
        yield self.gauge("retained_bytes", "Bytes of the chunks that hints retain.", retentions.size_bytes)

    def _fetching(self, side: PeerSide) -> Iterator[Metric]:
        transfers, fetches = side.pipeline.stats(), side.fetcher.stats()
        yield self.gauge("read_grants", "Grants that peers have on chunks here.", len(side.service.grants))
        yield self.counter(
            "refused_reads",
            "Reads over tcp and ucx without a live grant: a few are slow readers, many a peer that reads too much.",
            side.channels.access.refused_count,
        )
        yield self.counter(
            "damaged_chunks",
            "Chunks dropped because they were damaged in this node's memory.",
            side.inspector.damaged_count,
        )
        yield self.counter(
            "hedged_fetches", "Fetches repeated at another peer because one was late.", fetches.hedge_count
        )
        yield self.gauge(
            "quarantined_batches",
            "Batches of transfers that were given up and have not stopped.",
            transfers.quarantined_batches,
        )
        yield self.gauge(
            "quarantined_bytes",
            "Bytes of the pool to which such transfers may still write.",
            transfers.quarantined_bytes,
        )

    def _handing(self, side: PeerSide) -> Iterator[Metric]:
        """Both sides of handoffs from prefill to decode."""
        receiver, handoffs = side.receiver, side.receiver.handoffs
        sent, received, admitted = side.senders.stats(), receiver.stats(), handoffs.stats()
        yield self.gauge("handoffs_sending", "Handoffs in progress, prefill side.", len(side.senders))
        yield self.counter("handoffs_sent", "Complete handoffs, prefill side.", sent.done_count)
        yield self.counter("handoffs_unsent", "Incomplete handoffs, prefill side.", sent.failed_count)
        yield self.counter("handoff_sent_bytes", "Bytes of handoffs that other nodes read.", sent.sent_bytes)
        yield self.gauge("handoffs_receiving", "Handoffs in progress, decode side.", len(handoffs))
        yield self.gauge("handoff_buffer_bytes", "Bytes of the pool used by handoffs.", handoffs.used_bytes)
        yield self.gauge("handoff_buffer_limit_bytes", "Maximum bytes of the pool for handoffs.", handoffs.buffer_bytes)
        yield self.counter("handoff_received_bytes", "Bytes of handoffs received.", received.received_bytes)
        yield self.counter(
            "handoff_device_bytes", "Bytes of handoffs received in device buffers.", received.device_bytes
        )
        yield self.gauge(
            "device_buffer_bytes",
            "GPU memory that engines lend for handoffs (pd_buffer_device).",
            receiver.buffers.lent_bytes,
        )
        yield self.gauge(
            "device_buffer_used_bytes", "GPU memory lent for handoffs that is in use.", receiver.buffers.used_bytes
        )
        yield self.counters(
            "handoffs_received",
            "Ended handoffs, decode side, by end: committed, aborted or expired.",
            ["end"],
            {state.value: count for state, count in admitted.ended_counts.items()},
        )
        yield self.counter("handoffs_abandoned", "Handoffs without a request, decode side.", admitted.abandoned_count)
        yield self.counter("handoffs_refused", "Handoffs without room, decode side.", admitted.refused_count)

    def _order_metrics(self) -> Iterator[Metric]:
        orders = self._node.orders.stats()
        by_state = {"done": orders.done_counts, "failed": orders.failed_counts}
        yield self.counters(
            "orders_ended",
            "Orders of coordinators that ended, such as moves, clears and pins.",
            ["kind", "state"],
            {(kind, state): count for state, counts in by_state.items() for kind, count in counts.items()},
        )
        yield self.counters("order_chunks", "Chunks of ended orders.", ["kind"], orders.chunk_counts)
        yield self.gauge("orders_running", "Orders that run or are queued.", orders.running_count)


def _by_tier(
    family: Callable[[str, str, Sequence[str], Mapping[str, float]], Metric],
    texts: Mapping[str, str],
    values: Mapping[str, object],
) -> Iterator[Metric]:
    for name, text in texts.items():
        by_tier = {tier: getattr(value, name) for tier, value in values.items()}
        yield family(f"tier_{name.replace('chunk_count', 'chunks')}", text, ["tier"], by_tier)


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
