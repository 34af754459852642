"""A holder that freezes when it is to be read from: whole nodes in processes of their own, by the engine's load."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.demo.process import ServerProcess
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually, is_listening

SPEC = small_spec(head_size=1024)
"""Its chunks have 1 MiB: enough of them to measure."""
KEYS = chunk_keys(*range(24))


def settings(name: str, runtime_dir: Path, coordinator: Coordinator) -> dict[str, str]:
    """The configuration of a node of this test."""
    return {
        "instance_id": name,
        "runtime_dir": str(runtime_dir),
        "max_local_cpu_size": "256MiB",
        "coordinator_address": coordinator.address,
        "coordinator_timeout": "20",
        "transfer_channel": "tcp",
    }


async def store(engine: EngineClient) -> None:
    of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)
    extents = await engine.reserve(len(KEYS))
    commits = [engine.commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, extents, strict=True)]
    await engine.say(commit=commits)


async def test_a_load_comes_from_the_second_holder_when_the_best_one_is_frozen(
    runtime_dir: Path, tmp_path: Path
) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=60.0)) as coordinator,
        AsyncExitStack() as stack,
    ):
        processes = {}
        for name in ("one", "other"):
            environment = {
                f"LMKV_{key.upper()}": value for key, value in settings(name, runtime_dir, coordinator).items()
            }
            command = [sys.executable, "-m", "lmkv", "node"]
            process = ServerProcess(name, command, tmp_path / f"{name}.log", environment)
            processes[name] = stack.enter_context(process)
            process.start()
            socket = runtime_dir / name / "engine.sock"
            await asyncio.to_thread(process.wait_until, partial(is_listening, socket), "ready", 120.0)
            await store(await stack.enter_async_context(EngineClient(socket, f"at-{name}", SPEC)))
        values: dict[str, Any] = settings("asker", runtime_dir, coordinator)
        node = await stack.enter_async_context(Node(NodeConfig(**values)))
        engine = await stack.enter_async_context(EngineClient(node, "asking", SPEC))
        assert node.peer_side
        side = node.peer_side

        def fetched_count(name: str) -> int:
            return sum(peer.chunk_count for peer in side.pipeline.stats().traffic if peer.instance_id == name)

        async def load() -> int:
            request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=KEYS)
            return int((await engine.stub.Load(request, timeout=120.0)).chunk_count)

        async def holder_count() -> int:
            return len((await node.fleet.lookup(KEYS, WAIT_SECONDS)).holders)

        await eventually(holder_count, 2)
        assert await load() == len(KEYS)
        now = time.monotonic()
        peers = {name: side.connections.find(name) for name in processes}
        rates = {name: peer.bandwidth.rate(now) or 0.0 for name, peer in peers.items() if peer}
        second, best = sorted(rates, key=lambda name: rates[name])
        before = fetched_count(second)
        value = node.metrics.registry.get_sample_value
        hedged = value("lmkv_node_hedged_fetches_total") or 0
        assert node.tier.drop(KEYS) == len(KEYS)
        os.kill(processes[best].pid, signal.SIGSTOP)
        try:
            assert await load() == len(KEYS), "the engine would have to compute"
            assert fetched_count(second) == before + len(KEYS)
            assert value("lmkv_node_hedged_fetches_total") == hedged + 1
            assert value("lmkv_node_tier_failures_total", {"tier": "peers"}) == 0, (
                "it waited until the best holder had failed"
            )
        finally:
            os.kill(processes[best].pid, signal.SIGCONT)
