"""Instances that come and go: each registers under a new name, reports chunks that only it has, and leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import grpc

from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.engine import SPEC
from tests.chaos.victim import PATIENCE_SECONDS, Coordinator
from tests.server.coordinator.scripted_instance import ScriptedInstance

CHUNKS = 64
MANY_CHUNKS = 50_000
"""As many as one report can have."""
STAY_SECONDS = 1.0


async def fill_histories(coordinator: Coordinator, size_bytes: int) -> None:
    """Has instances come and go until the history of watches has passed on keys of this size, and is full from then on.

    Coordinators that share a layout map pass on the same changes.
    """
    async with coordinator.open_channel() as channel:
        for number in range(-(-size_bytes // (MANY_CHUNKS * KEY_BYTES))):
            chunks = [ChunkKey(b"filling!" + index.to_bytes(8, "big")) for index in range(MANY_CHUNKS)]
            instance = ScriptedInstance(channel, {}, f"filler-{number}", SPEC, chunks)
            with suppress(*TROUBLE):  # a busy coordinator has read it, but not confirmed it within some seconds
                await instance.join()
            await instance.leave()
            request = registry_pb.DeregisterRequest(instance_id=instance.instance_id, epoch=instance.epoch)
            with suppress(grpc.RpcError):  # its lease has expired before
                await RegistryServiceStub(channel).Deregister(request, timeout=PATIENCE_SECONDS)


class VisitorActor(Actor):
    """Half of its instances deregister; the lease of the others expires."""

    def __init__(self, coordinator: Coordinator, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"visitor of {coordinator.name}", seed, counts)
        self._coordinator = coordinator

    async def run(self) -> None:
        """See `Actor`."""
        number = 0
        while True:
            number += 1
            await self._visit(f"{self.name.replace(' ', '-')}-{number}")
            await asyncio.sleep(self.chance.uniform(0, 2 * STAY_SECONDS))

    async def _visit(self, name: str) -> None:
        chunks = [ChunkKey(b"visiting" + self.chance.randbytes(8)) for _ in range(CHUNKS)]
        async with self._coordinator.open_channel() as channel:
            with suppress(*TROUBLE):  # on a busy host, coordinators lose their store for a time, and end all streams
                async with ScriptedInstance(channel, {}, name, SPEC, chunks) as instance:
                    await asyncio.sleep(self.chance.uniform(0, 2 * STAY_SECONDS))
                    await instance.evict(chunks[::2])
                if self.chance.random() < 0.5:
                    request = registry_pb.DeregisterRequest(instance_id=name, epoch=instance.epoch)
                    await RegistryServiceStub(channel).Deregister(request, timeout=PATIENCE_SECONDS)
                self.counts["instances that came and went"] += 1
