"""Passes of a pool's chunks through a tier and back, beside those without a tier: throughput and processor time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from benchmarks.support.chunks import commit_chunk
from benchmarks.support.rows import Row
from benchmarks.support.timing import median_ratio
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv.units import GIB
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.base import Needs, Selection
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.tier import RemoteTier

TIMEOUT_SECONDS = 120.0
_BESIDE = "bare beside "


def spec_of(chunk_bytes: int) -> KvSpec:
    """A spec whose full chunks have this size."""
    spec = KvSpec(
        model_name="bench",
        model_id="bench",
        kv_dtype="float32",
        layer_count=1,
        kv_head_count=1,
        head_size=chunk_bytes // (2 * 16 * 4),
        chunk_size=16,
        format=NATIVE_TILES,
        tile_backend="BENCH",
        block_size=16,
        vocab_size=1000,
    )
    assert spec.chunk_bytes == chunk_bytes
    return spec


class Chunks:
    """A pool of random bytes, and its host tier. A context manager, which closes the pool."""

    def __init__(self, chunk_bytes: int, size_bytes: int) -> None:
        self.spec = spec_of(chunk_bytes)
        count = size_bytes // chunk_bytes
        self.keys = [ChunkKey(index.to_bytes(16, "big")) for index in range(count)]
        self.pool = Pool.create(count * chunk_bytes)
        self.pool.populate()
        self.pool.buffer[:] = np.random.default_rng(0).bytes(len(self.pool.buffer))
        self.tier = HostTier(self.pool.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.pool.close()

    @property
    def size_bytes(self) -> int:
        return self.pool.size_bytes

    def part(self, index: int) -> memoryview:
        """The memory of one chunk."""
        return self.pool.buffer[index * self.spec.chunk_bytes : (index + 1) * self.spec.chunk_bytes]

    def commit(self) -> None:
        """Commits every chunk to the host tier."""
        for key in self.keys:
            commit_chunk(self.pool, self.tier, self.spec, key)


class Cost(NamedTuple):
    """What moving a GB took."""

    seconds: float
    cpu_seconds: float


class Passes:
    """The costs of each act (`write`, `read`) in each way, one for each round."""

    def __init__(self, bare: str = "bare") -> None:
        """`bare` is the way that others are compared with."""
        self._bare = bare
        self._costs: defaultdict[tuple[str, str], list[Cost]] = defaultdict(list)

    @contextmanager
    def timed(self, way: str, act: str, size_bytes: int) -> Iterator[None]:
        """Measures the block, and this process's processor time in it."""
        with _timed(self._costs[way, act], size_bytes):
            yield

    async def timed_between(self, way: str, bare: Callable[[], None], size_bytes: int, read: Awaitable[None]) -> None:
        """Measures a read of a way, and as its baseline the mean of bare reads of the same files before and after it.

        Devices are slower after a burst: only reads of the same moment can be compared.
        """
        around: list[Cost] = []
        with _timed(around, size_bytes):
            await asyncio.to_thread(bare)
        with self.timed(way, "read", size_bytes):
            await read
        with _timed(around, size_bytes):
            await asyncio.to_thread(bare)
        self._costs[_BESIDE + way, "read"].append(Cost(*(statistics.mean(each) for each in zip(*around, strict=True))))

    def rows(self, store: str, chunks: str) -> Iterator[Row]:
        """Returns the rows of every act and way. Their baseline is the bare reads around them, or the bare way.

        Raises `KeyError` if there are none.
        """
        measured = dict(self._costs)
        for (way, act), costs in measured.items():
            if way.startswith(_BESIDE):
                continue
            bare = measured.get((_BESIDE + way, act)) or measured[self._bare, act]
            rates, cpu = [1 / cost.seconds for cost in costs], [cost.cpu_seconds for cost in costs]
            bare_rates, bare_cpu = [1 / cost.seconds for cost in bare], [cost.cpu_seconds for cost in bare]
            yield _row(
                f"{store}_{way}_{act}_{chunks}", "GB/s", "" if way == self._bare else self._bare, rates, bare_rates
            )
            yield _row(
                f"{store}_{way}_{act}_cpu_{chunks}", "s/GB", "" if way == self._bare else self._bare, cpu, bare_cpu
            )


@contextmanager
def _timed(costs: list[Cost], size_bytes: int) -> Iterator[None]:
    """Measures the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    size = size_bytes / GIB
    costs.append(Cost((time.perf_counter() - wall) / size, (time.process_time() - cpu) / size))


def _row(name: str, unit: str, baseline: str, values: list[float], bare: list[float]) -> Row:
    if not baseline:
        return Row(name=name, value=statistics.median(values), unit=unit)
    return Row(
        name=name,
        value=statistics.median(values),
        unit=unit,
        baseline=baseline,
        baseline_value=statistics.median(bare),
        ratio=median_ratio(values, bare),
    )


async def through(
    tier: DiskTier | RemoteTier,
    chunks: Chunks,
    passes: Passes,
    way: str,
    bare: Callable[[], None] | None = None,
    written: Callable[[], None] = lambda: None,
) -> None:
    """Writes all chunks behind, reads them into the pool again, and drops them. Opens the tier.

    `bare` reads the same files without the tier, if they can be. `written` ends the pass that writes.
    """
    async with tier:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for backend in tier.volumes if isinstance(tier, DiskTier) else [tier.backend]:
                await backend.health.attempted.wait()
        chunks.commit()
        with passes.timed(way, "write", chunks.size_bytes):
            for chunk in chunks.tier:
                tier.writer.add(chunk)
            await tier.writer.flush()
            written()
        assert tier.stats().written_chunks == len(chunks.keys), "not all were written"
        chunks.tier.drop(chunks.keys)
        needs = Needs(spec=chunks.spec, keys=chunks.keys, indices=range(len(chunks.keys)))
        presence = await tier.lookup(needs)
        assert presence.run_from(0) == len(chunks.keys), "not all are found"
        read: list[int] = []
        reading = tier.reader.read(chunks.spec.fingerprint, chunks.keys, TIMEOUT_SECONDS, lambda at, _: read.append(at))
        if bare:
            await passes.timed_between(way, bare, chunks.size_bytes, reading)
        else:
            with passes.timed(way, "read", chunks.size_bytes):
                await reading
        assert len(read) == len(chunks.keys), "not all were read"
        chunks.tier.drop(chunks.keys)
        await tier.drop(Selection())
        await tier.settle()
