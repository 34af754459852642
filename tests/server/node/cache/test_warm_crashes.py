"""Nodes that are killed at any moment: what their next life offers is byte for byte what was stored."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from lmkv.pool.file import PoolFile
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.warm_start import STAMP, Ledger, ledger_bytes
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient
from tests.server.node.warm_parts import POOL_CHUNKS, NodeProcess, held, mapped, store
from tests.support.small_tmpfs import on_small_tmpfs

# ---- a real node, killed while an engine stores more than it has room for

ROUNDS = 5
NUMBERS = 3 * POOL_CHUNKS
BEGIN_TIMEOUT_SECONDS = 120.0


async def keep_storing(socket: Path, choose: random.Random, begun: asyncio.Event) -> None:
    """Stores prompts until the node is gone; `begun` is set after the first."""
    async with EngineClient(socket) as engine:
        with await mapped(engine) as attached, suppress(grpc.RpcError, asyncio.InvalidStateError, AssertionError):
            while True:
                first = choose.randrange(NUMBERS - 4)
                await store(engine, attached.pool, *range(first, first + choose.randint(1, 4)))
                begun.set()


async def test_after_kill_9_at_any_moment_only_right_bytes_are_offered(runtime_dir: Path) -> None:
    choose = random.Random(5)
    offered = 0
    for _ in range(ROUNDS):
        node = NodeProcess(runtime_dir)
        try:
            await node.ready()
            async with EngineClient(node.socket) as engine:
                with await mapped(engine) as attached:
                    found = await held(engine, attached.pool, *range(NUMBERS))
            assert "dropped as damaged" not in node.text().replace(", 0 dropped as damaged", "")
            assert bool(found) == bool(offered)
            begun = asyncio.Event()
            storing = asyncio.create_task(keep_storing(node.socket, choose, begun))
            await asyncio.wait_for(begun.wait(), BEGIN_TIMEOUT_SECONDS)
            threading.Timer(choose.uniform(0.05, 0.5), node.process.kill).start()
            await storing
            offered += len(found) + 1
        finally:
            node.end()
    assert offered > ROUNDS


async def test_sigterm_keeps_the_pool_too(runtime_dir: Path) -> None:
    for expected in ([], [0, 1]):
        node = NodeProcess(runtime_dir)
        try:
            await node.ready()
            async with EngineClient(node.socket) as engine:
                with await mapped(engine) as attached:
                    assert await held(engine, attached.pool, 0, 1) == expected
                    await store(engine, attached.pool, 0, 1)
                    assert await held(engine, attached.pool, 0, 1) == [0, 1]
            node.end(signal.SIGTERM)
            assert node.process.returncode == 0
        finally:
            node.end()


async def test_a_worker_that_outlives_its_node_keeps_the_next_one_from_overwriting(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir)
    try:
        await node.ready()
        async with EngineClient(node.socket) as engine:
            worker = await mapped(engine)
            await store(engine, worker.pool, 0, 1)
            assert await held(engine, worker.pool, 0, 1) == [0, 1]
            node.end()
        node = NodeProcess(runtime_dir)
        await node.ready()
        async with EngineClient(node.socket) as engine:
            with await mapped(engine) as attached:
                assert await held(engine, attached.pool, 0, 1) == [0, 1]
                assert await store(engine, attached.pool, 2) == 0
                worker.close()
                await until(lambda: "no process of the previous node maps the pool any more" in node.text())
                assert await store(engine, attached.pool, 2) == 1
                assert await held(engine, attached.pool, 0, 1, 2) == [0, 1, 2]
    finally:
        node.end()


# ---- a tier without a node, killed during many changes per millisecond

SIZE = 4096
TIER_CHUNKS = 32
POOL_BYTES = TIER_CHUNKS * SIZE

CHURN = """
import random, sys
from pathlib import Path
from lmkv.pool.file import PoolFile
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.warm_start import STAMP, Ledger, ledger_bytes

path, seed, pool_bytes, size = Path(sys.argv[1]), *map(int, sys.argv[2:])
choose = random.Random(seed)
file = PoolFile.open(path, pool_bytes, ledger_bytes(pool_bytes), stamp=STAMP)
ledger = Ledger(file.table)
for record in ledger.records:
    ledger.drop(record.offset)
tier = HostTier(file.pool.size_bytes, ledger)
count = 0
while True:
    if count == 2 * pool_bytes // size:  # the tier was full
        print("ready", flush=True)
    count += 1
    reserved = tier.reserve(size)
    number = choose.randrange(1, 1 << 60)
    content = number.to_bytes(8, "little") * (size // 8)
    for at in range(0, size, 512):
        file.pool.buffer[reserved.offset + at : reserved.offset + at + 512] = content[at : at + 512]
    tier.commit(Chunk(
        key=number.to_bytes(16, "big"), fingerprint=bytes(16), offset=reserved.offset, size_bytes=size, token_count=1,
        checksum=checksum(file.pool.buffer, reserved.offset, size),
    ))
    if choose.random() < 0.3:
        tier.drop([choose.choice(list(tier)).key])
"""


@pytest.mark.parametrize("seed", range(8))
def test_a_tier_that_is_killed_during_changes_leaves_only_whole_chunks(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "pool"
    command = [sys.executable, "-c", CHURN, str(path), str(seed), str(POOL_BYTES), str(SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threading.Timer(random.Random(seed).uniform(0.01, 0.2), process.kill).start()
        process.wait(60)
    with PoolFile.open(path, POOL_BYTES, ledger_bytes(POOL_BYTES), stamp=STAMP) as file:
        assert file.replaced_because == ""
        records = Ledger(file.table).records
        assert len(records) >= TIER_CHUNKS // 2, "all but what was dropped, or under way"
        tier = HostTier(file.pool.size_bytes)
        for record in records:
            assert tier.reserve_at(record.offset, record.size_bytes), "no two of them overlap"
            content = bytes(file.pool.buffer[record.offset : record.offset + SIZE])
            assert content == record.key[8:][::-1] * (SIZE // 8)
            assert checksum(file.pool.buffer, record.offset, SIZE) == record.checksum


# ---- no room

FULL = """
import asyncio, sys
from pathlib import Path
from lmkv.config import NodeConfig
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.node import Node
folder = Path(sys.argv[1])
STEP = 16 << 20

class Late(Node):
    async def _populate(self):
        (folder / "other").write_bytes(bytes(2 * STEP))  # between the promise and the taking
        await super()._populate()

async def main():
    config = NodeConfig(
        instance_id="n", enable_p2p=False, runtime_dir=str(folder), pool_path=str(folder / "pool"), persist_pool=True,
        max_local_cpu_size=3 * STEP / 2**30,
    )
    for kind in (Late, Node):
        (folder / "other").unlink(missing_ok=True)
        async with kind(config) as node:
            await asyncio.wait([node._populating])
            print(node.tier.size_bytes // STEP, bool(node.warm._file.replaced_because), node.warm.stats().found_chunks)
            for number in range(10):
                if reserved := node.tier.reserve(STEP // 2):
                    node.pool.buffer[reserved.offset : reserved.offset + 8] = bytes(8)
                    node.tier.commit(Chunk(key=bytes([number]) * 16, fingerprint=bytes(16), offset=reserved.offset,
                        size_bytes=8, checksum=0x52C48C46FC4A3B47, token_count=1))
asyncio.run(main())
"""


def test_a_file_system_that_is_full_costs_room_and_nothing_that_was_kept(tmp_path: Path) -> None:
    first, second = on_small_tmpfs(tmp_path, 4 * (16 << 20) + (1 << 20), FULL).splitlines()
    assert first == "2 True 0"
    size, news, found = second.split()
    assert (size, news) == ("3", "False")
    assert int(found) == 10
