"""What a node knows and has done, as a collector of Prometheus's. `docs/telemetry.md` lists the names.

It is read from the node when somebody collects, so that it costs nothing between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkv.telemetry.calls import Calls
from lmkv_server.node.engines import Engines
from lmkv_server.node.fleet import Fleet
from lmkv_server.node.host_tier import HostTier
from lmkv_server.node.inspector import Inspector
from lmkv_server.node.orders import Orders
from lmkv_server.node.peers import Peers
from lmkv_server.node.read_grants import ReadGrants

PREFIX = "lmkv_node_"


@dataclass(kw_only=True, slots=True)
class LookupCounts:
    """Lookups of engines since the start of the node, and what came of them."""

    count: int = 0
    asked_chunks: int = 0
    own_chunks: int = 0
    """Chunks that the node held itself."""
    peer_chunks: int = 0
    """Chunks after those that one peer held, and were offered."""
    refused_slower: int = 0
    """Lookups after which nothing of peers was offered, for to compute it is quicker."""

    def note(self, *, asked: int, own: int, peer: int) -> None:
        """Counts one."""
        self.count += 1
        self.asked_chunks += asked
        self.own_chunks += own
        self.peer_chunks += peer


class Metrics(Collector):
    """The node's metrics, in a registry of their own: two nodes in one process do not mix."""

    def __init__(
        self,
        *,
        tier: HostTier,
        engines: Engines,
        orders: Orders,
        fleet: Fleet,
        peers: Peers | None,
        grants: ReadGrants | None,
        inspector: Inspector | None,
        lookups: LookupCounts,
        calls: Calls,
    ) -> None:
        self._tier = tier
        self._engines = engines
        self._orders = orders
        self._fleet = fleet
        self._peers = peers
        self._grants = grants
        self._inspector = inspector
        self._lookups = lookups
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(calls)
        ProcessCollector(registry=self.registry)

    def describe(self) -> list[Metric]:
        """Nothing, so that the registry does not collect to find out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it as it is now."""
        return chain(self._holdings(), self._serving(), self._fetching(), self._ordered())

    def _holdings(self) -> Iterator[Metric]:
        yield _gauge("pool_capacity_bytes", "Bytes of the pool.", self._tier.size_bytes)
        yield _gauge("pool_used_bytes", "Bytes of the pool that chunks and grants take.", self._tier.used_bytes)
        yield _gauge("pool_chunk_bytes", "Bytes of it that chunks take which can be found.", self._tier.chunk_bytes)
        yield _gauge("pool_reserved_bytes", "Bytes of it that somebody may write to.", self._tier.reserved_bytes)
        yield _gauge("chunks", "Chunks held.", len(self._tier))
        yield _counter("evicted_chunks", "Chunks evicted to make room.", self._tier.evicted_count)

    def _serving(self) -> Iterator[Metric]:
        yield _gauge("engines", "Engines attached.", self._engines.attached_count)
        yield _counter("lookups", "Lookups of engines.", self._lookups.count)
        yield _counter("lookup_asked_chunks", "Chunks that engines looked up.", self._lookups.asked_chunks)
        found = CounterMetricFamily(f"{PREFIX}lookup_found_chunks", "Chunks among them that were held.", labels=["at"])
        found.add_metric(["own"], self._lookups.own_chunks)
        found.add_metric(["peer"], self._lookups.peer_chunks)
        yield found
        yield _counter(
            "fetches_refused_slower", "Fetches not offered: to compute is quicker.", self._lookups.refused_slower
        )
        yield _gauge("coordinator_connected", "1 while the coordinator answers.", int(self._fleet.connected))
        yield _counter(
            "lookup_failures", "Lookups that the coordinator did not answer, or refused.", self._fleet.lookup_failures
        )
        yield _gauge(
            "spec_conflicts", "Instances of the same models to share nothing with.", len(self._fleet.conflicts)
        )

    def _fetching(self) -> Iterator[Metric]:
        if self._grants is not None:
            yield _gauge("read_grants", "Grants that peers have on chunks here.", len(self._grants))
        if self._inspector is not None:
            yield _counter(
                "damaged_chunks", "Chunks dropped as damaged in the own memory.", self._inspector.damaged_count
            )
        if peers := self._peers:
            yield _counter("fetched_chunks", "Chunks fetched from peers.", peers.fetched_chunks)
            yield _counter("fetched_bytes", "Bytes of these.", peers.fetched_bytes)
            yield _counter("checksum_mismatches", "Chunks that came damaged.", peers.checksum_mismatches)
            yield _counter("peer_failures", "Times that a peer failed.", peers.unreachable)
            yield _gauge("quarantined_batches", "Batches whose transfer has not stopped.", peers.quarantined_count)
            yield _gauge("quarantined_bytes", "Bytes of the pool that these may write to.", peers.quarantined_bytes)

    def _ordered(self) -> Iterator[Metric]:
        orders = self._orders
        ended = CounterMetricFamily(
            f"{PREFIX}orders_ended", "Orders of the coordinator that ended.", labels=["kind", "state"]
        )
        for state, counts in (("done", orders.done_counts), ("failed", orders.failed_counts)):
            _add(ended, counts, state)
        yield ended
        chunks = CounterMetricFamily(f"{PREFIX}order_chunks", "Chunks that they were done for.", labels=["kind"])
        _add(chunks, orders.chunk_counts)
        yield chunks
        yield _gauge("orders_running", "Orders under way.", orders.under_way_count)


def _add(family: CounterMetricFamily, counts: Mapping[str, int], *labels: str) -> None:
    for first, count in counts.items():
        family.add_metric([first, *labels], count)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)
