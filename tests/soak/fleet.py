"""The fleet of the soak test: nodes as processes that can be killed and frozen, and what is right in their pools."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from lmkv.keys import ChunkKey
from lmkv.pool import Pool
from lmkv.pool_socket import attach
from lmkv.v1.chunk_pb2 import Extent
from lmkv_client.demo.process import ServerProcess, free_port
from lmkv_kernels import checksum
from tests.server.node.cases import small_spec
from tests.server.node.engine_client import EngineClient

SPEC = small_spec(head_size=256)
"""Its chunks have 256 KiB."""
POOL_SIZE = "48MiB"
"""A third of `PROMPTS`: nodes evict, and find what they lack at others."""
PROMPT_CHUNKS = 16
PROMPTS = [
    [ChunkKey(prompt.to_bytes(8, "big") + index.to_bytes(8, "big")) for index in range(PROMPT_CHUNKS)]
    for prompt in range(1, 37)
]
UCX = {"UCX_TLS": "tcp"}
"""Where NIXL reads need their owner, as between hosts: what a frozen one owes is quarantined."""
SCRAPE_SECONDS = 5.0
ATTACH_SECONDS = 5.0


class WrongBytes(Exception):
    """A chunk's bytes are not those that its key stands for: what must never happen."""


def words_of(key: ChunkKey) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """What the chunk of this key holds, wherever it is."""
    words = np.arange(SPEC.chunk_bytes // 8, dtype=np.uint64)
    return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "big") % (1 << 61))


class Engine:
    """One engine at its node: the line, and the pool as a worker has it."""

    def __init__(self, client: EngineClient, pool: Pool) -> None:
        self.client = client
        self._pool = pool

    def write(self, key: ChunkKey, extent: Extent) -> int:
        """Writes a chunk into a write credit; its checksum."""
        self._words(extent)[:] = words_of(key)
        return checksum(self._pool.buffer, extent.offset, SPEC.chunk_bytes)

    def check(self, key: ChunkKey, extent: Extent) -> None:
        """Raises `WrongBytes` unless the extent holds the chunk."""
        if not np.array_equal(self._words(extent), words_of(key)):
            raise WrongBytes(f"{key.hex()} at {extent.offset} of {self.client.engine_id}")

    def _words(self, extent: Extent) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.frombuffer(self._pool.buffer, np.uint64, SPEC.chunk_bytes // 8, extent.offset)


class SoakNode:
    """One `lmkv node`, and whether it is frozen."""

    def __init__(self, name: str, folder: Path, logs: Path, coordinator_address: str, channel: str) -> None:
        self.name = name
        self.frozen = False
        self._socket = folder / name / "engine.sock"
        self._port = free_port()
        self._engine_count = 0
        settings = {
            "INSTANCE_ID": name,
            "RUNTIME_DIR": str(folder),
            "COORDINATOR_ADDRESS": coordinator_address,
            "MAX_LOCAL_CPU_SIZE": POOL_SIZE,
            "METRICS_PORT": str(self._port),
            "TRANSFER_CHANNEL": channel,
            "GRANT_TTL": "4",
            "NODE_LINGER": "3600",
        }
        self.process = ServerProcess(
            name,
            [sys.executable, "-m", "lmkv", "node"],
            logs / f"{name}.log",
            {f"LMKV_{key}": value for key, value in settings.items()} | UCX,
        )

    def start(self) -> None:
        """Starts it, also again; without waiting."""
        self.process.start()

    def kill(self) -> None:
        """Kills it as a crash would."""
        self.process.kill()
        self.frozen = False

    def freeze(self) -> None:
        """Stops it where it is."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """Lets it go on, if it is frozen."""
        if self.frozen:
            os.kill(self.process.pid, signal.SIGCONT)
            self.frozen = False

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """An engine that attaches, maps the pool, and leaves. Raises whatever goes wrong on the line."""
        self._engine_count += 1
        client = EngineClient(self._socket, f"{self.name}-{self._engine_count}", SPEC)
        try:
            await client.__aenter__()
            socket, epoch = client.welcomed.pool_socket, client.welcomed.epoch
            with await asyncio.to_thread(attach, socket, client.engine_id, 0, epoch, ATTACH_SECONDS) as attached:
                yield Engine(client, attached.pool)
        finally:
            await client.aclose()

    async def metrics(self) -> dict[str, float]:
        """What the node says of itself, without labels and without `lmkv_node_`."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{self._port}/metrics", timeout=SCRAPE_SECONDS)
        return {
            sample.name.removeprefix("lmkv_node_"): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name.startswith("lmkv_node_") and not sample.labels
        }
