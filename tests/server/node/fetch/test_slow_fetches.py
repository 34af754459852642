"""What would be slower to fetch than to compute is not offered, once it is known: whole nodes, by the engine's line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv.v1.chunk_pb2 import MISS_REASON_SLOWER
from lmkv_client.demo.process import ServerProcess
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.support.specs import small_spec
from tests.waiting import eventually, is_listening

SPEC = small_spec(head_size=1024)
"""Its chunks have 1 MiB: enough of them to measure."""
KEYS = chunk_keys(*range(32))
LIGHTNING = 10**12
"""Tokens per second of an engine for which every fetch is too slow."""
SNAIL = 1


class Pair:
    """An engine and its node, and another node that holds `KEYS`."""

    def __init__(self, engine: EngineClient, node: Node) -> None:
        self.engine = engine
        self.node = node
        self.ticket = 0

    async def ask(self, rate: int, reserve_count: int = 0) -> pb.FoundChunks:
        """Looks the prompt up for an engine with a prefill rate in tokens per second."""
        self.ticket += 1
        return await self.engine.lookup(str(self.ticket), KEYS, reserve_count, prefill_tokens_per_second=rate)

    async def learned(self) -> None:
        """Waits until the coordinator knows, again, what the holder has."""

        async def known() -> int:
            return absent_count(await self.ask(0))

        await eventually(known, len(KEYS))

    async def fetch(self) -> None:
        """Brings everything, and forgets it again."""
        request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=KEYS)
        answer = await self.engine.stub.Load(request, timeout=120.0)
        assert answer.transferred_bytes == len(KEYS) * SPEC.chunk_bytes
        assert self.node.tier.drop(KEYS) == len(KEYS)

    def expected_seconds(self) -> float:
        """How long the node believes a fetch to take."""
        assert self.node.peer_side
        seconds = self.node.peer_side.fetcher.expected_seconds(
            [Holder(instance_id="holder")], SPEC, len(KEYS) * SPEC.chunk_bytes
        )
        assert seconds
        return seconds

    def refused(self) -> float:
        """How often the node says that it refused."""
        value = self.node.metrics.registry.get_sample_value("lmkv_node_fetches_refused_slower_total")
        assert value is not None
        return value


async def store(engine: EngineClient) -> None:
    of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)
    extents = await engine.reserve(len(KEYS))
    await engine.say(
        commit=[engine.commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, extents, strict=True)]
    )


def config(name: str, runtime_dir: Path, coordinator: Coordinator, **settings: str) -> dict[str, str]:
    """The configuration of a node in these tests."""
    return {
        "instance_id": name,
        "runtime_dir": str(runtime_dir),
        "max_local_cpu_size": "256MiB",
        "coordinator_address": coordinator.address,
        "coordinator_timeout": "20",
        **settings,
    }


@asynccontextmanager
async def asking(runtime_dir: Path, coordinator: Coordinator, **settings: str) -> AsyncIterator[Pair]:
    """An engine and its node, as soon as these know what the holder has."""
    values: dict[str, Any] = config("asker", runtime_dir, coordinator, **settings)
    async with Node(NodeConfig(**values)) as node, EngineClient(node, "asking", SPEC) as engine:
        pair = Pair(engine, node)
        await pair.learned()
        yield pair


@asynccontextmanager
async def mostly_frozen(pid: int) -> AsyncIterator[None]:
    """While it is open the process has little of its time."""

    async def freeze() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.25)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.005)

    freezing = asyncio.create_task(freeze())
    try:
        yield
    finally:
        freezing.cancel()
        await asyncio.wait([freezing])
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def pair(runtime_dir: Path) -> AsyncIterator[Pair]:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        values: dict[str, Any] = config("holder", runtime_dir, coordinator)
        async with Node(NodeConfig(**values)) as holder, EngineClient(holder, "storing", SPEC) as storing:
            await store(storing)
            async with asking(runtime_dir, coordinator) as pair:
                yield pair


async def test_what_nothing_is_known_of_is_offered_however_fast_the_engine_is(pair: Pair) -> None:
    found = await pair.ask(LIGHTNING)
    assert (absent_count(found), found.refused_chunk_count, pair.refused()) == (len(KEYS), 0, 0)


async def test_once_measured_a_fetch_that_is_slower_than_computing_is_not_offered(pair: Pair) -> None:
    await pair.fetch()
    found = await pair.ask(LIGHTNING, reserve_count=3)
    assert (absent_count(found), found.refused_chunk_count) == (0, len(KEYS))
    assert pair.refused() == 1
    (missed,) = found.missed
    assert (missed.reason, missed.tier, missed.chunk_count) == (MISS_REASON_SLOWER, "peers", len(KEYS))
    assert len(await pair.engine.hear("credits")) == 3, "what is computed is stored"
    found = await pair.ask(SNAIL)
    assert (absent_count(found), found.refused_chunk_count, pair.refused()) == (len(KEYS), 0, 1)


async def test_an_engine_that_has_computed_nothing_yet_is_offered_everything(pair: Pair) -> None:
    await pair.fetch()
    assert absent_count(await pair.ask(0)) == len(KEYS)


async def test_a_peer_that_becomes_slow_is_refused_by_an_engine_that_it_was_quick_enough_for(
    runtime_dir: Path, tmp_path: Path
) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        settings = config("holder", runtime_dir, coordinator, transfer_channel="tcp")
        environment = {f"LMKV_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "lmkv", "node"]
        with ServerProcess("holder", command, tmp_path / "holder.log", environment) as process:
            process.start()
            socket = runtime_dir / "holder" / "engine.sock"
            await asyncio.to_thread(process.wait_until, partial(is_listening, socket), "ready", 120.0)
            async with EngineClient(socket, "storing", SPEC) as storing:
                await store(storing)
                async with asking(runtime_dir, coordinator, transfer_channel="tcp") as pair:
                    for _ in range(2):
                        await pair.fetch()
                    seconds = 2 * pair.expected_seconds()
                    rate = round(len(KEYS) * SPEC.chunk_size / seconds)
                    assert absent_count(await pair.ask(rate)) == len(KEYS)
                    async with mostly_frozen(process.pid):
                        await pair.fetch()
                    assert pair.expected_seconds() > seconds
                    await pair.learned()  # frozen for so long it may have been given up
                    found = await pair.ask(rate)
                    assert (absent_count(found), found.refused_chunk_count) == (0, len(KEYS))
                    assert pair.refused() == 1
