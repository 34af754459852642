"""The Prometheus metrics of a node, collected at each scrape. `docs/reference/telemetry.md` lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv.telemetry.calls import ServerCalls
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.serving.server import PeerServer
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import SecondaryTier, TierStats, TierUsage
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.tier import RemoteTier

PREFIX = "lmkv_node_"


class NodeMetrics(Collector):
    """The node's metrics, in a registry of its own, so that several nodes may run in one process."""

    def __init__(
        self,
        *,
        tier: HostTier,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        plugins: Sequence[SecondaryTier] = (),
        warm: WarmStart | None = None,
        engines: EngineSessions,
        orders: OrderRunner,
        fleet: FleetMembership,
        side: PeerServer | None,
        lookups: LookupCounters,
        calls: ServerCalls,
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._remote = remote
        self._plugins = plugins
        self._warm = warm
        self._engines = engines
        self._orders = orders
        self._fleet = fleet
        self._side = side
        self._lookups = lookups
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(calls)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """No metrics: keeps the registry from collecting at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics with their present values."""
        disk = self._on_disk(self._disk) if self._disk else ()
        remote = self._in_remote(self._remote) if self._remote else ()
        sides = [self._fetching(self._side), self._handing(self._side)] if self._side else []
        warm = self._warm_start(self._warm) if self._warm else ()
        plugins = self._in_plugins() if self._plugins else ()
        return chain(self._holdings(), warm, disk, remote, plugins, self._serving(), *sides, self._order_metrics())

    def _holdings(self) -> Iterator[Metric]:
        yield _gauge("pool_capacity_bytes", "Bytes of the pool.", self._tier.size_bytes)
        yield _gauge("pool_used_bytes", "Bytes of the pool that chunks and write grants occupy.", self._tier.used_bytes)
        yield _gauge("pool_chunk_bytes", "Bytes of the pool that visible chunks occupy.", self._tier.chunk_bytes)
        yield _gauge(
            "pool_reserved_bytes",
            "Bytes of the pool that may be written to.",
            self._tier.reserved_bytes,
        )
        yield _gauge("chunks", "Chunks held.", len(self._tier))
        yield _counter("evicted_chunks", "Chunks evicted to make room.", self._tier.evicted_count)

    def _warm_start(self, warm: WarmStart) -> Iterator[Metric]:
        yield _gauge("pool_sealed", "1 while workers of the previous node map the pool.", int(self._tier.sealed))
        yield _gauge("warm_waiting_chunks", "Chunks of the previous process to be verified.", warm.waiting_count)
        yield _counter("warm_chunks", "Chunks of the previous process that were recovered.", warm.found_chunks)
        yield _counter("warm_bytes", "Bytes of these.", warm.found_bytes)
        yield _counter("warm_damaged_chunks", "Chunks of the previous process dropped as damaged.", warm.damaged_count)
        yield _counter(
            "warm_unrecorded_chunks", "Chunks that do not fit into the ledger.", warm.ledger.unrecorded_count
        )

    def _on_disk(self, disk: DiskTier) -> Iterator[Metric]:
        writer, reader = disk.writer, disk.reader
        yield _gauge("disk_capacity_bytes", "Bytes that files may take now.", disk.capacity_bytes)
        yield _gauge("disk_used_bytes", "Bytes that they take.", disk.used_bytes)
        yield _gauge("disk_chunks", "Chunks on disk.", disk.chunk_count)
        yield _gauge("disk_folders_down", "Folders that cannot be used now.", disk.stats().down_backends)
        yield _counter("disk_failures", "Times that a folder could not be opened or written.", disk.stats().failures)
        yield _gauge("disk_waiting_chunks", "Chunks that wait to be written.", writer.waiting_count)
        yield _counter("disk_written_chunks", "Chunks written.", writer.written_chunks)
        yield _counter("disk_written_bytes", "Bytes of these.", writer.written_bytes)
        yield _counter("disk_skipped_chunks", "Chunks not written: evicted first, or no room.", writer.skipped_count)
        yield _counter("disk_read_chunks", "Chunks read into the pool.", reader.read_chunks)
        yield _counter("disk_read_bytes", "Bytes of these.", reader.read_bytes)
        yield _counter("disk_damaged_chunks", "Chunks dropped as damaged or gone.", reader.damaged_count)
        yield _counter("disk_evicted_chunks", "Chunks evicted from disk to make room.", disk.stats().evicted_chunks)

    def _in_remote(self, remote: RemoteTier) -> Iterator[Metric]:
        stats, writer, reader = remote.stats(), remote.writer, remote.reader
        yield _gauge("remote_down", "1 while the shared store cannot be used.", int(not remote.usable))
        yield _counter("remote_failures", "Times that it could not be reached, or refused a chunk.", stats.failures)
        yield _counter("remote_late_lookups", "Lookups that it did not answer in time.", stats.late_lookups)
        yield _gauge("remote_waiting_chunks", "Chunks that wait to be put there.", writer.waiting_count)
        yield _counter("remote_written_chunks", "Chunks put there.", writer.written_chunks)
        yield _counter("remote_written_bytes", "Bytes of these.", writer.written_bytes)
        yield _counter("remote_present_chunks", "Chunks that were there already.", writer.present_count)
        yield _counter("remote_skipped_chunks", "Chunks not put: evicted first, or refused.", writer.skipped_count)
        yield _counter("remote_read_chunks", "Chunks read from there into the pool.", reader.read_chunks)
        yield _counter("remote_read_bytes", "Bytes of these.", reader.read_bytes)
        yield _counter("remote_damaged_chunks", "Chunks dropped as damaged or gone.", reader.damaged_count)

    def _in_plugins(self) -> Iterator[Metric]:
        """What `TierStats` of tiers of other packages say, and `TierUsage` where it is known."""
        for item in fields(TierStats):
            name, text = f"{PREFIX}tier_{item.name}", f"`{item.name}` of tiers of other packages."
            of_now = item.name in ("waiting_chunks", "down_backends")
            make = GaugeMetricFamily if of_now else CounterMetricFamily
            family = make(name, text, labels=["tier"])
            for tier in self._plugins:
                family.add_metric([tier.name], getattr(tier.stats(), item.name))
            yield family
        for item in fields(TierUsage):
            used = GaugeMetricFamily(
                f"{PREFIX}tier_{item.name}", f"`{item.name}` of tiers of other packages.", labels=["tier"]
            )
            for tier in self._plugins:
                if usage := tier.usage():
                    used.add_metric([tier.name], getattr(usage, item.name))
            yield used

    def _serving(self) -> Iterator[Metric]:
        yield _gauge("engines", "Engines attached.", self._engines.attached_count)
        lookups = self._lookups.stats()
        yield _counter("lookups", "Lookups of engines.", lookups.count)
        yield _counter("lookup_asked_chunks", "Chunks that engines looked up.", lookups.asked_chunks)
        found = CounterMetricFamily(
            f"{PREFIX}lookup_found_chunks", "Chunks among them that were found, by tier.", labels=["tier"]
        )
        _add(found, lookups.found_chunks)
        yield found
        yield _counter("fetches_refused_slower", "Fetches not offered: computing is quicker.", lookups.refused_slower)
        fleet = self._fleet.stats()
        yield _gauge("coordinators_connected", "Coordinators that answer.", fleet.connected_count)
        yield _gauge(
            "coordinators_refusing", "Coordinators at which another node has the instance id.", fleet.refused_count
        )
        yield _counter(
            "lookup_failures", "Lookups that a coordinator refused or did not answer in time.", fleet.lookup_failures
        )
        yield _gauge(
            "spec_conflicts", "Instances of the same models with an incompatible KvSpec.", len(self._fleet.conflicts)
        )

    def _fetching(self, side: PeerServer) -> Iterator[Metric]:
        transfers, fetches = side.pipeline.stats(), side.fetcher.stats()
        yield _gauge("read_grants", "Grants that peers have on chunks here.", len(side.service.grants))
        yield _counter(
            "refused_reads", "Reads by peers that no live grant covered.", side.channels.access.refused_count
        )
        yield _counter("damaged_chunks", "Chunks dropped as damaged in the own memory.", side.inspector.damaged_count)
        yield _counter("fetched_chunks", "Chunks fetched from peers.", transfers.chunk_count)
        yield _counter("fetched_bytes", "Bytes of these.", transfers.transferred_bytes)
        yield _counter("checksum_mismatches", "Chunks that came damaged.", transfers.checksum_mismatches)
        yield _counter("peer_failures", "Times that a peer failed.", fetches.failure_count)
        yield _counter("hedged_fetches", "Times that a peer was late and another was asked too.", fetches.hedge_count)
        yield _gauge("quarantined_batches", "Batches whose transfer has not stopped.", transfers.quarantined_batches)
        yield _gauge("quarantined_bytes", "Bytes of the pool that these may write to.", transfers.quarantined_bytes)

    def _handing(self, side: PeerServer) -> Iterator[Metric]:
        """Both sides of handoffs from prefill to decode."""
        receiver, handoffs = side.receiver, side.receiver.handoffs
        sent, received, admitted = side.senders.stats(), receiver.stats(), handoffs.stats()
        yield _gauge("handoffs_sending", "Handoffs that engines here give away now.", len(side.senders))
        yield _counter("handoffs_sent", "Handoffs given away whole.", sent.done_count)
        yield _counter(
            "handoffs_unsent", "Handoffs that failed, or were ended before they were whole.", sent.failed_count
        )
        yield _counter("handoff_sent_bytes", "Bytes that other nodes read for handoffs.", sent.sent_bytes)
        yield _gauge("handoffs_receiving", "Handoffs that are kept here now.", len(handoffs))
        yield _gauge("handoff_buffer_bytes", "Bytes of the pool that these take.", handoffs.used_bytes)
        yield _gauge("handoff_buffer_limit_bytes", "Most bytes of the pool that they may take.", handoffs.buffer_bytes)
        yield _counter("handoff_received_bytes", "Bytes read for handoffs.", received.received_bytes)
        yield _counter("handoff_device_bytes", "Bytes of these that went into device buffers.", received.device_bytes)
        yield _gauge(
            "device_buffer_bytes", "Device memory that engines lend for handoffs.", receiver.buffers.lent_bytes
        )
        yield _gauge("device_buffer_used_bytes", "Bytes of it that are in use.", receiver.buffers.used_bytes)
        ended = CounterMetricFamily(f"{PREFIX}handoffs_received", "Handoffs that are over, by end.", labels=["end"])
        for state, count in admitted.ended_counts.items():
            ended.add_metric([state.value], count)
        yield ended
        yield _counter("handoffs_abandoned", "Those of them that no request came for.", admitted.abandoned_count)
        yield _counter("handoffs_refused", "Handoffs that there was no room for.", admitted.refused_count)

    def _order_metrics(self) -> Iterator[Metric]:
        orders = self._orders.stats()
        ended = CounterMetricFamily(
            f"{PREFIX}orders_ended", "Orders of the coordinator that ended.", labels=["kind", "state"]
        )
        for state, counts in (("done", orders.done_counts), ("failed", orders.failed_counts)):
            _add(ended, counts, state)
        yield ended
        chunks = CounterMetricFamily(f"{PREFIX}order_chunks", "Chunks that they were executed for.", labels=["kind"])
        _add(chunks, orders.chunk_counts)
        yield chunks
        yield _gauge("orders_running", "Orders that run or wait.", orders.running_count)


def _add(family: CounterMetricFamily, counts: Mapping[str, int], *labels: str) -> None:
    for first, count in counts.items():
        family.add_metric([first, *labels], count)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)
