"""Hints of an engine: what each does to the chunks of a prompt, within which bounds, and what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmkv.config import NodeConfig
from lmkv.keys import join_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_kernels import checksum
from lmkv_server.node.hints.executor import PIN_SHARE, RETAIN_SHARE
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import CAPACITY, SPEC
from tests.waiting import until

ROOT = bytes(16)
OTHER_ROOT = bytes([1] * 16)
ZEROS = int(checksum(np.zeros(SPEC.chunk_bytes, dtype=np.uint8)))
"""Checksum of a chunk that was not written."""


async def store(engine: EngineClient, *numbers: int) -> None:
    """Stores the chunks of one prompt, each behind the one before it."""
    for at, number in enumerate(numbers):
        (extent,) = await engine.reserve(1)
        parent = chunk_key(numbers[at - 1]) if at else ROOT
        await engine.say(commit=[engine.commit(chunk_key(number), extent, checksum=ZEROS, parent=parent)])


async def hint(
    engine: EngineClient,
    action: chunk_pb2.HintAction.ValueType,
    *numbers: int,
    hint_id: str = "h",
    ttl: float = 0.0,
    priority: int = 0,
    root: bytes = ROOT,
    running: bool = False,
) -> chunk_pb2.HintResult:
    message = pb.HintChunks(
        hint_id=hint_id,
        action=action,
        chunk_keys=join_keys(chunk_keys(*numbers)),
        priority=priority,
        root_key=root,
        running=running,
    )
    message.ttl.FromNanoseconds(int(ttl * 1e9))
    await engine.say(hint=[message])
    (answer,) = await engine.hear("hinted")
    assert isinstance(answer, pb.HintedChunks)
    assert answer.hint_id == hint_id
    return answer.result


def ended(answer: chunk_pb2.HintResult) -> tuple[str, int]:
    """The outcome and the number of chunks of an answer."""
    return chunk_pb2.HintOutcome.Name(answer.outcome).removeprefix("HINT_OUTCOME_").lower(), answer.chunk_count


def numbers_in(node: Node) -> set[int]:
    return {int.from_bytes(chunk.key, "big") for chunk in node.tier}


async def test_a_pin_keeps_a_prompt_from_eviction_until_it_expires(node: Node, engine: EngineClient) -> None:
    await store(engine, 1, 2)
    answer = await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, ttl=1000)
    assert ended(answer) == ("accepted", 2)
    assert answer.ttl.seconds == 1000
    await store(engine, *range(100, 100 + 2 * CAPACITY))
    assert {1, 2} <= numbers_in(node)
    (pin,) = node.orders.pins
    assert pin.pin_id == "test-node/engine:h"
    node.orders.pins.expire(pin.expire_at)
    await store(engine, *range(200, 200 + 2 * CAPACITY))
    assert not {1, 2} & numbers_in(node)
    node.orders.check()


async def test_what_a_running_request_has_not_stored_is_pinned_when_the_hint_is_sent_again(
    node: Node, engine: EngineClient
) -> None:
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, ttl=9, running=True)) == ("deferred", 0)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, ttl=9)) == ("missing", 0)
    await store(engine, 1)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, ttl=9, running=True)) == ("deferred", 1)
    await store(engine, 1, 2)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, 3, ttl=9)) == ("clipped", 2)
    (pin,) = node.orders.pins
    assert {chunk.key for chunk in pin.chunks} == set(chunk_keys(1, 2))


async def test_pins_of_one_owner_and_of_all_are_bounded(node: Node, engine: EngineClient) -> None:
    share = CAPACITY // PIN_SHARE
    await store(engine, *range(1, 11))
    first = await hint(engine, chunk_pb2.HINT_ACTION_PIN, *range(1, 11), hint_id="a", ttl=99)
    assert ended(first) == ("clipped", share // 2)
    again = await hint(engine, chunk_pb2.HINT_ACTION_PIN, *range(1, 11), hint_id="b", ttl=99)
    assert ended(again) == ("clipped", share // 2), "the same chunks count once"
    await store(engine, *range(21, 31))
    more = await hint(engine, chunk_pb2.HINT_ACTION_PIN, *range(21, 31), hint_id="c", ttl=99)
    assert (ended(more), more.reason) == (("rejected", 0), chunk_pb2.HINT_REASON_QUOTA)
    other = await hint(engine, chunk_pb2.HINT_ACTION_PIN, *range(21, 31), hint_id="d", ttl=99, root=OTHER_ROOT)
    assert ended(other) == ("clipped", share // 2)
    assert node.orders.pins.owned_bytes() <= node.tier.size_bytes // PIN_SHARE
    assert len(node.orders.pins) == 3
    node.orders.check()


async def test_retained_chunks_outlast_others_until_the_ttl_ends(node: Node, engine: EngineClient) -> None:
    await store(engine, 1, 2)
    answer = await hint(engine, chunk_pb2.HINT_ACTION_RETAIN, 1, 2, ttl=500, priority=5)
    assert (ended(answer), answer.ttl.seconds) == (("accepted", 2), 500)
    await store(engine, *range(100, 100 + 2 * CAPACITY))
    assert {1, 2} <= numbers_in(node)
    retentions = node.hints.retentions
    until_then = retentions.next_expiry()
    assert until_then is not None
    assert retentions.expire(until_then) == 2
    await store(engine, *range(200, 200 + 2 * CAPACITY))
    assert not {1, 2} & numbers_in(node)
    retentions.check()


async def test_retained_chunks_of_one_owner_are_bounded(node: Node, engine: EngineClient) -> None:
    await store(engine, *range(1, 13))
    answer = await hint(engine, chunk_pb2.HINT_ACTION_RETAIN, *range(1, 13), ttl=9, priority=1)
    assert ended(answer) == ("clipped", CAPACITY // RETAIN_SHARE // 2)
    await store(engine, 21)
    refused = await hint(engine, chunk_pb2.HINT_ACTION_RETAIN, 21, ttl=9, priority=1)
    assert (ended(refused), refused.reason) == (("rejected", 0), chunk_pb2.HINT_REASON_QUOTA)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_RETAIN, 55, ttl=9, priority=1)) == ("missing", 0)


async def test_evicted_are_the_chunks_that_no_other_prompt_continues(node: Node, engine: EngineClient) -> None:
    await store(engine, 1, 2, 3, 4)
    await store(engine, 1, 2, 5)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1, 2, 3, 4, running=True)) == ("deferred", 0)
    assert numbers_in(node) == {1, 2, 3, 4, 5}
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1, 2, 3, 4)) == ("clipped", 2)
    assert numbers_in(node) == {1, 2, 5}
    refused = await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1)
    assert (ended(refused), refused.reason) == (("rejected", 0), chunk_pb2.HINT_REASON_IN_USE)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1, 2, 5)) == ("accepted", 3)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1, 2, 5)) == ("missing", 0)
    assert not len(node.tier)


async def test_a_pinned_chunk_and_those_before_it_are_not_evicted(node: Node, engine: EngineClient) -> None:
    await store(engine, 1, 2, 3)
    await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, 2, ttl=9)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1, 2, 3)) == ("clipped", 1)
    assert numbers_in(node) == {1, 2}


@pytest.mark.parametrize("action", [chunk_pb2.HINT_ACTION_DEMOTE, chunk_pb2.HINT_ACTION_SHARE])
async def test_a_node_without_other_tiers_neither_demotes_nor_shares(
    node: Node, engine: EngineClient, action: chunk_pb2.HintAction.ValueType
) -> None:
    await store(engine, 1)
    answer = await hint(engine, action, 1)
    assert (ended(answer), answer.reason) == (("rejected", 0), chunk_pb2.HINT_REASON_NO_TIER)


async def test_a_prefetch_of_what_no_tier_holds_is_missing(node: Node, engine: EngineClient) -> None:
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PREFETCH, 1, 2)) == ("missing", 0)
    await store(engine, 1)
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PREFETCH, 1, 2)) == ("clipped", 1)


@asynccontextmanager
async def with_disk(
    config: NodeConfig, folder: Path, size_bytes: int = 64_000_000
) -> AsyncIterator[tuple[Node, EngineClient]]:
    config = replace(config, local_disk=str(folder), max_local_disk_size=f"{size_bytes}B")  # type: ignore[arg-type]
    async with Node(config) as node, EngineClient(node) as engine:
        yield node, engine


async def test_a_prefetch_that_waits_for_an_answer_ends_with_its_engine(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def prefetch(_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(node.hints, "prefetch", prefetch)
    message = pb.HintChunks(hint_id="h", action=chunk_pb2.HINT_ACTION_PREFETCH, root_key=ROOT)
    message.chunk_keys = join_keys(chunk_keys(0))
    async with EngineClient(node, "another") as engine:
        await engine.say(hint=[message])
        await until(begun.is_set)
    await until(ended.is_set)


async def test_demoted_chunks_leave_first_and_a_prefetch_brings_them_back(config: NodeConfig, tmp_path: Path) -> None:
    async with with_disk(config, tmp_path / "disk") as (node, engine):
        assert node.disk is not None
        await store(engine, 1, 2)
        await store(engine, *range(10, 10 + CAPACITY - 2))
        assert ended(await hint(engine, chunk_pb2.HINT_ACTION_DEMOTE, 1, 2, running=True)) == ("deferred", 0)
        await engine.lookup("use", chunk_keys(1, 2))
        await engine.release("use")
        assert ended(await hint(engine, chunk_pb2.HINT_ACTION_DEMOTE, 1, 2)) == ("accepted", 2)
        await node.hints.settle()
        assert all(node.disk.has(key) for key in chunk_keys(1, 2))
        await node.disk.writer.flush()
        await store(engine, 90, 91)
        await until(lambda: numbers_in(node) == {*range(10, 10 + CAPACITY - 2), 90, 91})
        assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PREFETCH, 1, 2)) == ("accepted", 2)
        await node.hints.settle()
        assert {1, 2} <= numbers_in(node)
        await until(lambda: not any(chunk.holds for chunk in node.tier))


@pytest.mark.parametrize(
    ("action", "left"),
    [(chunk_pb2.HINT_ACTION_EVICT, {1, 2, 3, 4, 10, 11, 12}), (chunk_pb2.HINT_ACTION_DEMOTE, {5, 6, 10, 11, 12})],
)
async def test_the_disk_evicts_evicted_chunks_first_and_keeps_demoted_ones(
    config: NodeConfig, tmp_path: Path, action: chunk_pb2.HintAction.ValueType, left: set[int]
) -> None:
    size_bytes = 7 * SPEC.chunk_bytes
    async with with_disk(config, tmp_path / "disk", size_bytes) as (node, engine):
        disk = node.disk
        assert disk is not None
        await store(engine, 1, 2, 3, 4)
        await store(engine, 5, 6)
        await until(lambda: disk.chunk_count == 6)
        assert ended(await hint(engine, action, 5, 6)) == ("accepted", 2)
        await store(engine, 10, 11, 12)
        await until(lambda: {int.from_bytes(chunk.key, "big") for chunk in disk} >= {10, 11, 12})
        assert left <= {int.from_bytes(chunk.key, "big") for chunk in disk}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"action": 0}, "action 0"),
        ({"action": 99}, "action 99"),
        ({"chunk_keys": b"x"}, "chunk_keys"),
        ({"chunk_keys": b""}, "chunk_keys"),
        ({"chunk_keys": bytes(16 * 32_769)}, "chunk_keys"),
        ({"root_key": b"short"}, "root_key"),
        ({"ttl": {"seconds": 0}}, "ttl"),
        ({"ttl": {"seconds": -300_000_000_000}}, "ttl"),
        ({"action": chunk_pb2.HINT_ACTION_RETAIN, "priority": 0}, "priority"),
        ({"action": chunk_pb2.HINT_ACTION_RETAIN, "priority": 101}, "priority"),
        ({"hint_id": ""}, "hint_id"),
        ({"hint_id": "x" * 65}, "hint_id"),
    ],
)
async def test_a_malformed_hint_is_rejected_and_the_stream_continues(
    node: Node, engine: EngineClient, change: dict[str, object], named: str
) -> None:
    await store(engine, 1)
    fields: dict[str, object] = {
        "hint_id": "h",
        "action": chunk_pb2.HINT_ACTION_PIN,
        "chunk_keys": chunk_key(1),
        "root_key": ROOT,
        "ttl": {"seconds": 5},
    }
    await engine.say(hint=[pb.HintChunks(**(fields | change))])  # type: ignore[arg-type]
    (answer,) = await engine.hear("hinted")
    result = answer.result
    assert (ended(result), result.reason) == (("rejected", 0), chunk_pb2.HINT_REASON_MALFORMED)
    assert named in result.detail
    assert len(answer.hint_id) <= 64
    assert ended(await hint(engine, chunk_pb2.HINT_ACTION_PIN, 1, ttl=5)) == ("accepted", 1)


async def test_a_ttl_beyond_a_day_is_clipped(node: Node, engine: EngineClient) -> None:
    await store(engine, 1)
    for action in (chunk_pb2.HINT_ACTION_PIN, chunk_pb2.HINT_ACTION_RETAIN):
        answer = await hint(engine, action, 1, ttl=1e9, priority=1)
        assert (ended(answer), answer.ttl.seconds) == (("clipped", 1), 86_400)


async def test_hints_are_counted_by_action_and_outcome(node: Node, engine: EngineClient) -> None:
    await store(engine, 1)
    await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1)
    await hint(engine, chunk_pb2.HINT_ACTION_EVICT, 1)
    await hint(engine, chunk_pb2.HINT_ACTION_PREFETCH, 1)
    assert dict(node.hints.counts) == {("evict", "accepted"): 1, ("evict", "missing"): 1, ("prefetch", "missing"): 1}
