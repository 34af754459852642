"""Two coordinator processes, two nodes and a client: whichever coordinator is killed, service continues."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import pytest

from lmkv.errors import OperationCancelled, OperationNotFound
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, root_key
from lmkv.v1.chunk_pb2 import MISS_REASON_TIER_DOWN
from lmkv_client import Coordinator, MoveOperation
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient, absent_count
from tests.support.nodes import NodeProcesses
from tests.support.specs import small_spec
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

    async def begin_many(self, coordinator: Coordinator) -> list[MoveOperation]:
        """Moves the prompt to the second node, piece by piece."""
        pieces = [KEYS[start : start + CHUNKS_PER_MOVE] for start in range(0, CHUNK_COUNT, CHUNKS_PER_MOVE)]
        return [await coordinator.move(keys=piece, source="node-1", destination="node-2") for piece in pieces]

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
        await engines[0].say(commit=commits)
        made = World(coordinators, nodes, engines)
        for address in made.addresses:
            await known(made, address, {"node-1": CHUNK_COUNT})
        for coordinator in coordinators:
            await served(coordinator)
        yield made


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


async def all_done(moves: list[MoveOperation]) -> None:
    """Waits until each move has ended without a failure."""
    results = await asyncio.gather(*(move.wait(120) for move in moves))
    assert [list(result.failures) for result in results] == [[]] * len(moves)


async def test_moves_whose_coordinator_is_killed_are_repeated_at_the_other(world: World) -> None:
    async with Coordinator(*world.addresses) as coordinator:
        with world.frozen(world.pid("node-2")):
            moves = await world.begin_many(coordinator)
            assert coordinator.address == world.addresses[0]
            waiting = asyncio.create_task(all_done(moves))
            world.coordinators[0].kill()
        await waiting
        assert coordinator.address == world.addresses[1]
        assert all(move.is_repeated for move in moves)
    assert await world.held() == [set(), set(KEYS)]


async def test_moves_are_repeated_at_a_single_coordinator_after_its_restart(world: World) -> None:
    async with Coordinator(world.addresses[0]) as coordinator:
        with world.frozen(world.pid("node-2")):
            moves = await world.begin_many(coordinator)
            for each in world.coordinators:
                each.kill()
            world.coordinators[0].start()
        await asyncio.to_thread(world.coordinators[0].wait_ready)
        await all_done(moves)
    assert await world.held() == [set(), set(KEYS)]


async def test_a_coordinator_that_was_frozen_meanwhile_loses_no_chunk(world: World) -> None:
    async with Coordinator(world.addresses[0]) as frozen, Coordinator(world.addresses[1]) as other:
        with ExitStack() as until_it_thaws:
            with world.frozen(world.pid("node-2")):
                await world.begin_many(frozen)
                until_it_thaws.enter_context(world.frozen(world.coordinators[0].pid))
            await all_done(await world.begin_many(other))
            assert await world.held() == [set(), set(KEYS)]
            await (await other.move(TOKENS, source="node-2", destination="node-1")).wait(120)
        async with asyncio.timeout(WAIT_SECONDS):  # what the frozen one knew is wrong, and its moves continue
            while True:
                if all(move.done for move in await frozen.operations()):
                    break
                await asyncio.sleep(0.05)
    first, second = await world.held()
    assert first | second == set(KEYS)


async def test_a_move_is_found_and_cancelled_through_any_of_the_coordinators_that_a_client_names(world: World) -> None:
    async with Coordinator(*world.addresses) as both, Coordinator(world.addresses[1]) as elsewhere:
        with world.frozen(world.pid("node-2")):
            async with Coordinator(world.addresses[0]) as one:
                name = (await world.begin_many(one))[0].name
            with pytest.raises(OperationNotFound, match="repeat"):
                await elsewhere.operation(name)
            move = await both.operation(name)
            assert (move.state, move.progress.chunk_count) == ("running", CHUNKS_PER_MOVE)
            await move.cancel()
        with pytest.raises(OperationCancelled):
            await (await both.operation(name)).wait(120)
    first, second = await world.held()
    assert first | second == set(KEYS)
