"""Audits of engines: wrong chunks are dropped at every holder, and a spec with too many of them is not served."""

from __future__ import annotations

from pathlib import Path

import httpx

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client import Coordinator as Client
from lmkv_client.commands.doctor.fleet import check_audits
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.audits import LAST_AUDITS, MIN_WRONG, CircuitBreaker
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.waiting import eventually, until

KEYS = [ChunkKey(bytes([number]) * 16) for number in range(4)]
OTHER = ChunkKey(b"o" * 16)
"""A chunk behind the second, of another prompt."""


async def store(engine: EngineClient) -> None:
    """Stores a prompt, and the chunk of another one behind its second."""
    extents = await engine.reserve(5)
    parents = [b"", *KEYS[:3], KEYS[1]]
    commits = zip([*KEYS, OTHER], extents, parents, strict=True)
    await engine.say(commit=[engine.commit(key, extent, parent=parent) for key, extent, parent in commits])


async def test_wrong_chunks_and_those_behind_them_are_dropped_at_every_holder(runtime_dir: Path) -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        address = {"coordinator_address": (f"127.0.0.1:{coordinator.port}",)}
        disk = {"local_disk": (f"{runtime_dir}/disk",), "max_local_disk_size": 0.0625}
        async with (
            Node(node_config(runtime_dir, "a", **address)) as first,
            Node(node_config(runtime_dir, "b", **address, **disk)) as second,
            EngineClient(first, "engine-a") as engine,
            EngineClient(second, "engine-b") as other,
        ):
            for client in (engine, other):
                await store(client)
            on_disk = second.disk
            assert on_disk
            await until(lambda: len(first.tier) == 5 == on_disk.chunk_count)
            pinned = second.tier.get(KEYS[3])
            assert pinned
            second.tier.pin([pinned])
            wrong = pb.AuditedChunks(chunk_count=7, wrong_keys=join_keys(KEYS[1:3]))
            await engine.say(audited=wrong)
            await until(lambda: [len(first.tier), len(second.tier), on_disk.chunk_count] == [1, 1, 1])
            assert [chunk.key for chunk in (*first.tier, *second.tier)] == [KEYS[0], KEYS[0]]
            second.tier.unpin([pinned])
            assert first.describe().stats.wrong_chunks == 1
            assert not first.describe().stats.stopped_models


async def test_a_spec_with_too_many_wrong_chunks_is_not_served(runtime_dir: Path) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator,
        Node(node_config(runtime_dir, "a", coordinator_address=(f"127.0.0.1:{coordinator.port}",))) as node,
        EngineClient(node) as engine,
        Client(f"127.0.0.1:{coordinator.port}") as client,
    ):
        await store(engine)
        assert len((await engine.lookup("before", KEYS)).own) == len(KEYS)
        await engine.release("before")
        for number in range(MIN_WRONG):
            assert not node.audits.stopped
            await engine.say(audited=pb.AuditedChunks(chunk_count=1, wrong_keys=bytes([200 + number]) * 16))
            await until(lambda number=number: node.audits.wrong_count == number + 1)  # type: ignore[misc]
        assert list(node.audits.stopped.values()) == [engine.spec.model_name]
        assert node.describe().stats.stopped_models == [engine.spec.model_name]
        assert not (await engine.lookup("after", KEYS)).own
        await store(engine)
        assert not (await engine.lookup("stored again", KEYS)).own
        assert len(node.tier) == 0
        assert node.tier.reserved_count == 0
        async with httpx.AsyncClient(base_url=f"http://{coordinator.http_address}") as http:
            detail = "a model is not served from the cache any more at a: too many chunks were wrong (lmkv doctor)"
            await eventually(lambda: health(http), {"status": "ok", "detail": detail})
        (finding,) = check_audits(await client.instances())
        assert finding.text.startswith(f"a neither stores nor finds chunks of {engine.spec.model_name}")


async def health(http: httpx.AsyncClient) -> dict[str, str]:
    """The answer of the coordinator's `/healthz`; it has a node's statistics from its heartbeats."""
    answer: dict[str, str] = (await http.get("/healthz")).json()
    return answer


def test_few_wrong_chunks_among_many_do_not_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    assert not breaker.add(LAST_AUDITS, 0)
    for _ in range(LAST_AUDITS // 100):
        assert not breaker.add(1, 1)
    assert breaker.add(1, 1)
    assert not breaker.add(1, 1), "it opens once"
    assert breaker.is_open
