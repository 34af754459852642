"""Nodes without bytes, many to a process: `python -m benchmarks.coordinator.nodes`, which `benchmarks.scale` starts.

Each is a member of the fleet by the node's own code: it registers, snapshots, reports changes, and comes back whenever
the coordinator does. Only its chunks are nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from benchmarks.coordinator.layouts import random_keys
from lmkv.keys import ChunkKey, split_keys
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1.registry_service_pb2 import Instance, SpecConflict, TierUsage
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.registration import FleetContext
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.sessions.sessions import EngineSessions

CHANGE_SECONDS = 1.0
"""How often each node stores and evicts."""
CHANGED_CHUNKS = 10
"""Chunks that it then gains, and as many that it loses: some 2,500 tokens a second."""
TIER_BYTES = 1 << 20
"""Of the tier that orders would work on; there are none."""
SPEC = KvSpec(
    model_name="scale",
    model_id="scale",
    kv_dtype="bfloat16",
    layer_count=32,
    kv_head_count=8,
    head_size=128,
    chunk_size=256,
)
"""A node that did not register it would mark every chunk as shorter than a chunk should be."""


class ScaledNode:
    def __init__(self, number: int, chunk_count: int) -> None:
        self._number = number
        self._random = random.Random(-number)
        self._held: deque[ChunkKey] = deque(split_keys(random_keys(number, chunk_count)))
        tier = HostTier(TIER_BYTES)
        self._orders = OrderRunner(OrderContext(instance_id=self.name, tier=tier, engines=EngineSessions(tier)))

    @property
    def name(self) -> str:
        """Its instance id."""
        return f"node-{self._number:05}"

    @asynccontextmanager
    async def member(self, coordinator_addresses: Sequence[str]) -> AsyncIterator[FleetMembership]:
        async with (
            self._orders,
            FleetMembership(coordinator_addresses, FleetContext(node=self, orders=self._orders)) as fleet,
        ):
            yield fleet

    async def live(self, coordinator_addresses: Sequence[str], started: asyncio.Semaphore) -> None:
        """Joins, then stores and evicts until cancelled. `started` limits concurrent joins."""
        async with AsyncExitStack() as stack:
            async with started:
                fleet = await stack.enter_async_context(self.member(coordinator_addresses))
                await fleet.started()
            while True:
                await asyncio.sleep(CHANGE_SECONDS * self._random.uniform(0.5, 1.5))
                for _ in range(CHANGED_CHUNKS):
                    self.gain(fleet)
                    fleet.evicted(HOST, SPEC.fingerprint, self._held.popleft())

    def gain(self, fleet: FleetMembership) -> ChunkKey:
        """Stores a chunk, and reports it."""
        gained = ChunkKey(self._random.randbytes(16))
        self._held.append(gained)
        fleet.admitted(HeldChunk(HOST, SPEC.fingerprint, gained, SPEC.chunk_size))
        return gained

    def describe(self) -> Instance:
        """One node of this size."""
        usage = TierUsage(tier=HOST, capacity_bytes=1 << 40, chunk_count=len(self._held))
        return Instance(
            instance_id=self.name,
            epoch=1,
            peer_address=f"127.0.0.1:{1 + self._number}",
            specs=[SPEC.to_proto()],
            tiers=[usage],
        )

    def conflicts_changed(self, conflicts: list[SpecConflict]) -> None:
        """All nodes have the same KvSpec."""

    def snapshot(self) -> Iterator[HeldChunk]:
        for key in self._held:
            yield HeldChunk(tier=HOST, fingerprint=SPEC.fingerprint, key=key, token_count=SPEC.chunk_size)


async def live(args: argparse.Namespace) -> None:
    """All nodes of this process."""
    nodes = [ScaledNode(args.first + number, args.chunks) for number in range(args.count)]
    at_a_time = asyncio.Semaphore(32)
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.live(args.coordinator, at_a_time))


def main() -> None:
    """Lives until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", action="append", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    uvloop.run(live(parser.parse_args()))


if __name__ == "__main__":
    main()
