"""What would be slower to fetch than to compute is not offered, once it is known: whole nodes, by the engine's line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv.keys import join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys, small_spec
from tests.server.node.engine_client import EngineClient

SPEC = small_spec(head_size=1024)
"""Its chunks have 1 MiB: enough of them to measure."""
KEYS = chunk_keys(*range(32))
LIGHTNING = 10**12
"""Tokens per second of an engine for which every fetch is too slow."""
SNAIL = 1
TOLD_SECONDS = 10.0


class Pair:
    """An engine and its node, and another node that holds `KEYS`."""

    def __init__(self, engine: EngineClient, node: Node) -> None:
        self.engine = engine
        self.node = node
        self.ticket = 0

    async def ask(self, rate: int, reserve_count: int = 0) -> pb.FoundChunks:
        """Looks the prompt up for an engine that computes so many tokens per second."""
        self.ticket += 1
        return await self.engine.lookup(str(self.ticket), KEYS, reserve_count, prefill_tokens_per_second=rate)

    async def fetch(self) -> None:
        """Brings everything, and forgets it again."""
        request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=join_keys(KEYS))
        answer = await self.engine.stub.Load(request, timeout=30.0)
        assert answer.transferred_bytes == len(KEYS) * SPEC.chunk_bytes
        assert self.node.tier.drop(KEYS) == len(KEYS)

    def refused(self) -> float:
        """How often the node says that it refused."""
        value = self.node.metrics.registry.get_sample_value("lmkv_node_fetches_refused_slower_total")
        assert value is not None
        return value


@pytest.fixture
async def pair(runtime_dir: Path) -> AsyncIterator[Pair]:
    async with Coordinator(port=0) as coordinator:

        def node(name: str) -> Node:
            return Node(
                NodeConfig(
                    instance_id=name,
                    runtime_dir=str(runtime_dir),
                    max_local_cpu_size="256MiB",  # type: ignore[arg-type]  # as people write it
                    coordinator_address=coordinator.address,
                )
            )

        async with (
            node("holder") as holder,
            node("asker") as asker,
            EngineClient(holder, "storing", SPEC) as storing,
            EngineClient(asker, "asking", SPEC) as asking,
        ):
            of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)
            extents = await storing.reserve(len(KEYS))
            commits = [storing.commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, extents, strict=True)]
            await storing.say(commits=commits)
            pair = Pair(asking, asker)
            deadline = time.monotonic() + TOLD_SECONDS
            while (await pair.ask(0)).peer_chunk_count < len(KEYS):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            yield pair


async def test_what_nothing_is_known_of_is_offered_however_fast_the_engine_is(pair: Pair) -> None:
    found = await pair.ask(LIGHTNING)
    assert (found.peer_chunk_count, found.refused_chunk_count, pair.refused()) == (len(KEYS), 0, 0)


async def test_once_measured_a_fetch_that_is_slower_than_computing_is_not_offered(pair: Pair) -> None:
    await pair.fetch()
    found = await pair.ask(LIGHTNING, reserve_count=3)
    assert (found.peer_chunk_count, found.refused_chunk_count) == (0, len(KEYS))
    assert pair.refused() == 1
    assert len(await pair.engine.hear("credits")) == 3, "what is computed is stored"
    found = await pair.ask(SNAIL)
    assert (found.peer_chunk_count, found.refused_chunk_count, pair.refused()) == (len(KEYS), 0, 1)


async def test_an_engine_that_has_computed_nothing_yet_is_offered_everything(pair: Pair) -> None:
    await pair.fetch()
    assert (await pair.ask(0)).peer_chunk_count == len(KEYS)
