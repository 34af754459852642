"""Engines that store, look up, load, and give up loads, and check every byte that they see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb
from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.engine import PROMPTS, Engine
from tests.chaos.victim import Node
from tests.server.node.engine_client import absent_count

NOBODYS = ChunkKey(bytes(16))
ATTACHED_ACTS = 60
"""Number of acts after which an engine detaches and attaches again."""


class EngineActor(Actor):
    """An engine that stores, looks up, loads, and gives up loads, at one node."""

    def __init__(self, node: Node, number: int, seed: int, counts: Counter[str]) -> None:
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
        for key, chunk in zip(prompt, found.own, strict=False):
            engine.check(key, chunk)
        return found

    async def _store(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Computes a prompt that is cached nowhere."""
        found = await self._lookup(engine, prompt)
        missing = prompt[len(found.own) + absent_count(found) :]
        extents = await engine.client.reserve(len(missing)) if missing else []
        commits = [
            engine.client.commit(key, extent, checksum=engine.write(key, extent))
            for key, extent in zip(missing, extents, strict=False)
        ]
        await engine.client.say(commit=commits, release=[pb.ReleaseChunks(lookup_id=str(self._ticket))])
        self.counts["chunks stored"] += len(commits)

    async def _load(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Brings in what peers have, and checks it."""
        found = await self._lookup(engine, prompt)
        done = not absent_count(found)
        await self._begin(engine, found)
        while not done:
            for loaded in await engine.client.hear("loaded"):
                done |= loaded.done
                for index, chunk in enumerate(loaded.chunks):
                    engine.check(prompt[loaded.first_chunk + index], chunk)
                self.counts["chunks fetched"] += len(loaded.chunks)
                self.counts["fetches that fell short"] += loaded.status.code != 0
        await engine.client.release(str(self._ticket))

    async def _abandon(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        """Gives up a load, wherever it is."""
        await self._begin(engine, await self._lookup(engine, prompt))
        await asyncio.sleep(self.chance.choice([0, 0.001, 0.005, 0.02, 0.1]))
        await engine.client.release(str(self._ticket))
        await engine.client.lookup("nothing", [NOBODYS])  # what was said before the answer has been heard then
        engine.client.heard.take("loaded")
        self.counts["loads given up"] += 1

    async def _begin(self, engine: Engine, found: pb.FoundChunks) -> None:
        load = pb.LoadChunks(lookup_id=str(self._ticket), first_chunk=len(found.own), chunk_count=absent_count(found))
        load.timeout.FromMilliseconds(round(1000 * self.chance.choice([0.05, 0.3, 1, 3])))
        if absent_count(found):
            await engine.client.say(load=[load])
