"""The memory of decoded requests: what a caller may hold, and that all of it returns."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import TooManyRequests
from lmkv.runtime.memory_budget import (
    CALLER_FRACTION,
    DECODED_PROTOBUF_FACTOR,
    MIN_BYTES,
    Lease,
    MemoryBudget,
    budget_bytes,
    json_bytes,
    memory_limit,
)
from lmkv.v1.cache_service_pb2 import LookupRequest

CAPACITY = 1000
SHARE = CAPACITY // CALLER_FRACTION


def test_a_caller_has_a_share_and_leaves_the_rest_to_others() -> None:
    budget = MemoryBudget(CAPACITY)
    held = [budget.take("hog", SHARE // 5) for _ in range(5)]
    with pytest.raises(TooManyRequests, match="one caller may have half") as refused:
        budget.take("hog", 1)
    assert refused.value.retry_seconds == 1.0
    others = [budget.take(f"honest {number}", SHARE // 5) for number in range(5)]
    with pytest.raises(TooManyRequests):
        budget.take("late", 1)
    for lease in (*held, *others):
        lease.close()
        lease.close()
    assert budget.held_bytes == 0
    budget.take("hog", SHARE).close()


def test_a_request_that_is_larger_than_a_share_is_admitted_alone() -> None:
    budget = MemoryBudget(CAPACITY)
    with budget.take("one", 2 * CAPACITY), pytest.raises(TooManyRequests):
        budget.take("another", 1)
    with budget.take("another", 1), pytest.raises(TooManyRequests):
        budget.take("one", 2 * CAPACITY)
    with pytest.raises(TooManyRequests):
        budget.take("one", 2 * CAPACITY + 1)


async def test_a_message_waits_for_memory_within_bounds() -> None:
    budget = MemoryBudget(CAPACITY)
    held = budget.take("hog", SHARE)
    waiting = asyncio.create_task(budget.acquire("hog", SHARE))
    await asyncio.sleep(0)
    (await budget.acquire("honest", SHARE)).close()
    assert not waiting.done()
    held.close()
    (await waiting).close()
    with budget.take("hog", SHARE), pytest.raises(TooManyRequests):
        await budget.acquire("hog", 1, wait_seconds=0.01)
    assert budget.held_bytes == 0


async def test_a_message_that_no_longer_waits_holds_nothing() -> None:
    budget = MemoryBudget(CAPACITY)
    with budget.take("hog", SHARE):
        waiting = asyncio.create_task(budget.acquire("hog", SHARE))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert budget.held_bytes == 0
    assert not budget._waiting


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, CAPACITY)), max_size=40), st.randoms())
def test_the_budget_is_never_exceeded_and_always_returned(requests: list[tuple[int, int]], order: Any) -> None:
    budget = MemoryBudget(CAPACITY)
    leases: list[Lease] = []
    for caller, size in requests:
        if order.random() < 0.3 and leases:
            leases.pop(order.randrange(len(leases))).close()
        before = budget.held_bytes
        try:
            leases.append(budget.take(str(caller), size))
        except TooManyRequests:
            assert budget.held_bytes == before
        assert budget.held_bytes <= CAPACITY
        assert budget.held_bytes == sum(lease.size_bytes for lease in leases)
    for lease in leases:
        lease.close()
    assert (budget.held_bytes, budget._by_caller) == (0, {})


def test_a_lease_of_nothing_is_no_hold() -> None:
    budget = MemoryBudget(CAPACITY)
    with Lease(budget, "one"):
        assert budget.held_bytes == 0


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * 50_000 + "1]",
        "[" + "[]," * 50_000 + "1]",
        "[" + "{}," * 50_000 + "1]",
        "[" + '"a",' * 50_000 + "1]",
        "[" + '{"a":[123456789]},' * 20_000 + "1]",
        json.dumps({"image": "A" * 500_000}),
        json.dumps({str(number): number for number in range(50_000)}),
        json.dumps(["\U0001f600" + "a" * 30_000] * 10, ensure_ascii=False),
    ],
    ids=("numbers", "lists", "objects", "texts", "nested", "text", "fields", "wide"),
)
def test_no_json_takes_more_memory_than_its_bound(text: str) -> None:
    body = text.encode()
    tracemalloc.start()
    try:
        content = msgspec.json.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert content
    assert len(body) + taken <= json_bytes(body)


def test_a_text_alone_costs_little() -> None:
    body = json.dumps({"image": "A" * 500_000}).encode()
    assert json_bytes(body) < 2.1 * len(body)


def test_no_lookup_takes_more_memory_than_its_bound() -> None:
    message = LookupRequest(tokens=[1] * 500_000).SerializeToString()
    tracemalloc.start()
    try:
        tokens = list(LookupRequest.FromString(message).tokens)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tokens) == 500_000
    assert 4 * len(tokens) + taken <= DECODED_PROTOBUF_FACTOR * len(message), "4 bytes: protobuf's own, not traced"


def test_the_budget_of_a_process_follows_its_limit() -> None:
    assert 0 < budget_bytes() < memory_limit()
    assert budget_bytes(memory_limit()) == MIN_BYTES
