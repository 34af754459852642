"""How long what clients do takes, and what a pipe through another process takes meanwhile: the host's part of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb
from tests.chaos.asker import AskActor
from tests.chaos.engine import Engine
from tests.chaos.engine_actor import EngineActor
from tests.chaos.operators import Line

HOST = "pipe"
"""What has nothing to do with lmkv: a byte to a process `cat` and back, which takes longer if the host is busy."""
QUANTILES = {"p50": 0.5, "p99": 0.99}


class Latencies:
    """Durations since they were last taken."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measures the body. One that fails or is cancelled does not count."""
        began = time.monotonic()
        yield
        self._seconds[what].append(time.monotonic() - began)

    def take(self) -> dict[str, dict[str, float]]:
        """The quantiles in milliseconds and the count of each since the last call."""
        taken, self._seconds = self._seconds, defaultdict(list)
        return {
            what: {name: 1000 * quantile(seconds, rank) for name, rank in QUANTILES.items()} | {"count": len(seconds)}
            for what, seconds in taken.items()
        }


class TimedEngineActor(EngineActor):
    """Measures lookups, loads and stores at a node, as an engine waits for them."""

    latencies: Latencies

    async def _lookup(self, engine: Engine, prompt: list[ChunkKey]) -> pb.FoundChunks:
        with self.latencies.timed("node lookup"):
            return await super()._lookup(engine, prompt)

    async def _store(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        with self.latencies.timed("store"):
            await super()._store(engine, prompt)

    async def _load(self, engine: Engine, prompt: list[ChunkKey]) -> None:
        with self.latencies.timed("load"):
            await super()._load(engine, prompt)


class TimedAskActor(AskActor):
    """Measures lookups at a coordinator."""

    latencies: Latencies

    async def _ask(self, line: Line) -> None:
        with self.latencies.timed("coordinator lookup"):
            await super()._ask(line)


@asynccontextmanager
async def pipe(latencies: Latencies, pause_seconds: float = 0.05) -> AsyncIterator[None]:
    """Measures the host as `HOST` until it is closed."""
    through = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("cat", stdin=through, stdout=through, start_new_session=True)
    assert process.stdin
    assert process.stdout
    stdin, stdout = process.stdin, process.stdout

    async def run() -> None:
        while True:
            with latencies.timed(HOST):
                stdin.write(b".")
                await stdout.readexactly(1)
            await asyncio.sleep(pause_seconds)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stdin.close()
        await process.wait()


def quantile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed."""
    return sorted(values)[max(math.ceil(rank * len(values)) - 1, 0)]
