"""The start of a node that has chunks: in a pool that outlived its process, in files, in the ledger of a large pool."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import check_memory
from benchmarks.support.rows import Row
from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey
from lmkv.units import GIB
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.warm_start import Ledger, ledger_bytes
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.disk.folder import DiskChunk, DiskFolder

CHUNK_BYTES = 2 << 20
POOL_GIB = 4
LARGE_BYTES = 100 * GIB
"""Of the chunks whose index is read. No memory and no disk is needed for them."""
LOOK_SECONDS = 0.001


def measure(run: BenchmarkRun, rounds: int) -> None:
    """Adds rows: medians of the rounds."""
    run.say(f"warm restarts with a pool of {POOL_GIB} GiB")
    check_memory(POOL_GIB * GIB)
    starts = [_warm_start() for _ in range(rounds)]
    attach, verified, pause = (statistics.median(values) for values in zip(*starts, strict=True))
    run.add(
        Row(name="warm_attach_s", value=attach, unit="s"),
        Row(name="warm_verified_s", value=verified, unit="s"),
        Row(name="warm_verified_gb_per_s", value=POOL_GIB / verified, unit="GB/s"),
        Row(name="warm_pause_ms", value=pause * 1000, unit="ms"),
    )
    run.say("indexes of 100 GiB")
    run.add(
        Row(name="warm_ledger_s", value=statistics.median(_ledger_times(rounds)), unit="s"),
        Row(name="disk_index_s", value=statistics.median(_folder_times(run, rounds)), unit="s"),
    )


def _warm_start() -> tuple[float, float, float]:
    """Seconds until engines can attach, until every chunk is verified, and of the loop's longest pause."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/dev/shm") as folder:
        config = NodeConfig(
            instance_id="bench",
            runtime_dir=f"{folder}/run",
            enable_p2p=False,
            persist_pool=True,
            pool_path=f"{folder}/pool",
            max_local_cpu_size=POOL_GIB,
        )
        return asyncio.run(_two_lives(config))


async def _two_lives(config: NodeConfig) -> tuple[float, float, float]:
    async with Node(config) as node:
        count = await _fill(node)
    started = time.perf_counter()
    async with Node(config) as node:
        assert node.warm
        attach, pause = time.perf_counter() - started, 0.0
        while node.warm.stats().waiting_chunks:
            before = time.perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            pause = max(pause, time.perf_counter() - before)
        verified = time.perf_counter() - started
        assert node.warm.stats().found_chunks == count
    return attach, verified, pause


async def _fill(node: Node) -> int:
    """Fills the pool chunk by chunk; the number of chunks."""
    content = np.random.default_rng(0).bytes(CHUNK_BYTES)
    count = node.tier.size_bytes // CHUNK_BYTES
    for index in range(count):
        reserved = node.tier.reserve(CHUNK_BYTES)
        assert reserved
        node.pool.buffer[reserved.offset : reserved.offset + CHUNK_BYTES] = index.to_bytes(8, "little") + content[8:]
        node.tier.commit(
            Chunk(
                offset=reserved.offset,
                key=_key(index),
                fingerprint=bytes(16),
                size_bytes=CHUNK_BYTES,
                checksum=checksum(node.pool.buffer, reserved.offset, CHUNK_BYTES),
                token_count=256,
            )
        )
        await asyncio.sleep(0)
    return count


def _ledger_times(rounds: int) -> Iterator[float]:
    """Seconds to read a ledger with a record for every chunk."""
    table = memoryview(bytearray(ledger_bytes(LARGE_BYTES)))
    tier, count = HostTier(LARGE_BYTES, Ledger(table)), LARGE_BYTES // CHUNK_BYTES
    for index in range(count):
        reserved = tier.reserve(CHUNK_BYTES)
        assert reserved
        tier.commit(
            Chunk(
                offset=reserved.offset,
                key=_key(index),
                fingerprint=bytes(16),
                size_bytes=CHUNK_BYTES,
                checksum=0,
                token_count=256,
            )
        )
    for _ in range(rounds):
        started = time.perf_counter()
        assert len(Ledger(table).records) == count
        yield time.perf_counter() - started


def _folder_times(run: BenchmarkRun, rounds: int) -> Iterator[float]:
    """Seconds to index a folder with a file for every chunk; the files are sparse."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir=run.args.folder) as folder:
        count = LARGE_BYTES // CHUNK_BYTES
        for index in range(count):
            chunk = DiskChunk(
                key=_key(index), fingerprint=bytes(16), token_count=256, size_bytes=CHUNK_BYTES, serial=index + 1
            )
            path = Path(folder, chunk.file_name)
            path.touch()
            os.truncate(path, chunk.file_bytes)
        for _ in range(rounds):
            disk = DiskFolder(Path(folder))
            started = time.perf_counter()
            assert len(disk.open()) == count
            yield time.perf_counter() - started
            disk.close()


def _key(index: int) -> ChunkKey:
    return ChunkKey(index.to_bytes(16, "big"))
