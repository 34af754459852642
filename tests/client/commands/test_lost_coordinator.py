"""Commands whose coordinator is killed in the middle and started again: the user sees one operation that ends.

Processes as people run them: a coordinator, two nodes, and the command. A node that stands still keeps the operation
from its end until the coordinator is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually

SPEC = small_spec()
CHUNK_COUNT = 5
TOKENS = list(range(CHUNK_COUNT * SPEC.chunk_size))
KEYS = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
FIRST, SECOND = "node-1", "node-2"


class Running:
    """The processes, and what the coordinator says of them."""

    def __init__(self, coordinator: cluster.CoordinatorProcess, nodes: NodeProcesses) -> None:
        self.coordinator = coordinator
        self.nodes = nodes

    async def holders(self) -> dict[str, int]:
        """Chunks of the prompt by node."""
        async with Coordinator(self.coordinator.address) as asking:
            answer = await asking.lookup(keys=KEYS)
        return {holder.instance_id: holder.matched_chunk_count for holder in answer.holders}

    async def runs_one(self) -> bool:
        async with Coordinator(self.coordinator.address) as asking:
            return bool(await asking.operations(running=True))

    async def command(self, *arguments: str, still: str) -> str:
        """Runs a command, and kills the coordinator while it waits for a node that stands still; what it prints."""
        os.kill(self.nodes.pid(still), signal.SIGSTOP)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lmkv", *arguments, "--coordinator", self.coordinator.address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            await eventually(self.runs_one, expected=True)
            self.coordinator.kill()
        finally:
            os.kill(self.nodes.pid(still), signal.SIGCONT)
        await asyncio.to_thread(self.coordinator.start)
        shown, _ = await asyncio.wait_for(process.communicate(), 2 * WAIT_SECONDS)
        assert process.returncode == 0, shown.decode()
        return shown.decode()


@pytest.fixture
async def running(tmp_path: Path, short_folder: Path) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        # A node that stands still stays registered until the command has started, on a busy machine too.
        coordinator = stack.enter_context(
            cluster.CoordinatorProcess(tmp_path, arguments=["--lease-ttl", f"{WAIT_SECONDS:g}"])
        )
        nodes = stack.enter_context(
            NodeProcesses(
                (FIRST, SECOND),
                coordinator_address=coordinator.address,
                runtime_dir=short_folder,
                logs=tmp_path,
                pool_size="16MiB",
            )
        )
        engines = [
            await stack.enter_async_context(EngineClient(nodes.socket(name), spec=SPEC)) for name in (FIRST, SECOND)
        ]
        credits_ = await engines[0].reserve(CHUNK_COUNT)
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        commits = [engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, credits_, strict=True)]
        await engines[0].say(commit=commits)
        made = Running(coordinator, nodes)

        await eventually(made.holders, {FIRST: CHUNK_COUNT})
        yield made


@pytest.mark.parametrize("still", [FIRST, SECOND])
async def test_a_move_ends_once_the_coordinator_is_back(running: Running, still: str) -> None:
    keys = ",".join(key.hex() for key in KEYS)
    shown = await running.command("move", "--from", FIRST, "--to", SECOND, "--keys", keys, still=still)
    assert f"{CHUNK_COUNT} chunks ({len(TOKENS)} tokens) arrived" in shown
    await eventually(running.holders, {SECOND: CHUNK_COUNT})


async def test_a_drain_ends_once_the_coordinator_is_back(running: Running) -> None:
    shown = await running.command("drain", FIRST, still=SECOND)
    assert f"safe to stop: all chunks of {FIRST} are held elsewhere" in shown
    await eventually(running.holders, {FIRST: CHUNK_COUNT, SECOND: CHUNK_COUNT})


async def test_a_clear_ends_once_the_coordinator_is_back(running: Running) -> None:
    shown = await running.command("clear", "--all", "--yes", still=FIRST)
    assert f"{CHUNK_COUNT} chunks" in shown or "0 chunks" in shown, "the first order may have been carried out"
    nothing: dict[str, int] = {}
    await eventually(running.holders, nothing)
