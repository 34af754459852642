"""Who does what in the soak test. Each actor draws what it does next from a generator of its own, seeded by its name.

What the schedule says is the same for the same seed; how far each thing comes is up to the machine.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import httpx
from google.longrunning import operations_pb2, operations_pb2_grpc

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import cache_service_pb2 as cache_pb
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from tests.soak.fleet import PROMPTS, Engine, SoakNode, WrongBytes

TROUBLE = (LmkvError, grpc.RpcError, TimeoutError, OSError, AssertionError, asyncio.InvalidStateError)
"""What an engine may see of a node that is killed or frozen; `EngineClient` asserts that its stream goes on."""
CALL_SECONDS = 5.0
NOBODYS = ChunkKey(bytes(16))
ATTACHED_ACTS = 60
"""After so many acts an engine leaves and comes back."""


class Actor(ABC):
    """Something that acts until the test ends."""

    def __init__(self, name: str, seed: int, counts: Counter[str]) -> None:
        self.name = name
        self.chance = random.Random(f"{seed}/{name}")
        self.counts = counts
        """How often each thing was done, for the report."""

    @abstractmethod
    async def run(self) -> None:
        """Acts until it is cancelled."""


class EngineActor(Actor):
    """An engine that stores, looks up, loads, and gives up loads, at one node."""

    def __init__(self, node: SoakNode, number: int, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"{node.name}/engine-{number}", seed, counts)
        self._node = node
        self._ticket = 0

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            try:
                async with self._node.engine() as engine:
                    for _ in range(ATTACHED_ACTS):
                        await self._act(engine)
            except TROUBLE:
                self.counts["lines lost"] += 1
                await asyncio.sleep(self.chance.uniform(0.05, 0.5))

    async def _act(self, engine: Engine) -> None:
        prompt = self.chance.choice(PROMPTS)
        prompt = prompt[: self.chance.randint(1, len(prompt))]
        acts: Sequence[Callable[[Engine, list[ChunkKey]], Awaitable[None]]] = (self._store, self._load, self._abandon)
        (act,) = self.chance.choices(acts, weights=(3, 6, 2))
        await act(engine, prompt)
        await asyncio.sleep(self.chance.uniform(0, 0.1))

    async def _lookup(self, engine: Engine, prompt: list[ChunkKey]) -> pb.FoundChunks:
        """Looks a prompt up, and checks what is there already."""
        self._ticket += 1
        found = await engine.client.lookup(str(self._ticket), prompt)
        for key, extent in zip(prompt, found.own, strict=False):
            engine.check(key, extent)
        return found

    async def _store(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Computes what nobody has."""
        found = await self._lookup(engine, prompt)
        missing = prompt[len(found.own) + found.peer_chunk_count :]
        extents = await engine.client.reserve(len(missing)) if missing else []
        commits = [
            engine.client.commit(key, extent, checksum=engine.write(key, extent))
            for key, extent in zip(missing, extents, strict=False)
        ]
        await engine.client.say(commits=commits, releases=[pb.ReleaseChunks(request_id=str(self._ticket))])
        self.counts["chunks stored"] += len(commits)

    async def _load(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Brings in what peers have, and checks it."""
        found = await self._lookup(engine, prompt)
        done = not found.peer_chunk_count
        await self._begin(engine, found)
        while not done:
            for loaded in await engine.client.hear("loaded"):
                done |= loaded.done
                for index, extent in enumerate(loaded.extents):
                    engine.check(prompt[loaded.first_chunk + index], extent)
                self.counts["chunks fetched"] += len(loaded.extents)
                self.counts["fetches that fell short"] += loaded.status.code != 0
        await engine.client.release(str(self._ticket))

    async def _abandon(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Gives up a load, wherever it is."""
        await self._begin(engine, await self._lookup(engine, prompt))
        await asyncio.sleep(self.chance.choice([0, 0.001, 0.005, 0.02, 0.1]))
        await engine.client.release(str(self._ticket))
        await engine.client.lookup("nothing", [NOBODYS])  # what was said before the answer has been heard then
        engine.client.heard.ClearField("loaded")
        self.counts["loads given up"] += 1

    async def _begin(self, engine: Engine, found: pb.FoundChunks) -> None:
        load = pb.LoadChunks(
            request_id=str(self._ticket), first_chunk=len(found.own), chunk_count=found.peer_chunk_count
        )
        load.timeout.FromMilliseconds(round(1000 * self.chance.choice([0.05, 0.3, 1, 3])))
        if found.peer_chunk_count:
            await engine.client.say(loads=[load])


class MoveActor(Actor):
    """Somebody who moves and copies prompts between nodes, and calls some of it off."""

    def __init__(self, nodes: Sequence[SoakNode], address: str, seed: int, counts: Counter[str]) -> None:
        super().__init__("mover", seed, counts)
        self._names = [node.name for node in nodes]
        self._address = address

    async def run(self) -> None:
        """See `Actor`."""
        async with rpc.open_channel(self._address) as channel:
            stub: Any = CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            while True:
                await asyncio.sleep(self.chance.uniform(0.05, 0.4))
                source, destination = self.chance.sample(self._names, 2)
                request = cache_pb.MoveRequest(
                    old_position=Position(instance_id=source),
                    new_position=Position(instance_id=destination),
                    chunk_keys=join_keys(self.chance.choice(PROMPTS)),
                    copy=self.chance.random() < 0.3,
                )
                is_called_off, after = self.chance.random() < 0.3, self.chance.uniform(0, 0.05)
                with suppress(grpc.RpcError):  # nobody has it, or who has it is away
                    operation = await stub.Move(request, timeout=CALL_SECONDS)
                    self.counts["moves"] += 1
                    if is_called_off:
                        await asyncio.sleep(after)
                        cancel = operations_pb2.CancelOperationRequest(name=operation.name)
                        await operations.CancelOperation(cancel, timeout=CALL_SECONDS)
                        self.counts["moves called off"] += 1


class Reaper(Actor):
    """Kills nodes, starts them again, freezes them and lets them go on; never all at once."""

    def __init__(self, nodes: Sequence[SoakNode], seed: int, counts: Counter[str]) -> None:
        super().__init__("reaper", seed, counts)
        self._nodes = nodes

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.5, 2))
            node, seconds = self.chance.choice(self._nodes), self.chance.uniform(0.05, 2.5)
            if self.chance.random() < 0.4:
                await self._kill(node, seconds)
            else:
                await self._freeze(node, seconds)

    async def _kill(self, node: SoakNode, seconds: float) -> None:
        await asyncio.to_thread(node.kill)
        self.counts["kills"] += 1
        await asyncio.sleep(seconds)
        node.start()

    async def _freeze(self, node: SoakNode, seconds: float) -> None:
        if not node.process.alive:
            self.counts["deaths of their own"] += 1
            node.start()
            return
        node.freeze()
        self.counts["freezes"] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            node.thaw()


class Watcher(Actor):
    """Somebody who looks at all metrics all the time. Raises `WrongBytes` if a node found damage in its own pool."""

    def __init__(self, nodes: Sequence[SoakNode], seed: int, counts: Counter[str]) -> None:
        super().__init__("watcher", seed, counts)
        self._nodes = nodes

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            await asyncio.sleep(0.05)
            for node in self._nodes:
                if not node.frozen and node.process.alive:
                    with suppress(httpx.HTTPError):
                        self._look(node, await node.metrics())

    def _look(self, node: SoakNode, metrics: dict[str, float]) -> None:
        for name in ("quarantined_bytes", "read_grants"):
            most = f"{name} at most"
            self.counts[most] = max(self.counts[most], round(metrics[name]))
        if metrics["damaged_chunks_total"]:
            raise WrongBytes(f"{node.name} found chunks damaged in its own memory")
