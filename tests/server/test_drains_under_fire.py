"""Drains between nodes of their own processes, by NIXL, while processes are killed and pools are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import lmkv_client as sdk
from lmkv.errors import NoFreeExtents
from lmkv.keys import ChunkKey
from lmkv.v1.cache_service_pb2 import DrainResult
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.specs import small_spec

SPEC = small_spec()
NAMES = ("node-1", "node-2", "node-3")


def keys_of(first: int, count: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(16, "big")) for number in range(first, first + count)]


class Fleet(NamedTuple):
    """Nodes, with an engine at each."""

    processes: NodeProcesses
    engines: dict[str, EngineClient]

    async def store(self, name: str, keys: Sequence[ChunkKey]) -> None:
        """Has a node hold chunks of zeros, as fresh memory is."""
        engine = self.engines[name]
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)
        for start in range(0, len(keys), 50):
            part = keys[start : start + 50]
            credits_ = await engine.reserve(len(part))
            await engine.say(
                commit=[engine.commit(key, one, checksum=of_zeros) for key, one in zip(part, credits_, strict=True)]
            )

    async def held(self, name: str, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Which of the chunks a node itself finds."""
        found = set()
        for key in keys:
            if (await self.engines[name].lookup("ask", [key])).own:
                found.add(key)
            await self.engines[name].release("ask")
        return found


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorProcess:
    return CoordinatorProcess(tmp_path)


@asynccontextmanager
async def fleet(
    coordinator: CoordinatorProcess, logs: Path, folder: Path, *, names: Sequence[str] = NAMES, pool_size: str = "64MiB"
) -> AsyncIterator[Fleet]:
    processes = NodeProcesses(
        names, coordinator_address=coordinator.address, runtime_dir=folder, logs=logs, pool_size=pool_size
    )
    with processes:
        async with AsyncExitStack() as stack:
            engines = {
                name: await stack.enter_async_context(EngineClient(processes.socket(name), name, SPEC))
                for name in names
            }
            yield Fleet(processes, engines)


async def known(asked: sdk.Coordinator, name: str, count: int) -> None:
    """Waits until the coordinator knows this number of chunks of a node."""
    async with asyncio.timeout(60):
        found: set[bytes] = set()
        async for update in asked.watch():
            for change in update.changes:
                if change.instance_id == name:
                    found.update(change.admitted_keys)
            if len(found) >= count:
                return


@pytest.mark.timeout(600)
async def test_chunks_reach_another_node_if_a_destination_is_killed(
    coordinator: CoordinatorProcess, tmp_path: Path, short_folder: Path
) -> None:
    for attempt in range(5):  # a drain that is faster than the kill shows nothing
        folder = short_folder / str(attempt)
        folder.mkdir()
        with coordinator:
            async with (
                fleet(coordinator, tmp_path, folder) as running,
                sdk.Coordinator(coordinator.address) as asked,
            ):
                if await drains_around_a_kill(running, asked):
                    return
    raise AssertionError("no drain was under way when its destination was killed")


async def drains_around_a_kill(running: Fleet, asked: sdk.Coordinator) -> bool:
    """Whether a drain was under way when its first destination was killed; checks what became of the chunks then."""
    keys = keys_of(0, 3000)  # three batches
    await running.store("node-1", keys)
    await running.store("node-3", keys[:1000])  # these need no copy
    await known(asked, "node-1", 3000)
    await known(asked, "node-3", 1000)
    drain = await asked.drain("node-1", destinations=NAMES[1:])
    while not drain.progress.done_chunk_count and not drain.done:
        await drain.refresh()
    running.processes.kill("node-2")
    await drain.refresh()
    if drain.done:
        return False
    result = await drain.wait()
    assert result.remaining_chunk_count == 0
    assert drain.progress.chunk_count >= 2000
    running.engines.pop("node-2")
    assert await running.held("node-3", keys) == set(keys)
    assert await running.held("node-1", keys) == set(keys), "a drain drops nothing"
    return True


@pytest.mark.timeout(600)
async def test_a_drain_continues_after_its_coordinator_was_killed(
    coordinator: CoordinatorProcess, tmp_path: Path, short_folder: Path
) -> None:
    keys = keys_of(0, 3000)
    with coordinator:
        async with fleet(coordinator, tmp_path, short_folder, names=NAMES[:2]) as running:
            await running.store("node-1", keys)
            async with sdk.Coordinator(coordinator.address) as asked:
                await known(asked, "node-1", 3000)
                drain = await asked.drain("node-1")
                coordinator.kill()
                coordinator.start()
                await asyncio.to_thread(coordinator.wait_ready)
                result: DrainResult = await drain.wait(120)
            assert result.remaining_chunk_count == 0
            assert await running.held("node-2", keys) == set(keys)


@pytest.mark.timeout(600)
async def test_a_full_destination_keeps_its_own_chunks_unless_it_may_evict(
    coordinator: CoordinatorProcess, tmp_path: Path, short_folder: Path
) -> None:
    own, others = keys_of(0, 100), keys_of(10_000, 600)  # a pool has room for some 500
    with coordinator:
        async with (
            fleet(coordinator, tmp_path, short_folder, names=NAMES[:2], pool_size="4MiB") as running,
            sdk.Coordinator(coordinator.address) as asked,
        ):
            await running.store("node-1", own)
            await running.store("node-2", others)
            await known(asked, "node-1", 100)
            before = await running.held("node-2", others)
            drain = await asked.drain("node-1")
            try:
                result = await drain.wait()
                copied, remaining = result.chunk_count, result.remaining_chunk_count
            except NoFreeExtents:
                copied, remaining = 0, 100
            assert copied + remaining == 100
            assert remaining > 0
            assert await running.held("node-2", others) == before
            evicting = await (await asked.drain("node-1", evict=True)).wait()
            assert (evicting.chunk_count, evicting.remaining_chunk_count) == (remaining, 0)
            assert await running.held("node-2", own) == set(own)
