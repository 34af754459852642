"""The disk tier, beside as many threads that write such files, and read the same ones, without a tier.

`tier` uses plain system calls, `nixl` NIXL's POSIX backend, `encrypted` is `tier` with `encryption_key_file`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.support.command import BenchmarkRun
from benchmarks.support.encryption import encryption_in
from benchmarks.tier.passes import Chunks, Passes, through
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.channel import NixlFiles
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.disk.volume import READ_THREADS, WRITE_THREADS

SIZES = {"512kib": 512 << 10, "2mib": 2 << 20, "8mib": 8 << 20}
SIZE_BYTES = 256 << 20
WAYS = ("tier", "encrypted", "nixl")


def measure(run: BenchmarkRun, rounds: int) -> None:
    """Adds rows for each size of chunks. In a round, each way follows the bare threads, which also read its files."""
    for name, chunk_bytes in SIZES.items():
        run.say(f"disk: chunks of {chunk_bytes >> 10} KiB")
        passes = Passes()
        with (
            Chunks(chunk_bytes, SIZE_BYTES) as chunks,
            tempfile.TemporaryDirectory(prefix="lmkv-", dir=run.args.folder) as folder,
        ):
            for _ in range(rounds):
                _bare(chunks, Path(folder), passes)
                for way in WAYS:
                    bare = partial(_read_files, chunks, Path(folder) / way)
                    asyncio.run(through(_tier(chunks, Path(folder), way), chunks, passes, way, bare))
        run.add(*passes.rows("disk", name))


def _tier(chunks: Chunks, folder: Path, way: str) -> DiskTier:
    region = Region(address=chunks.pool.address, size_bytes=chunks.pool.size_bytes)
    io: FileIo = NixlFiles(region) if way == "nixl" else PlainIo()
    return DiskTier(
        [folder / way],
        chunks.size_bytes + len(chunks.keys) * ALIGNMENT,  # for the headers of encrypted files
        HostCache(pool=chunks.pool, tier=chunks.tier, events=CacheEvents()),
        io=io,
        encryption=encryption_in(folder) if way == "encrypted" else None,
    )


def _read_files(chunks: Chunks, folder: Path) -> None:
    """Reads the files of a tier into the pool, whose chunks must have been dropped."""
    io, files = PlainIo(), list(folder.glob("*.chunk"))

    def one(index: int) -> None:
        fd = os.open(files[index], os.O_RDONLY | os.O_DIRECT)
        io.read(fd, chunks.part(index))
        os.close(fd)

    with ThreadPoolExecutor(READ_THREADS) as threads:
        list(threads.map(one, range(len(files))))


def _bare(chunks: Chunks, folder: Path, passes: Passes) -> None:
    io = PlainIo()

    def each(flags: int, move: Callable[[int, memoryview], object]) -> Callable[[int], None]:
        def one(index: int) -> None:
            fd = os.open(folder / str(index), flags | os.O_DIRECT, 0o600)
            move(fd, chunks.part(index))
            os.close(fd)

        return one

    indices = range(len(chunks.keys))
    with ThreadPoolExecutor(WRITE_THREADS) as threads, passes.timed("bare", "write", chunks.size_bytes):
        list(threads.map(each(os.O_WRONLY | os.O_CREAT, io.write), indices))
    with ThreadPoolExecutor(READ_THREADS) as threads, passes.timed("bare", "read", chunks.size_bytes):
        list(threads.map(each(os.O_RDONLY, io.read), indices))
    for index in indices:
        (folder / str(index)).unlink()
