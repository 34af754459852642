"""Hints of a coordinator's clients at whole nodes: they reach the tiers, and what peers hold is prefetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.hints import HintOutcome, HintReason
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import join_keys
from lmkv.rpc.messages import by_keys
from lmkv.runtime.places import most_of, requester
from lmkv.v1 import cache_service_pb2_grpc, chunk_pb2
from lmkv.v1.cache_service_pb2 import HintRequest, HintResponse, ListPinsRequest, UnpinRequest
from lmkv_server.node.hints.executor import MAX_TASKS, REPLICA_SHARE, BackgroundTasks, carry_out
from tests.server.node.cases import chunk_keys
from tests.server.node.test_node_fleet import TwoNodes
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually, until

SPEC = small_spec()


@pytest.fixture
async def fleet(runtime_dir: Path) -> AsyncIterator[TwoNodes]:
    async with TwoNodes(runtime_dir) as fleet:
        yield fleet


@pytest.fixture
async def cache(fleet: TwoNodes) -> AsyncIterator[Any]:
    async with rpc.open_channel(fleet.coordinator.address) as channel:
        yield cache_service_pb2_grpc.CacheServiceStub(channel)


async def hint(cache: Any, instance_id: str, action: int, numbers: list[int], **fields: Any) -> HintResponse:
    request = HintRequest(prompt=by_keys(chunk_keys(*numbers)), instance_id=instance_id, action=action, **fields)  # type: ignore[arg-type]
    response: HintResponse = await cache.Hint(request, timeout=WAIT_SECONDS)
    return response


async def test_a_prefetch_brings_the_chunks_of_a_peer_into_the_pool(fleet: TwoNodes, cache: Any) -> None:
    await fleet.store([1, 2, 3])
    response = await hint(cache, "asker", chunk_pb2.HINT_ACTION_PREFETCH, [1, 2, 3])
    assert (response.result.outcome, response.result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 3)
    await until(lambda: all(fleet.asker.tier.get(key) for key in chunk_keys(1, 2, 3)))
    await fleet.asker.hints.settle()
    assert not any(chunk.holds for chunk in fleet.asker.tier)


async def replicate(fleet: TwoNodes, cache: Any, *numbers: int) -> chunk_pb2.HintResult:
    response = await hint(cache, "asker", chunk_pb2.HINT_ACTION_REPLICATE, list(numbers))
    return response.result


async def test_a_replica_is_brought_only_while_the_node_loads_nothing_else(fleet: TwoNodes, cache: Any) -> None:
    await fleet.store([1, 2, 3])
    awaited = chunk_keys(1)
    assert fleet.asker.peer_side
    inflight = fleet.asker.peer_side.fetcher.inflight
    inflight.begin(awaited)  # as if another fetch read it: the prefetch waits for that
    await hint(cache, "asker", chunk_pb2.HINT_ACTION_PREFETCH, [1])
    await until(lambda: fleet.asker._tier_stack.is_loading)
    refused = await replicate(fleet, cache, 2, 3)
    assert (refused.outcome, refused.reason) == (chunk_pb2.HINT_OUTCOME_REJECTED, chunk_pb2.HINT_REASON_BUSY)
    inflight.end(awaited)
    await fleet.asker.hints.settle()
    assert [fleet.asker.tier.get(key) is not None for key in chunk_keys(1, 2, 3)] == [True, False, False]
    brought = await replicate(fleet, cache, 2, 3)
    assert (brought.outcome, brought.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 2)
    await fleet.asker.hints.settle()
    assert all(fleet.asker.tier.get(key) for key in chunk_keys(1, 2, 3))
    assert not any(chunk.holds for chunk in fleet.asker.tier)


async def test_replicas_take_a_share_of_the_pool_per_minute_however_many_are_asked_for(
    fleet: TwoNodes, cache: Any
) -> None:
    most = fleet.asker.tier.size_bytes // REPLICA_SHARE // SPEC.chunk_bytes
    assert most > 0
    numbers = list(range(1, 2 * most + 1))
    for first in range(0, len(numbers), 16):
        await fleet.store(numbers[first : first + 16])
    begin = time.monotonic()
    clipped = await replicate(fleet, cache, *numbers)
    assert clipped.outcome == chunk_pb2.HINT_OUTCOME_CLIPPED
    assert 0 < clipped.chunk_count <= most
    await fleet.asker.hints.settle()
    for _ in range(20):
        await replicate(fleet, cache, *numbers)
        await fleet.asker.hints.settle()
    minutes = (time.monotonic() - begin) / 60
    assert clipped.chunk_count <= len(fleet.asker.tier) <= most * (1 + minutes)


async def test_what_peers_can_find_is_shared(fleet: TwoNodes, cache: Any) -> None:
    await fleet.store([1, 2, 3])
    response = await hint(cache, "holder", chunk_pb2.HINT_ACTION_SHARE, [1, 2, 3])
    assert (response.result.outcome, response.result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 3)


async def test_a_pin_by_a_hint_is_listed_and_ends_by_its_id(fleet: TwoNodes, cache: Any) -> None:
    await fleet.store([1, 2, 3])
    pinned = await hint(cache, "holder", chunk_pb2.HINT_ACTION_PIN, [1, 2, 3], ttl=Duration(seconds=60))
    assert pinned.result.outcome == chunk_pb2.HINT_OUTCOME_ACCEPTED
    pins = fleet.holder.orders.pins
    assert [pin.pin_id for pin in pins] == [pinned.pin_id]
    assert pinned.pin_id.startswith("holder/")

    async def listed() -> list[str]:
        return [pin.pin_id for pin in (await cache.ListPins(ListPinsRequest(), timeout=WAIT_SECONDS)).pins]

    await eventually(listed, [pinned.pin_id])
    evicted = await hint(cache, "holder", chunk_pb2.HINT_ACTION_EVICT, [1, 2, 3])
    assert (evicted.result.outcome, evicted.result.reason) == (
        chunk_pb2.HINT_OUTCOME_REJECTED,
        chunk_pb2.HINT_REASON_IN_USE,
    )
    await cache.Unpin(UnpinRequest(pin_id=pinned.pin_id), timeout=WAIT_SECONDS)
    assert not len(pins)
    gone = await hint(cache, "holder", chunk_pb2.HINT_ACTION_EVICT, [1, 2, 3])
    assert (gone.result.outcome, gone.result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 3)


async def test_a_retention_ends_with_its_time(fleet: TwoNodes, cache: Any) -> None:
    await fleet.store([1, 2, 3])
    ttl = Duration(nanos=10_000_000)
    retained = await hint(cache, "holder", chunk_pb2.HINT_ACTION_RETAIN, [1, 2, 3], ttl=ttl, priority=5)
    assert (retained.result.outcome, retained.result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 3)
    await until(lambda: not len(fleet.holder.hints.retentions), "no chunk is retained")


async def test_an_order_that_a_coordinator_would_not_send_is_rejected(fleet: TwoNodes) -> None:
    hints, engines = fleet.holder.hints, fleet.holder.engines
    good: dict[str, Any] = {
        "hint_id": "h",
        "action": chunk_pb2.HINT_ACTION_RETAIN,
        "fingerprint": SPEC.fingerprint,
        "chunk_keys": join_keys(chunk_keys(1)),
        "ttl": Duration(seconds=5),
        "priority": 5,
        "owner": bytes(16),
    }
    assert (await carry_out(report_pb.HintOrder(**good), hints, engines)).outcome is HintOutcome.MISSING
    for change in (
        {"hint_id": ""},
        {"action": 99},
        {"chunk_keys": b"x"},
        {"ttl": Duration(seconds=-1)},
        {"priority": 0},
        {"priority": 101},
        {"owner": b""},
    ):
        result = await carry_out(report_pb.HintOrder(**(good | change)), hints, engines)
        assert (result.outcome, result.reason) == (HintOutcome.REJECTED, HintReason.MALFORMED), change
    unknown = await carry_out(report_pb.HintOrder(**(good | {"fingerprint": b"f" * 16})), hints, engines)
    assert unknown.outcome is HintOutcome.MISSING


async def test_the_number_of_tasks_is_bounded_by_its_callers() -> None:
    background, going = BackgroundTasks(), asyncio.Event()
    for number in range(most_of(MAX_TASKS)):
        assert not background.is_full, number
        background.start(_wait(going))
    assert background.is_full
    requester.set("engine:another")
    assert not background.is_full
    while not background.is_full:
        background.start(_wait(going))
    going.set()
    await background.settle()
    assert not background.is_full


async def test_tasks_end_with_the_node() -> None:
    background = BackgroundTasks()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    background.start(work())
    await asyncio.sleep(0)
    await background.aclose()
    await background.aclose()
    assert background.is_full
    assert ended == ["work"]


async def test_a_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("broken")

    background.start(fail())
    await background.settle()
    await asyncio.sleep(0)
    assert "a hint failed unexpectedly" in caplog.text


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
