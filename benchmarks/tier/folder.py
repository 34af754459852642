"""A shared folder as the remote tier, beside vLLM's own file-system tier in the same folder.

`vllm` is what vLLM's tier calls, on as many threads as it has, each block a job of its own. Both are measured to the
device: writes until the files are synchronized, reads with none of their pages in memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.support.command import BenchmarkRun
from benchmarks.support.encryption import encryption_in
from benchmarks.tier.passes import TIMEOUT_SECONDS, Chunks, Passes, through
from lmkv.config.remote_url import parse_remote_url
from lmkv.units import GIB
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.tiers.remote.folder import FolderStore
from lmkv_server.node.tiers.remote.sweeper import FolderLimits
from lmkv_server.node.tiers.remote.tier import RemoteTier

SIZES = {"512kib": 512 << 10, "2mib": 2 << 20, "8mib": 8 << 20}
SIZE_BYTES = 256 << 20
WAYS = ("tier", "encrypted")
VLLM_THREADS = 16
"""The default of vLLM's tier, for reads and for writes."""


def measure(run: BenchmarkRun, rounds: int) -> None:
    """Adds rows for each size of chunks. In a round, each way follows vLLM's, and reads between two of its reads."""
    for name, chunk_bytes in SIZES.items():
        run.say(f"shared folder: chunks of {chunk_bytes >> 10} KiB")
        passes = Passes("vllm")
        with (
            Chunks(chunk_bytes, SIZE_BYTES) as chunks,
            tempfile.TemporaryDirectory(prefix="lmkv-", dir=run.args.folder) as folder,
        ):
            for _ in range(rounds):
                vllm = _VllmTier(Path(folder, "vllm"), chunks)
                with passes.timed("vllm", "write", chunks.size_bytes):
                    vllm.write()
                    _synchronize(vllm.files)
                with passes.timed("vllm", "read", chunks.size_bytes):
                    vllm.read()
                for way in WAYS:
                    _measure_way(run, way, Path(folder, way), vllm, passes)
                vllm.remove()
        run.add(*passes.rows("folder", name))


def _measure_way(run: BenchmarkRun, way: str, folder: Path, vllm: _VllmTier, passes: Passes) -> None:
    folder.mkdir(exist_ok=True)
    chunks = vllm.chunks
    url = parse_remote_url(f"file://{folder}")
    tier = RemoteTier(
        FolderStore(url, timeout_seconds=TIMEOUT_SECONDS, limits=FolderLimits(size_bytes=1024 * GIB)),
        HostCache(pool=chunks.pool, tier=chunks.tier, events=CacheEvents()),
        lookup_seconds=TIMEOUT_SECONDS,
        encryption=encryption_in(run.folder) if way == "encrypted" else None,
    )
    written = partial(_synchronize_all, folder)
    asyncio.run(through(tier, chunks, passes, way, vllm.read, written))


class _VllmTier:
    """The calls of vLLM's tier for the chunks of a pool."""

    def __init__(self, folder: Path, chunks: Chunks) -> None:
        from vllm.v1.kv_offload.tiering.fs import io, thread_pool

        folder.mkdir(exist_ok=True)
        self.chunks = chunks
        self.files = [folder / f"{index:03x}" / f"{index:02x}_g0" / key.hex() for index, key in enumerate(chunks.keys)]
        self._io = io
        self._pool = thread_pool.DualQueueThreadPool(VLLM_THREADS, VLLM_THREADS)
        self._direct = io.probe_o_direct(str(folder))

    def write(self) -> None:
        """Writes each chunk to a file of its own."""
        self._run(self._io.batch_store_block, "enqueue_store")

    def read(self) -> None:
        """Reads the files into the pool, past the page cache if the file system supports it."""
        self._run(self._io.batch_load_block, "enqueue_load")

    def remove(self) -> None:
        """Removes the files, and ends the threads."""
        self._pool.shutdown()
        for file in self.files:
            file.unlink()

    def _run(self, call: Callable[..., None], enqueue: str) -> None:
        size = self.chunks.spec.chunk_bytes
        for index, file in enumerate(self.files):
            task = partial(call, [str(file)], self.chunks.pool.buffer, [index * size], size, self._direct)
            getattr(self._pool, enqueue)(index, 1, [task])
        self._pool.wait_idle()
        finished = self._pool.get_finished()
        assert len(finished) == len(self.files)
        assert all(is_done for _, is_done, _ in finished)


def _synchronize_all(folder: Path) -> None:
    _synchronize(path for path in folder.rglob("*") if path.is_file())


def _synchronize(files: Iterable[Path]) -> None:
    """Has the device hold the files, and memory none of their pages."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
