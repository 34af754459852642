"""Hints about prompts whose chunks have several parts: they concern what the longest hit needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration

from lmkv.keys import join_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from tests.server.node.disk_parts import until
from tests.server.node.hybrid_engine import HYBRID, PROMPT, HybridEngine, engine_at_node

ITEMS = len(HYBRID.items(5))


async def hint(
    engine: HybridEngine, action: chunk_pb2.HintAction.ValueType, chunk_count: int = 5
) -> chunk_pb2.HintResult:
    message = pb.HintChunks(
        hint_id="h",
        action=action,
        chunk_keys=join_keys(PROMPT[:chunk_count]),
        ttl=Duration(seconds=60),
        priority=5,
        root_key=bytes(16),
    )
    await engine.say(hint=[message])
    (answer,) = await engine.hear("hinted")
    result: chunk_pb2.HintResult = answer.result
    return result


async def test_a_pin_keeps_what_the_longest_hit_needs(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await engine.store_hits(5)
        pinned = await hint(engine, chunk_pb2.HINT_ACTION_PIN)
        assert (pinned.outcome, pinned.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, ITEMS)
        refused = await hint(engine, chunk_pb2.HINT_ACTION_EVICT)
        assert (refused.outcome, refused.reason) == (chunk_pb2.HINT_OUTCOME_REJECTED, chunk_pb2.HINT_REASON_IN_USE)
        (pin,) = node.orders.pins
        node.orders.pins.unpin(pin.pin_id)
        evicted = await hint(engine, chunk_pb2.HINT_ACTION_EVICT)
        assert (evicted.outcome, evicted.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, ITEMS)
        assert not len(node.tier)
        node.orders.check()


async def test_a_prompt_that_is_longer_than_its_hit_is_clipped(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        missing = await hint(engine, chunk_pb2.HINT_ACTION_RETAIN)
        assert missing.outcome == chunk_pb2.HINT_OUTCOME_MISSING
        await engine.store_hits(5)
        retained = await hint(engine, chunk_pb2.HINT_ACTION_RETAIN, 8)
        assert (retained.outcome, retained.chunk_count) == (chunk_pb2.HINT_OUTCOME_CLIPPED, ITEMS)
        assert len(node.hints.retentions) == ITEMS
        node.hints.retentions.check()


async def test_a_prefetch_brings_all_parts_from_disk(runtime_dir: Path) -> None:
    settings: dict[str, Any] = {"local_disk": f"{runtime_dir}/disk", "max_local_disk_size": "64MB"}
    async with engine_at_node(runtime_dir, **settings) as (node, engine):
        await engine.store_hits(5)
        disk = node.disk
        assert disk is not None
        await until(lambda: disk.chunk_count == ITEMS)
        node.tier.drop([chunk.key for chunk in node.tier])
        result = await hint(engine, chunk_pb2.HINT_ACTION_PREFETCH)
        assert (result.outcome, result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 5)
        await node.hints.settle()
        found = await engine.find("1", 5)
        assert (found.hit_chunk_count, len(found.own)) == (5, ITEMS)
