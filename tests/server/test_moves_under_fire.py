"""Moves between nodes of their own processes, by NIXL, while the coordinator is killed again and again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

import lmkv_client as sdk
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.specs import small_spec

SPEC = small_spec()
KEYS = [ChunkKey(number.to_bytes(16, "big")) for number in range(3000)]
"""Three batches of a move."""
NAMES = ("node-1", "node-2")
ROUNDS = 4


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorProcess:
    return CoordinatorProcess(tmp_path)


@asynccontextmanager
async def nodes(coordinator: CoordinatorProcess, logs: Path, folder: Path) -> AsyncIterator[dict[str, EngineClient]]:
    """Both nodes, with an engine at each."""
    running = NodeProcesses(
        NAMES, coordinator_address=coordinator.address, runtime_dir=folder, logs=logs, pool_size="64MiB"
    )
    with running:
        async with AsyncExitStack() as stack:
            yield {
                name: await stack.enter_async_context(EngineClient(running.socket(name), name, SPEC)) for name in NAMES
            }


async def store(engine: EngineClient) -> None:
    """Has a node hold all of the keys."""
    of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
    for start in range(0, len(KEYS), 50):
        keys = KEYS[start : start + 50]
        credits_ = await engine.reserve(len(keys))
        commits = [engine.commit(key, one, checksum=of_zeros) for key, one in zip(keys, credits_, strict=True)]
        await engine.say(commit=commits)


async def held(engine: EngineClient) -> set[ChunkKey]:
    """What a node itself says that it holds."""
    found = set()
    for key in KEYS:
        if (await engine.lookup("ask", [key])).own:
            found.add(key)
        await engine.release("ask")
    return found


@pytest.mark.timeout(600)
async def test_no_chunk_is_lost_whenever_the_coordinator_dies(
    coordinator: CoordinatorProcess, tmp_path: Path, short_folder: Path
) -> None:
    chance = random.Random(20)
    sources: set[str] = set()
    states: set[str] = set()
    with coordinator:
        async with nodes(coordinator, tmp_path, short_folder) as engines:
            await store(engines["node-1"])
            for number in range(ROUNDS):
                async with sdk.Coordinator(coordinator.address) as asked:
                    source, move = await begin(asked, number)
                    await asyncio.sleep(chance.uniform(0, 0.1 * number))  # wherever that is
                    coordinator.kill()
                    coordinator.start()
                    await asyncio.to_thread(coordinator.wait_ready)
                    await move.wait(120)
                    sources.add(source)
                    states.add(move.state)
            first, second = await held(engines["node-1"]), await held(engines["node-2"])
    assert first | second == set(KEYS)
    assert sources == set(NAMES), "chunks went to node-2, and were moved from there too"
    assert states == {"done"}, "each move was repeated until its end"


async def begin(asked: sdk.Coordinator, number: int) -> tuple[str, sdk.MoveOperation]:
    """Begins a move of all chunks of a node, once it has reported them; returns that node and the move."""
    turns = itertools.cycle(NAMES if number % 2 == 0 else NAMES[::-1])
    async with asyncio.timeout(60):
        for source in turns:
            (destination,) = {*NAMES} - {source}
            with suppress(LmkvError):  # no node is back yet
                move = await asked.move(keys=KEYS, source=source, destination=destination)
                if move.progress.chunk_count:
                    return source, move
            await asyncio.sleep(0.02)
    raise AssertionError("unreachable")
