"""A shared folder that stops answering costs the chunks in it: no load, no other tier, and no end of a node waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.config.remote_url import parse_remote_url
from lmkv_server.node.tiers.remote.folder import FolderStore
from lmkv_server.node.tiers.remote.sweeper import FolderLimits
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.node_parts import NodeProcess
from tests.server.node.remote_parts import host_with
from tests.server.node.whole_nodes import load, mapped, store
from tests.support.hanging_folder import HangingFolder
from tests.waiting import WAIT_SECONDS

STALL_SECONDS = 0.2
LOAD_SECONDS = 0.5


@pytest.fixture
def folder() -> Iterator[HangingFolder]:
    with HangingFolder() as folder:
        yield folder


def store_in(folder: HangingFolder) -> FolderStore:
    limits = FolderLimits(size_bytes=1 << 30)
    return FolderStore(parse_remote_url(folder.url), timeout_seconds=30.0, limits=limits)


async def test_reads_lookups_and_writes_do_not_wait_for_it(folder: HangingFolder) -> None:
    async with host_with(store_in(folder), lookup_seconds=1.0, stall_seconds=STALL_SECONDS) as host:
        host.store(*range(8))
        await host.flushed()
        host.drop(*range(8))
        assert await host.count(*range(8)) == 8
        folder.freeze()
        assert await host.read(*range(8), seconds=LOAD_SECONDS) == []
        await until(lambda: host.remote.is_down)
        assert await host.count(*range(20)) == 8, "what is known is not asked for"
        assert await host.count(9) == 0
        host.store(30, 31)
        assert host.remote.stats().waiting_chunks == 2, "nothing is written while calls hang"
        folder.thaw()
        await until(lambda: not host.remote.is_down)
        await host.flushed()
        host.drop(*range(8), 30, 31)
        assert await host.count(*range(8)) == 8
        assert await host.read(*range(8)) == list(range(8))


async def test_a_node_whose_folder_hangs_serves_and_ends(folder: HangingFolder, runtime_dir: Path) -> None:
    settings: dict[str, Any] = {
        "remote_url": folder.url,
        "max_remote_size": 1,
        "remote_lookup_timeout": 20.0,
        "remote_timeout": STALL_SECONDS,
    }
    first = NodeProcess(runtime_dir, (), settings | {"instance_id": "a"}).ready()
    try:
        async with EngineClient(first.socket) as engine:
            with mapped(engine) as attached:
                await store(engine, attached.pool, 0, 1, 2)
            await until(lambda: len([file for file in folder.source.rglob("*") if len(file.name) == 32]) >= 4)
        assert first.stop() == 0
    finally:
        first.process.kill()
    nodes = [NodeProcess(runtime_dir, (), settings | {"instance_id": "b"}).ready()]
    try:
        second = nodes[0]
        async with EngineClient(second.socket) as engine:
            with mapped(engine) as attached:
                assert absent_count(await engine.lookup("1", chunk_keys(0, 1, 2))) == 3
                folder.freeze()
                async with asyncio.timeout(WAIT_SECONDS):
                    assert await load(engine, attached.pool, "1", 0, 3, seconds=LOAD_SECONDS) == []
                await engine.release("1")
                await store(engine, attached.pool, 5, 6)
                found = await engine.lookup("2", chunk_keys(5, 6))
                assert (len(found.own), absent_count(found)) == (2, 0), "its own memory is served"
        assert second.stop(signal.SIGTERM) == 0, second.output
        nodes.append(NodeProcess(runtime_dir, (), settings | {"instance_id": "c"}))  # it hangs from the start
        assert nodes[1].ready().stop(signal.SIGTERM) == 0, nodes[1].output
    finally:
        folder.thaw()
        for node in nodes:
            node.process.kill()
