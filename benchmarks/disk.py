"""How fast the disk tier writes behind, and reads into the pool: `python -m benchmarks.disk [FOLDER]`.

Chunks of random bytes in a pool; the whole tier in between, one folder. `bare` is what the device gives to the same
number of threads that write and read the same files without a tier; `page cache` is that, but not past the page cache.
`encrypted` is `plain` with `encryption_key_file`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.support.encryption import encryption_in
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.files import NixlFiles
from lmkv.units import GIB
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.disk.folder import PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.disk.volume import READ_THREADS, WRITE_THREADS

FINGERPRINT = b"f" * 16
TIMEOUT_SECONDS = 120.0


class DiskBench:
    """A full pool, and the events that a node sends to its disk tier."""

    def __init__(self, chunk_count: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.keys = [ChunkKey(index.to_bytes(16, "big")) for index in range(chunk_count)]
        self.pool = Pool.create(chunk_count * chunk_bytes)
        self.pool.populate()
        self.pool.buffer[:] = np.random.default_rng(0).bytes(len(self.pool.buffer))
        self.events = CacheEvents()
        self.tier = HostTier(self.pool.size_bytes, self.events)

    def fill(self) -> None:
        """Commits every chunk."""
        for key in self.keys:
            reserved = self.tier.reserve(self.chunk_bytes)
            assert reserved
            self.tier.commit(
                reserved.offset,
                key=key,
                fingerprint=FINGERPRINT,
                size_bytes=self.chunk_bytes,
                checksum=checksum(self.pool.buffer, reserved.offset, self.chunk_bytes),
                token_count=1,
            )


@contextmanager
def timed(label: str, size_bytes: int) -> Iterator[None]:
    """Prints the throughput of the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = size_bytes / GIB
    print(f"{label:32} {size / wall:6.2f} GB/s {cpu / size:6.2f} cpu s/GB", flush=True)


async def through_tier(bench: DiskBench, folder: Path, io_name: str) -> None:
    """Writes and reads by a disk tier."""
    size_bytes = len(bench.keys) * bench.chunk_bytes
    region = Region(address=bench.pool.address, size_bytes=bench.pool.size_bytes)
    io = NixlFiles(region) if io_name == "nixl" else PlainIo()
    encryption = encryption_in(folder.parent) if io_name == "encrypted" else None
    capacity_bytes = size_bytes + len(bench.keys) * ALIGNMENT  # for the headers of encrypted files

    def tier() -> DiskTier:
        return DiskTier(
            [folder],
            capacity_bytes,
            tier=bench.tier,
            pool=bench.pool,
            events=bench.events,
            io=io,
            encryption=encryption,
        )

    async with tier() as disk:
        bench.fill()
        with timed(f"{io_name}, write-behind", size_bytes):
            for chunk in bench.tier:
                disk.writer.add(chunk)
            await disk.writer.flush()
        bench.tier.drop(bench.keys)
        came: list[int] = []
        with timed(f"{io_name}, read, verify, commit", size_bytes):
            await disk.reader.read(FINGERPRINT, bench.keys, TIMEOUT_SECONDS, lambda at, _: came.append(at))
        assert len(came) == len(bench.keys), "not all came"
        bench.tier.drop(bench.keys)
    began = time.perf_counter()
    async with tier() as again:
        print(f"{again.chunk_count} chunks found again in {1000 * (time.perf_counter() - began):.1f} ms")
        again.forget(bench.keys)
        await again.settle()


def bare(bench: DiskBench, folder: Path, flag: int, label: str) -> None:
    """Writes and reads the same files by as many threads, and nothing else."""
    size, io = bench.chunk_bytes, PlainIo()
    size_bytes = len(bench.keys) * size

    def each(flags: int, move: Callable[[int, memoryview], object]) -> Callable[[int], None]:
        def one(index: int) -> None:
            fd = os.open(folder / str(index), flags | flag, 0o600)
            move(fd, bench.pool.buffer[index * size : (index + 1) * size])
            os.close(fd)

        return one

    with ThreadPoolExecutor(WRITE_THREADS) as threads, timed(f"{label}, write", size_bytes):
        list(threads.map(each(os.O_WRONLY | os.O_CREAT, io.write), range(len(bench.keys))))
    for index in range(len(bench.keys)):
        fd = os.open(folder / str(index), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with ThreadPoolExecutor(READ_THREADS) as threads, timed(f"{label}, read", size_bytes):
        list(threads.map(each(os.O_RDONLY, io.read), range(len(bench.keys))))
    for index in range(len(bench.keys)):
        (folder / str(index)).unlink()


def main() -> None:
    """Measures each size of chunks, each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--size", type=int, default=256, help="MiB to write and read each time")
    folder = (arguments := parser.parse_args()).folder
    for kib in (512, 2048, 8192):
        bench = DiskBench((arguments.size << 10) // kib, kib << 10)
        print(f"--- chunks of {kib} KiB")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            bare(bench, Path(name), os.O_DIRECT, "bare")
            bare(bench, Path(name), 0, "page cache")
            for io_name in ("plain", "encrypted", "nixl"):
                asyncio.run(through_tier(bench, Path(name, io_name), io_name))
        bench.pool.close()


if __name__ == "__main__":
    main()
