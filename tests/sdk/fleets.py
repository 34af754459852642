"""Fleets for SDKs to ask and to order: scripted ones, and one of processes as people run them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from lmkv_server.coordinator import coordinator as server
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.specs import LLAMA, small_spec

SPEC = small_spec()
CHUNK_COUNT = 5
TOKENS = list(range(CHUNK_COUNT * SPEC.chunk_size))
NODES = ("node-1", "node-2")


class Fleet:
    """A coordinator, and two instances, of which `a` holds the prompt of the cases."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Starts all of it, as it was at first."""
        enter = self._stack.enter_async_context
        self.coordinator = await enter(
            server.Coordinator(CoordinatorConfig(port=self._port, http_port=OFF, lease_ttl=60.0, cluster_secret="hush"))
        )
        channel = await enter(rpc.open_channel(self.coordinator.address))
        known: dict[str, ScriptedInstance] = {}
        self._instances = [
            await enter(ScriptedInstance(channel, known, name, LLAMA, chunks))
            for name, chunks in (("a", CHUNKS), ("b", {}))
        ]

    @property
    def setting(self) -> dict[str, Any]:
        """The description of the fleet for a test on Node.js."""
        return {
            "address": self.coordinator.address,
            "tokens": PROMPT,
            "keys": [key.hex() for key in KEYS],
            "instances": ["a", "b"],
        }

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self) -> None:
        """Another coordinator at the same address, which knows no operation of the first one."""
        await self.stop()
        await self.start()

    def pause(self) -> None:
        """Has the instances hold back orders."""
        for instance in self._instances:
            instance.going.clear()

    def resume(self) -> None:
        for instance in self._instances:
            instance.going.set()


@asynccontextmanager
async def processes(folder: Path, sockets: Path) -> AsyncIterator[tuple[cluster.CoordinatorProcess, dict[str, Any]]]:
    """A coordinator and two nodes, the first of which holds a prompt, and their description for a test on Node.js."""
    keys = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
    async with AsyncExitStack() as stack:
        coordinator = stack.enter_context(cluster.CoordinatorProcess(folder))
        nodes = stack.enter_context(
            NodeProcesses(
                NODES, coordinator_address=coordinator.address, runtime_dir=sockets, logs=folder, pool_size="16MiB"
            )
        )
        engines = [await stack.enter_async_context(EngineClient(nodes.socket(name), spec=SPEC)) for name in NODES]
        credits_ = await engines[0].reserve(CHUNK_COUNT)
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(keys, credits_, strict=True)]
        await engines[0].say(commit=commits)
        await _until_known(coordinator.address, len(keys))
        yield (
            coordinator,
            {
                "address": coordinator.address,
                "tokens": TOKENS,
                "keys": [key.hex() for key in keys],
                "instances": NODES,
            },
        )


async def _until_known(address: str, chunk_count: int) -> None:
    """Waits until the coordinator knows of two nodes, one of which holds this number of chunks."""
    async with asyncio.timeout(60), Coordinator(address) as coordinator:
        async for update in coordinator.watch():
            if any(len(change.admitted_keys) == chunk_count for change in update.changes):
                return
