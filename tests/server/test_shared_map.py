"""Two coordinators that share a layout map, the store they share it in, and two nodes: all killed, one after the other.

Lookups are answered meanwhile, chunks are stored, and in the end all that is held is found at each coordinator.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_server.node.fleet.shard import primaries
from tests.server.node.cases import chunk_key
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.whole_nodes import SPEC, load, mapped, store
from tests.support.nodes import NodeProcesses
from tests.support.redis_server import RedisServer
from tests.waiting import WAIT_SECONDS, until

NAMES = ("node-1", "node-2")
Answer = TypeVar("Answer")

pytestmark = pytest.mark.timeout(600)  # six processes, leases that have to end, and a store that has to be missed


class Host:
    """A node and an engine at it, that stores one chunk after the other. Numbers of chunks are never used again."""

    def __init__(self, name: str, first: int, addresses: str, folder: Path, logs: Path) -> None:
        self.name = name
        self.stored: list[int] = []
        """Numbers of the chunks that this life of the node was given."""
        self.first = first + 1
        self.last = first
        """Number of the newest chunk."""
        self._nodes = NodeProcesses(
            (name,), coordinator_address=addresses, runtime_dir=folder, logs=logs, pool_size="128MiB"
        )
        self._stack = AsyncExitStack()
        self._resting = asyncio.Event()
        self._task: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task.set_result(None)

    async def start(self) -> None:
        """Starts the node, and attaches."""
        self._nodes.socket(self.name).unlink(missing_ok=True)
        await asyncio.to_thread(self._nodes.__enter__)
        self.engine = await self._stack.enter_async_context(
            EngineClient(self._nodes.socket(self.name), self.name, SPEC)
        )
        self.pool = self._stack.enter_context(await asyncio.to_thread(mapped, self.engine)).pool
        self._task = asyncio.create_task(self._store())

    async def kill(self) -> None:
        """Kills the node as a crash would."""
        self._nodes.kill(self.name)
        await self.stop()
        self.stored.clear()

    async def stop(self) -> None:
        """Ends engine and node, whatever state they are in. Idempotent."""
        await self.rest()
        await self._stack.aclose()
        await asyncio.to_thread(self._nodes.__exit__)

    async def rest(self) -> None:
        """Stores no more."""
        self._resting.set()
        with suppress(grpc.RpcError, AssertionError, asyncio.InvalidStateError):  # its node may be gone
            await self._task  # cancelling it would break the engine's stream

    async def held(self) -> set[int]:
        """Numbers of the chunks that the node itself says it holds."""
        found = set()
        for number in self.stored:
            if (await self.engine.lookup("ask", [chunk_key(number)])).own:
                found.add(number)
            await self.engine.release("ask")
        return found

    async def _store(self) -> None:
        self._resting.clear()
        while not self._resting.is_set():
            self.last += 1
            await store(self.engine, self.pool, self.last)
            self.stored.append(self.last)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._resting.wait(), 0.02)  # some fifty a second


class World:
    """All coordinators, and a client."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.server = RedisServer()
        environment = {"LMKV_LAYOUT_MAP_URL": self.server.url}
        self.coordinators = [
            cluster.CoordinatorProcess(logs / str(number), environment=environment) for number in range(2)
        ]
        self.addresses = [coordinator.address for coordinator in self.coordinators]
        known = ",".join(self.addresses)
        self.hosts = [Host(name, 10_000 * number, known, folder, logs) for number, name in enumerate(NAMES)]
        self.answered_count = 0

    @property
    def home(self) -> int:
        """The coordinator that receives the chunks of the first node."""
        return self.addresses.index(primaries(NAMES[0], dict.fromkeys(self.addresses, "m"))[self.addresses[0]])

    async def ask(self) -> None:
        """Looks a prompt up repeatedly. Raises if no coordinator answers."""
        async with Coordinator(*self.addresses) as coordinator:
            while True:
                await coordinator.lookup(keys=[chunk_key(1)])
                self.answered_count += 1
                await asyncio.sleep(0.005)

    async def check_service(self) -> None:
        """Returns when many more lookups were answered, and chunks stored."""
        answered, stored = self.answered_count, self.hosts[1].last
        await until(lambda: self.answered_count > answered + 100 and self.hosts[1].last > stored + 20)

    async def whole(self, *, of: int | None = None) -> None:
        """Returns when each coordinator, or one, knows just what the nodes were given until now."""
        given = {host.name: list(host.stored) for host in self.hosts}
        nothing: set[int] = set()
        for address in self.addresses if of is None else [self.addresses[of]]:
            for name, numbers in given.items():
                await eventually(partial(self._lacks, address, name, numbers), nothing)

    async def _lacks(self, address: str, name: str, numbers: list[int]) -> set[int]:
        return {number for number, names in (await self.holders(address, numbers)).items() if name not in names}

    async def holders(self, address: str, numbers: list[int]) -> dict[int, set[str]]:
        async with Coordinator(address) as coordinator, coordinator.lookup_stream() as stream:
            found = await asyncio.gather(*(stream.lookup(keys=[chunk_key(number)]) for number in numbers))
        return {
            number: {holder.instance_id for holder in one.holders} for number, one in zip(numbers, found, strict=True)
        }

    def shares(self, number: int) -> bool:
        """Whether a coordinator says that it shares its layout map."""
        with urllib.request.urlopen(
            f"http://{self.coordinators[number].http_address}/metrics", timeout=WAIT_SECONDS
        ) as page:
            text = page.read().decode()
        return re.search(r"^lmkv_coordinator_layout_map_shared 1\.0$", text, re.MULTILINE) is not None

    async def sharing(self, expected: bool = True) -> None:
        """Returns when both share it, or neither does."""
        for number in range(2):
            await eventually(partial(asyncio.to_thread, self.shares, number), expected)


async def eventually(ask: Callable[[], Awaitable[Answer]], expected: Answer) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    found: Answer | None = None
    while found != expected:
        with suppress(Unreachable):  # channels take a while to notice that a coordinator is back
            found = await ask()
        assert found == expected or asyncio.get_running_loop().time() < deadline, f"{ask} gives {found}"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def started(folder: Path, logs: Path) -> AsyncIterator[World]:
    world = World(folder, logs)
    async with AsyncExitStack() as stack:
        stack.enter_context(world.server)
        for coordinator in world.coordinators:
            await asyncio.to_thread(stack.enter_context, coordinator)
        for host in world.hosts:
            stack.push_async_callback(host.stop)
            await host.start()
        await world.sharing()
        yield world


async def test_whichever_process_is_killed_nothing_is_lost(tmp_path: Path, short_folder: Path) -> None:
    async with started(short_folder, tmp_path) as world:
        asking = asyncio.create_task(world.ask())
        try:
            await world.check_service()
            await world.whole()
            for number in (world.home, 1 - world.home):
                world.coordinators[number].kill()
                await world.check_service()
                await world.whole(of=1 - number)
                world.coordinators[number].start()
                await asyncio.to_thread(world.coordinators[number].wait_ready)
                await world.whole()
            await world.sharing()

            world.server.kill()
            await world.sharing(False)
            await world.check_service()
            await world.whole()
            world.server.start()  # empty
            await world.sharing()
            await world.whole()

            await world.hosts[0].kill()
            await world.check_service()
            await world.hosts[0].start()
            await world.check_service()
            await world.whole()
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking  # raises if a lookup was not answered
        await compare(world)
        await fetch(world)


async def compare(world: World) -> None:
    """What nodes hold is what both coordinators say, no more and no less, of all chunks there ever were."""
    await until(lambda: all(len(host.stored) > 20 for host in world.hosts))
    for host in world.hosts:
        await host.rest()
    held = {host.name: await host.held() for host in world.hosts}
    assert all(len(numbers) > 20 for numbers in held.values())
    ever = [number for host in world.hosts for number in range(host.first, host.last + 1)]
    right = {number: {name for name in NAMES if number in held[name]} for number in ever}
    for address in world.addresses:
        await eventually(partial(world.holders, address, ever), right)


async def fetch(world: World) -> None:
    """One node finds what the other holds, and gets just that."""
    first, second = world.hosts
    numbers = first.stored[:20]
    keys: list[ChunkKey] = [chunk_key(number) for number in numbers]
    assert absent_count(await second.engine.lookup("fetch", keys)) == len(keys)
    assert await load(second.engine, second.pool, "fetch", 0, len(keys)) == numbers
