"""Those who look all the time: at what nodes say of themselves, and at what coordinators say of the layout map."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import grpc
import httpx

from lmkv import rpc
from lmkv.errors import LmkvError, RevisionCompacted, WatcherTooSlow
from lmkv.keys import ChunkKey
from lmkv.v1.cache_service_pb2 import LayoutChange, WatchRequest, WatchResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from tests.chaos.actor import Actor
from tests.chaos.engine import WrongBytes
from tests.chaos.fleet import Fleet
from tests.chaos.victim import PATIENCE_SECONDS, Coordinator, Node

UCX_ABORT = "ucp_request.inl"
"""In the last log line of a node that UCX has aborted: a known limit of NIXL over TCP (docs/contribute/transfer.md)."""


class Died(Exception):
    """A process ended that no fault had killed."""


class MetricsWatcher(Actor):
    """Raises `WrongBytes` if a node found damage in its own pool, and `Died` if a process ended without a fault.

    Starts and counts nodes that UCX has aborted.
    """

    def __init__(self, fleet: Fleet, seed: int, counts: Counter[str]) -> None:
        super().__init__("watcher", seed, counts)
        self._fleet = fleet

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            await asyncio.sleep(0.1)
            for victim in self._fleet.victims.values():
                if not victim.is_wanted or victim.process.alive:
                    continue
                log = victim.process.log()
                if UCX_ABORT not in log.rstrip().rpartition("\n")[2]:
                    raise Died(f"{victim.name} ended by itself: {log[-2000:]}")
                self.counts["nodes aborted by UCX"] += 1
                victim.kill()
                victim.start()
            for node in self._fleet.nodes:
                if not node.frozen and node.process.alive:
                    with suppress(httpx.HTTPError):
                        self._look(node, await node.metrics())

    def _look(self, node: Node, metrics: dict[str, float]) -> None:
        for name in ("quarantined_bytes", "read_grants"):
            most = f"{name} at most"
            self.counts[most] = max(self.counts[most], round(metrics[name]))
        if metrics["damaged_chunks_total"]:
            raise WrongBytes(f"{node.name} found chunks damaged in its own memory")


class LayoutWatcher(Actor):
    """Follows one coordinator's layout map by its changes, through all losses. Raises `Hangs` if it has to wait."""

    def __init__(self, coordinator: Coordinator, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"watcher of {coordinator.name}", seed, counts)
        self._coordinator = coordinator
        self._revision = 0
        self._held: defaultdict[tuple[str, str], set[ChunkKey]] = defaultdict(set)

    def held(self, node: str, tier: str) -> set[ChunkKey]:
        """The chunks of a node in a tier, by the events received."""
        return self._held[node, tier]

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            try:
                async with self._coordinator.open_channel() as channel:
                    stub: Any = CacheServiceStub(channel)
                    await self._follow(stub.Watch(WatchRequest(start_revision=self._revision)))
            except TimeoutError as error:  # bookmarks come more often
                self._coordinator.overdue(error)
            except grpc.RpcError as error:
                self._lost(rpc.from_rpc_error(error))
            await asyncio.sleep(0.1)

    def _lost(self, error: LmkvError) -> None:
        self.counts["watches that resumed"] += 1
        if isinstance(error, RevisionCompacted | WatcherTooSlow):
            self._revision = 0

    async def _follow(self, call: Any) -> None:
        if not self._revision:
            self._held.clear()
        while True:
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await call.read()
            if not isinstance(response, WatchResponse):
                return
            for change in response.changes:
                self._apply(change)
            if not response.snapshot:
                self._revision = response.revision
            self.counts["changes watched"] += len(response.changes)

    def _apply(self, change: LayoutChange) -> None:
        if change.instance_gone:
            for place in [place for place in self._held if place[0] == change.instance_id]:
                del self._held[place]
            return
        held = self._held[change.instance_id, change.tier]
        held |= {*map(ChunkKey, change.admitted_keys)}
        held -= {*map(ChunkKey, change.evicted_keys)}
