"""Nodes whose pool outlives them, and chunks whose words all contain their key."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmkv.config import NodeConfig
from lmkv.pool.pool import Pool
from lmkv.pool.socket import AttachedPool, attach
from lmkv.v1.chunk_pb2 import Extent
from lmkv_kernels import checksum
from lmkv_server.node.cache.warm_start import WarmStart
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient
from tests.support.fork_server import start_module
from tests.support.specs import small_spec
from tests.waiting import is_listening

SPEC = small_spec()
POOL_CHUNKS = 64
WORDS = SPEC.chunk_bytes // 8


def settings(folder: Path, **more: object) -> dict[str, Any]:
    """A node in this folder, pool included."""
    return {
        "instance_id": "n",
        "runtime_dir": str(folder),
        "pool_path": str(pool_path(folder)),
        "persist_pool": True,
        "max_local_cpu_size": POOL_CHUNKS * SPEC.chunk_bytes / 2**30,
        "enable_p2p": False,
    } | more


def pool_path(folder: Path) -> Path:
    """The file of its pool."""
    return folder / "pool"


@asynccontextmanager
async def a_node(folder: Path, **more: object) -> AsyncIterator[tuple[Node, EngineClient]]:
    """A node in this process, with an engine. What an earlier life has left is verified."""
    async with Node(NodeConfig(**settings(folder, **more))) as node, EngineClient(node) as engine:
        if node.warm:
            await verified(node.warm)
        yield node, engine
        node.tier.check()


async def verified(warm: WarmStart) -> None:
    """Waits until nothing is to be verified any more."""
    await until(lambda: warm.stats().waiting_chunks == 0)


def words(number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The bytes of a chunk: no two words of any two chunks are the same."""
    return np.arange(WORDS, dtype=np.uint64) + np.uint64(number * WORDS)


def written(pool: Pool, extent: Extent) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer(bytes(pool.buffer[extent.offset : extent.offset + SPEC.chunk_bytes]), np.uint64)


async def store(engine: EngineClient, pool: Pool, *numbers: int) -> int:
    """Stores chunks, each the child of the one before it; how many there was room for."""
    granted = await engine.reserve(len(numbers))
    commits, parent = [], b""
    for number, extent in zip(numbers, granted, strict=False):
        pool.buffer[extent.offset : extent.offset + SPEC.chunk_bytes] = words(number).tobytes()
        right = checksum(pool.buffer, extent.offset, SPEC.chunk_bytes)
        commits.append(engine.commit(chunk_key(number), extent, checksum=right, parent=parent))
        parent = chunk_key(number)
    await engine.say(commit=commits)
    return len(commits)


async def held(engine: EngineClient, pool: Pool, *numbers: int) -> list[int]:
    """Those of the chunks that the node offers; asserts that their bytes are right."""
    found = []
    for number in numbers:
        answer = await engine.lookup(f"held {number}", [chunk_key(number)])
        for chunk in answer.own:
            assert (written(pool, chunk.extent) == words(number)).all(), f"wrong bytes for chunk {number}"
            found.append(number)
        await engine.release(f"held {number}")
    return found


async def mapped(engine: EngineClient) -> AttachedPool:
    """The pool, as a worker of the engine maps it."""
    welcome = engine.welcomed
    return await asyncio.to_thread(attach, welcome.pool_socket, engine.engine_id, 0, welcome.epoch, 5.0)


class NodeProcess:
    """`lmkv node` in a process of its own."""

    def __init__(self, folder: Path, **more: object) -> None:
        values = settings(folder, **more)
        self.socket = NodeConfig(**values).engine_socket
        self.log = folder / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        environment |= {f"LMKV_{name.upper()}": str(value) for name, value in values.items()}
        with self.log.open("wb") as log:
            self.process = start_module("lmkv", "node", environment=environment, log=log)

    async def ready(self) -> None:
        """Waits until engines may attach, and until all that was found is verified."""
        said = ("pool of the node's earlier life", "the pool starts empty")
        await until(lambda: is_listening(self.socket) and any(one in self.text() for one in said))

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it, and waits for that. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(20)
        self.socket.unlink(missing_ok=True)  # so that clients wait for the socket of the next process
