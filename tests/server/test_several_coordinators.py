"""Two coordinator processes, two nodes and a client: whichever coordinator is killed, service continues."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from lmkv.errors import OperationCancelled, Unreachable
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, root_key
from lmkv.v1.chunk_pb2 import MISS_REASON_TIER_DOWN
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from tests.server.node.cases import small_spec
from tests.server.node.engine_client import EngineClient, absent_count
from tests.support.nodes import NodeProcesses
from tests.waiting import WAIT_SECONDS

SPEC = small_spec()
CHUNK_COUNT = 48
CHUNKS_PER_MOVE = 8
TOKENS = [number % 1000 for number in range(CHUNK_COUNT * SPEC.chunk_size)]
KEYS = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
NAMES = ("node-1", "node-2")

pytestmark = pytest.mark.timeout(600)  # five processes, and leases that have to end


class World:
    """A prompt on the first of two nodes, that two coordinators know of."""

    def __init__(
        self, coordinators: list[cluster.CoordinatorProcess], nodes: NodeProcesses, engines: list[EngineClient]
    ) -> None:
        self.coordinators = coordinators
        self.addresses = [coordinator.address for coordinator in coordinators]
        self.engines = engines
        self._nodes = nodes

    def pid(self, name: str) -> int:
        """Process id of a node."""
        return self._nodes.pid(name)

    @contextmanager
    def frozen(self, pid: int) -> Iterator[None]:
        """Stands a process still."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    async def book_many(self, address: str) -> list[str]:
        """Has a coordinator move the prompt to the second node, piece by piece; the operations' names."""
        pieces = [KEYS[start : start + CHUNKS_PER_MOVE] for start in range(0, CHUNK_COUNT, CHUNKS_PER_MOVE)]
        async with Coordinator(address) as coordinator:
            moves = [await coordinator.move(keys=piece, source="node-1", destination="node-2") for piece in pieces]
        return [move.name for move in moves]

    async def all_done(self, address: str, names: list[str]) -> None:
        """Waits until a coordinator says of each operation that it did all it was to do."""
        async with Coordinator(address) as coordinator:
            for name in names:
                await until_known(coordinator, name)
                move = await coordinator.operation(name)
                result = await move.wait(120)
                assert (move.name, result.chunk_count, list(result.failures)) == (name, CHUNKS_PER_MOVE, [])
            listed = await coordinator.operations()
        assert {move.name for move in listed if move.state == "done"} >= set(names)

    async def held(self) -> list[set[ChunkKey]]:
        """What each node itself says that it holds."""
        found: list[set[ChunkKey]] = []
        for engine in self.engines:
            found.append(set())
            for key in KEYS:
                if (await engine.lookup("ask", [key])).own:
                    found[-1].add(key)
                await engine.release("ask")
        return found

    async def holders(self, address: str) -> dict[str, int]:
        """Chunks of the prompt that each node holds, as one coordinator has it."""
        async with Coordinator(address) as coordinator:
            answer = await coordinator.lookup(TOKENS)
        return {holder.instance_id: holder.matched_chunk_count for holder in answer.holders}


@pytest.fixture
async def world(tmp_path: Path, short_folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        coordinators = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            coordinators.append(stack.enter_context(cluster.CoordinatorProcess(tmp_path / name)))
        addresses = ",".join(coordinator.address for coordinator in coordinators)
        nodes = stack.enter_context(
            NodeProcesses(
                NAMES, coordinator_address=addresses, runtime_dir=short_folder, logs=tmp_path, pool_size="16MiB"
            )
        )
        engines = [
            await stack.enter_async_context(EngineClient(short_folder / name / "engine.sock", name, SPEC))
            for name in NAMES
        ]
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        credits_ = await engines[0].reserve(CHUNK_COUNT)
        commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, credits_, strict=True)]
        await engines[0].say(commits=commits)
        made = World(coordinators, nodes, engines)
        for address in made.addresses:
            await known(made, address, {"node-1": CHUNK_COUNT})
        for coordinator in coordinators:
            await served(coordinator)
        yield made


async def until_known(coordinator: Coordinator, name: str) -> None:
    """Waits until a coordinator knows an operation: after its start, its nodes must reconnect first."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            with suppress(Unreachable):
                await coordinator.operation(name)
                return
            await asyncio.sleep(0.05)


async def served(coordinator: cluster.CoordinatorProcess) -> None:
    """Waits until a coordinator knows that both nodes serve the spec: a frozen node cannot report it."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            instances = await asyncio.to_thread(coordinator.instances)
            if [name for name in NAMES if name in instances and instances[name].specs] == list(NAMES):
                return
            await asyncio.sleep(0.05)


async def known(world: World, address: str, expected: dict[str, int]) -> None:
    """Waits until a coordinator has it so."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            if await world.holders(address) == expected:
                return
            await asyncio.sleep(0.05)


async def test_a_node_finds_and_fetches_what_its_peers_hold_without_either_coordinator(world: World) -> None:
    world.coordinators[0].kill()
    async with asyncio.timeout(WAIT_SECONDS):  # a lookup that the connection's end interrupts may miss
        while absent_count(found := await world.engines[1].lookup("1", KEYS)) != CHUNK_COUNT:
            assert [(span.reason, span.tier) for span in found.missed] == [(MISS_REASON_TIER_DOWN, "peers")]
            await world.engines[1].release("1")
    world.coordinators[0].start()
    await asyncio.to_thread(world.coordinators[0].wait_ready)
    await known(world, world.addresses[0], {"node-1": CHUNK_COUNT})


async def test_moves_whose_coordinator_is_killed_are_seen_through_by_the_other(world: World) -> None:
    async with Coordinator(*world.addresses) as coordinator:
        with world.frozen(world.pid("node-2")):
            names = await world.book_many(world.addresses[0])
            moves = [await coordinator.operation(name) for name in names]
            waiting = asyncio.gather(*(move.wait(120) for move in moves))
            world.coordinators[0].kill()
        assert [result.chunk_count for result in await waiting] == [CHUNKS_PER_MOVE] * len(names)
        assert [move.name for move in moves] == names
        assert coordinator.address == world.addresses[1]
    await world.all_done(world.addresses[1], names)
    assert await world.held() == [set(), set(KEYS)]
    world.coordinators[0].start()  # which hears what became of them
    await asyncio.to_thread(world.coordinators[0].wait_ready)
    await world.all_done(world.addresses[0], names)


async def test_a_single_coordinator_continues_after_its_restart(world: World) -> None:
    with world.frozen(world.pid("node-2")):
        names = await world.book_many(world.addresses[0])
        for coordinator in world.coordinators:
            coordinator.kill()
        world.coordinators[0].start()
    await asyncio.to_thread(world.coordinators[0].wait_ready)
    await world.all_done(world.addresses[0], names)
    assert await world.held() == [set(), set(KEYS)]


async def test_a_coordinator_that_was_frozen_meanwhile_does_no_harm(world: World) -> None:
    with ExitStack() as until_it_thaws:
        with world.frozen(world.pid("node-2")):
            names = await world.book_many(world.addresses[0])
            until_it_thaws.enter_context(world.frozen(world.coordinators[0].pid))
        await world.all_done(world.addresses[1], names)
        assert await world.held() == [set(), set(KEYS)]
        async with Coordinator(world.addresses[1]) as coordinator:  # what the frozen one knows is wrong from here on
            await (await coordinator.move(TOKENS, source="node-2", destination="node-1")).wait(120)
    await world.all_done(world.addresses[0], names)
    await known(world, world.addresses[0], {"node-1": CHUNK_COUNT})
    assert await world.held() == [set(KEYS), set()]


async def test_a_move_can_be_followed_and_cancelled_at_another_coordinator(world: World) -> None:
    with world.frozen(world.pid("node-2")):
        (name, *_) = await world.book_many(world.addresses[0])
        async with Coordinator(world.addresses[1]) as elsewhere:
            await until_known(elsewhere, name)
            move = await elsewhere.operation(name)
            assert (move.state, move.progress.chunk_count) == ("running", CHUNKS_PER_MOVE)
            await move.cancel()
    async with Coordinator(*world.addresses) as coordinator, Coordinator(world.addresses[1]) as elsewhere:
        with pytest.raises(OperationCancelled):
            await (await coordinator.operation(name)).wait(120)
        with pytest.raises(OperationCancelled):
            await (await elsewhere.operation(name)).wait(120)
    first, second = await world.held()
    assert first | second == set(KEYS)
