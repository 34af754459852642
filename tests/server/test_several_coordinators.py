"""Two coordinators of their own processes, two nodes, and a client: whichever coordinator is killed, all goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_client.demo.nodes import Nodes
from lmkv_client.demo.process import pids_with_environment
from lmkv_kernels import checksum
from tests.server.node.cases import small_spec
from tests.server.node.engine_client import EngineClient
from tests.server.node.ordering import until

SPEC = small_spec()
CHUNK_COUNT = 50
TOKENS = [number % 1000 for number in range(CHUNK_COUNT * SPEC.chunk_size)]
KEYS = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
NAMES = ("node-1", "node-2")


class World:
    """A prompt on the first of two nodes, that two coordinators know of."""

    def __init__(self, coordinators: list[cluster.Coordinator], engines: list[EngineClient], folder: Path) -> None:
        self.coordinators = coordinators
        self.addresses = [coordinator.address for coordinator in coordinators]
        self.engines = engines
        self._folder = folder

    def pid(self, name: str) -> int:
        """Process id of a node."""
        (pid,) = pids_with_environment({"LMKV_RUNTIME_DIR": str(self._folder), "LMKV_INSTANCE_ID": name}, "node")
        return pid

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
            coordinators.append(stack.enter_context(cluster.Coordinator(tmp_path / name)))
        addresses = ",".join(coordinator.address for coordinator in coordinators)
        stack.enter_context(
            Nodes(NAMES, coordinator_address=addresses, runtime_dir=short_folder, logs=tmp_path, pool_size="16MiB")
        )
        engines = [
            await stack.enter_async_context(EngineClient(short_folder / name / "engine.sock", name, SPEC))
            for name in NAMES
        ]
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        credits_ = await engines[0].reserve(CHUNK_COUNT)
        commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, credits_, strict=True)]
        await engines[0].say(commits=commits)
        made = World(coordinators, engines, short_folder)
        for address in made.addresses:
            await known(made, address, {"node-1": CHUNK_COUNT})
        yield made


async def known(world: World, address: str, expected: dict[str, int]) -> None:
    """Waits until a coordinator has it so."""
    async with asyncio.timeout(20):
        while True:
            if await world.holders(address) == expected:
                return
            await asyncio.sleep(0.05)


async def test_a_node_finds_and_fetches_what_its_peers_hold_without_either_coordinator(world: World) -> None:
    world.coordinators[0].kill()
    found = await world.engines[1].lookup("1", KEYS)
    assert found.peer_chunk_count == CHUNK_COUNT
    world.coordinators[0].start()
    await asyncio.to_thread(world.coordinators[0].wait_ready)
    await known(world, world.addresses[0], {"node-1": CHUNK_COUNT})


async def test_a_move_whose_coordinator_is_killed_is_seen_through_by_the_other(world: World) -> None:
    destination = world.pid("node-2")
    async with Coordinator(*world.addresses) as coordinator:
        os.kill(destination, signal.SIGSTOP)
        try:
            move = await coordinator.move(TOKENS, source="node-1", destination="node-2")
            name, waiting = move.name, asyncio.create_task(move.wait())
            world.coordinators[0].kill()
            await until(lambda: move.name != name or waiting.done(), 20)
        finally:
            os.kill(destination, signal.SIGCONT)
        result = await waiting
        assert (result.chunk_count, result.dropped_chunk_count) == (CHUNK_COUNT, CHUNK_COUNT)
        assert coordinator.address == world.addresses[1]
    await known(world, world.addresses[1], {"node-2": CHUNK_COUNT})
