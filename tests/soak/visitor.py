"""Instances that come and go: each registers under a new name, reports chunks that only it has, and leaves."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc

from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.v1 import peer_service_pb2 as peer_pb
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv.v1.peer_service_pb2_grpc import PeerServiceStub
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_server.coordinator.layout_store.records import SHARD_COUNT, ChunkOwner
from lmkv_server.coordinator.services.layout_watch import EVENT_BYTES
from lmkv_server.coordinator.services.services import UNNAMED
from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.asker import holders
from tests.chaos.engine import SPEC
from tests.chaos.operators import Line
from tests.chaos.victim import PATIENCE_SECONDS, Coordinator, Node
from tests.server.coordinator.scripted_instance import ScriptedInstance

CHUNKS = 64
STAY_SECONDS = 1.0
CHANGES_PER_REPORT = 4
REPORTS_PER_STEP = 500
FILL_SECONDS = 300.0
"""What a step may take on a busy host; it takes a part of a second otherwise."""


async def fill_history(coordinator: Coordinator, size_bytes: int) -> None:
    """Has instances gain and lose single chunks until a history of watches of this size has only such changes.

    Fills the logs in the store, too: from then on they take the same memory, as most changes of the load are as small.
    """
    change_count = 1 + size_bytes // (EVENT_BYTES + KEY_BYTES)
    step_count = -(-change_count // (SHARD_COUNT * REPORTS_PER_STEP * CHANGES_PER_REPORT))
    async with Line(coordinator) as line, coordinator.open_channel() as channel:
        for name in _names_by_shard(coordinator.name):
            instance = ScriptedInstance(channel, {}, name, SPEC, [_key(0)])
            await instance.join()
            keys = map(_key, itertools.count())
            pairs = ((gained, lost) for lost, gained in itertools.pairwise(keys))
            for _ in range(step_count):
                for _ in range(REPORTS_PER_STEP):
                    await instance.replace_each(itertools.islice(pairs, CHANGES_PER_REPORT // 2))
                (newest,) = instance.chunks
                await _wait_held(line, instance, newest)
            await instance.leave()
            request = registry_pb.DeregisterRequest(instance_id=name, epoch=instance.epoch)
            await RegistryServiceStub(channel).Deregister(request, timeout=PATIENCE_SECONDS)


async def _wait_held(line: Line, instance: ScriptedInstance, key: ChunkKey) -> None:
    async with asyncio.timeout(FILL_SECONDS):
        while True:
            with suppress(grpc.RpcError):  # a busy coordinator
                ((held_by,), _) = await holders(line, [key])
                if instance.instance_id in held_by:
                    return
            await instance.report_stats()  # renews its lease
            await asyncio.sleep(0.05)


def _names_by_shard(coordinator: str) -> list[str]:
    """A name of an instance for each shard of the store."""
    names: dict[int, str] = {}
    for number in itertools.count():
        if len(names) == SHARD_COUNT:
            break
        name = f"filler-{number}-of-{coordinator}"
        names.setdefault(ChunkOwner(UNNAMED, name).shard, name)
    return list(names.values())


def _key(number: int) -> ChunkKey:
    return ChunkKey(b"filling!" + number.to_bytes(8, "big"))


async def fill_names_of_handoffs(node: Node, count: int) -> None:
    """Has a peer withdraw handoffs: the node remembers the names of this many that have ended."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        stub: Any = PeerServiceStub(channel)
        opening = peer_pb.InitRequest(instance_id="filler", epoch=1, spec=SPEC.to_proto())
        session = await stub.Init(opening, timeout=PATIENCE_SECONDS)
        for number in range(count):
            request = peer_pb.ReleaseRequest(
                handoff_id=f"handoffs of a filler that ended {number}", session_id=session.session_id
            )
            await stub.Release(request, timeout=PATIENCE_SECONDS)


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
