"""Moves between nodes of their own processes, by NIXL, while the coordinator is killed again and again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import lmkv_client as sdk
from lmkv import rpc
from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_kernels import checksum
from tests.server.node.cases import small_spec
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses

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
        await engine.say(commits=commits)


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
                source, name = await begin(coordinator, number)
                await asyncio.sleep(chance.uniform(0, 0.1 * number))  # wherever that is
                coordinator.kill()
                coordinator.start()
                await asyncio.to_thread(coordinator.wait_ready)
                sources.add(source)
                states.add(await state_of(coordinator, name))
            first, second = await held(engines["node-1"]), await held(engines["node-2"])
    assert first | second == set(KEYS)
    assert sources == set(NAMES), "chunks went to node-2, and were moved from there too"
    assert states == {"done"}, "each move was gone on with"


async def begin(coordinator: CoordinatorProcess, number: int) -> tuple[str, str]:
    """Begins a move of all chunks of a node, once it has reported them; returns that node and the move."""
    turns = itertools.cycle(NAMES if number % 2 == 0 else NAMES[::-1])
    async with asyncio.timeout(60), rpc.open_channel(coordinator.address) as channel:
        stub: Any = CacheServiceStub(channel)
        for source in turns:
            (destination,) = {*NAMES} - {source}
            request = pb.MoveRequest(
                old_position=Position(instance_id=source),
                new_position=Position(instance_id=destination),
                chunk_keys=join_keys(KEYS),
            )
            with suppress(grpc.RpcError):  # no node is back yet
                operation = await stub.Move(request, timeout=60)
                progress = pb.MoveProgress()
                assert operation.metadata.Unpack(progress)
                if progress.chunk_count:
                    return source, operation.name
            await asyncio.sleep(0.02)
    raise AssertionError("unreachable")


async def state_of(coordinator: CoordinatorProcess, name: str) -> str:
    """What becomes of an operation of an earlier coordinator."""
    async with sdk.Coordinator(coordinator.address) as asked, asyncio.timeout(120):
        while True:
            with suppress(Unreachable):  # its nodes have not reported it yet
                move = await asked.operation(name)
                await move.wait()
                return move.state
            await asyncio.sleep(0.05)
    raise AssertionError("unreachable")
