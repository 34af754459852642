"""The memory of decoded requests: what a caller may hold, and that all of it returns."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import TooManyRequests
from lmkv.rpc.messages import by_tokens
from lmkv.runtime import memory_budget
from lmkv.runtime.memory_budget import (
    CALLER_FRACTION,
    DECODED_PROTOBUF_FACTOR,
    LONE_FRACTION,
    MIN_BYTES,
    SMALL_FRACTION,
    SPARE_FRACTION,
    TRIM_FROM_BYTES,
    Lease,
    MemoryBudget,
    budget_bytes,
    memory_limit,
)
from lmkv.v1.cache_service_pb2 import LookupRequest
from tests.waiting import WAIT_SECONDS, until

CAPACITY = 1000
SHARE = CAPACITY // CALLER_FRACTION
SMALL = CAPACITY // SMALL_FRACTION
LARGEST = LONE_FRACTION * CAPACITY


def test_a_caller_has_a_share_and_leaves_the_rest_to_others() -> None:
    budget = MemoryBudget(CAPACITY)
    held = [budget.take("hog", SHARE // 5) for _ in range(5)]
    with pytest.raises(TooManyRequests, match="one caller may have half") as refused:
        budget.take("hog", SMALL + 1)
    assert refused.value.retry_seconds == 1.0
    others = [budget.take(f"honest {number}", SHARE // 5) for number in range(5)]
    with pytest.raises(TooManyRequests):
        budget.take("late", SMALL + 1)
    budget.take("late", SMALL).close()
    for lease in (*held, *others):
        lease.close()
        lease.close()
    assert budget.held_bytes == 0
    budget.take("hog", SHARE).close()


def test_a_request_that_is_larger_than_a_share_is_admitted_alone() -> None:
    budget = MemoryBudget(CAPACITY)
    with budget.take("one", LARGEST), pytest.raises(TooManyRequests):
        budget.take("another", SMALL + 1)
    with budget.take("another", SMALL + 1), pytest.raises(TooManyRequests):
        budget.take("one", LARGEST)
    with pytest.raises(TooManyRequests):
        budget.take("one", LARGEST + 1)


def test_small_requests_of_others_pass_beside_the_largest_within_bounds() -> None:
    budget = MemoryBudget(CAPACITY)
    budget.take("hog", LARGEST)
    count = CAPACITY // SPARE_FRACTION // SMALL
    for number in range(count):
        budget.take(f"honest {number}", SMALL)
    with pytest.raises(TooManyRequests):
        budget.take("late", SMALL)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_callers_leave_as_much_as_each_of_them_has(count: int) -> None:
    budget = MemoryBudget(CAPACITY)
    callers = {f"hog {number}": 0 for number in range(count)}
    while any(budget.has_room(Lease(budget, caller), SMALL + 1) for caller in callers):
        for caller in callers:
            with suppress(TooManyRequests):
                callers[caller] += budget.take(caller, SMALL + 1).size_bytes
    assert all(abs(held - CAPACITY // (count + 1)) <= 2 * SMALL for held in callers.values())
    budget.take("honest", CAPACITY // (count + 1) - 2 * count * SMALL).close()


async def test_requests_of_a_caller_are_served_in_the_order_of_arrival_and_callers_in_turn() -> None:
    budget = MemoryBudget(CAPACITY)
    served: list[str] = []
    held = budget.take("other", CAPACITY)

    async def wait(caller: str, number: int) -> None:
        with await budget.acquire(caller, CAPACITY // 2 + 1):
            served.append(f"{caller}{number}")
            await asyncio.sleep(0)

    names = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("c", 1), ("b", 2)]
    waiting = [asyncio.create_task(wait(*name)) for name in names]
    await asyncio.sleep(0)
    assert budget.waiting_count == len(names)
    held.close()
    await asyncio.gather(*waiting)
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert (budget.held_bytes, budget.waiting_count) == (0, 0)


async def test_a_late_request_does_not_overtake_those_of_its_caller_unless_it_is_small() -> None:
    """The caller may be a gateway, whose small requests are those of other users."""
    budget = MemoryBudget(CAPACITY)
    held = budget.take("one", SHARE)
    first = asyncio.create_task(budget.acquire("one", SHARE))
    await asyncio.sleep(0)
    second = asyncio.create_task(budget.acquire("one", SMALL + 1))
    await asyncio.sleep(0)
    assert not second.done()
    with budget.take("one", SMALL), pytest.raises(TooManyRequests):
        await budget.acquire("one", 1, wait_seconds=0.01)
    held.close()
    (await first).close()
    (await second).close()
    assert (budget.held_bytes, budget._small, budget._small_bytes, budget._idle) == (0, {}, 0, {})


async def test_small_requests_do_not_stand_in_the_way_of_the_largest() -> None:
    budget = MemoryBudget(CAPACITY)
    small = [budget.take(caller, SMALL) for caller in ("one", "another")]
    with await budget.acquire("one", LARGEST, wait_seconds=0.01):
        assert budget.held_bytes == LARGEST + 2 * SMALL
    growing = small[0]
    growing.grow(1)  # now it is a large one
    with pytest.raises(TooManyRequests):
        budget.take("one", LARGEST)
    for lease in small:
        lease.close()
    assert (budget.held_bytes, budget._small, budget._small_bytes) == (0, {}, 0)


async def test_requests_that_all_hold_something_and_wait_for_more_are_served_one_after_the_other() -> None:
    """Bodies that have arrived wait for the memory that they are decoded to, and hold theirs meanwhile."""
    budget = MemoryBudget(CAPACITY)
    ended = 0

    async def decode(lease: Lease) -> None:
        nonlocal ended
        with lease:
            await lease.acquire(CAPACITY)
            assert budget.held_bytes <= LARGEST
            await asyncio.sleep(0)
        ended += 1

    leases = [budget.take("one", SHARE // 5) for _ in range(5)]
    assert budget.held_bytes == SHARE
    async with asyncio.TaskGroup() as group:
        for lease in leases:
            group.create_task(decode(lease))
    assert (ended, budget.held_bytes, budget._idle_bytes) == (5, 0, 0)


async def test_a_request_that_is_cancelled_as_it_is_served_returns_its_bytes() -> None:
    budget = MemoryBudget(CAPACITY)
    held = budget.take("one", CAPACITY)
    waiting = asyncio.create_task(budget.acquire("one", CAPACITY))
    await asyncio.sleep(0)
    held.close()
    assert budget.held_bytes == CAPACITY, "it is served, and has not run since"
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (budget.held_bytes, budget._held, budget._idle) == (0, {}, {})


async def test_a_request_that_could_never_be_served_does_not_wait() -> None:
    budget = MemoryBudget(CAPACITY)
    with budget.take("one", 1), pytest.raises(TooManyRequests):
        await budget.acquire("one", LARGEST + 1, wait_seconds=1e9)


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
        await budget.acquire("hog", SMALL + 1, wait_seconds=0.01)
    assert budget.held_bytes == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "OVERTAKEN_SECONDS", 0.01)
    monkeypatch.setattr(memory_budget, "RESERVED_SECONDS", 0.05)
    monkeypatch.setattr(memory_budget, "_LOOK_SECONDS", 0.005)


async def hold_in_turn(budget: MemoryBudget, caller: str, size: int, ended: asyncio.Event) -> int:
    """Two requests at a time hold bytes, so that there is always one. Returns how many were served."""
    served = 0

    async def one() -> None:
        nonlocal served
        while not ended.is_set():
            with await budget.acquire(caller, size, wait_seconds=WAIT_SECONDS):
                await asyncio.sleep(0.002)
            served += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(one())
        await asyncio.sleep(0.001)
        group.create_task(one())
    return served


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_is_larger_than_the_budget_is_served_beside_a_stream_of_others() -> None:
    budget, ended = MemoryBudget(CAPACITY), asyncio.Event()
    others = [asyncio.create_task(hold_in_turn(budget, caller, 2 * SMALL, ended)) for caller in ("one", "another")]
    await until(lambda: budget.held_bytes > 0)
    with await budget.acquire("large", LARGEST, wait_seconds=WAIT_SECONDS):
        assert budget.held_bytes == LARGEST
        ended.set()
    await asyncio.gather(*others)
    assert (budget.held_bytes, budget.waiting_count, budget._reserved) == (0, 0, None)


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_is_never_served_does_not_stop_others() -> None:
    budget, ended = MemoryBudget(CAPACITY), asyncio.Event()
    held = budget.take("long", 2 * SMALL)
    hogs = [asyncio.create_task(budget.acquire("hog", LARGEST, wait_seconds=WAIT_SECONDS)) for _ in range(3)]
    await until(lambda: budget._reserved is not None)
    with pytest.raises(TooManyRequests):
        budget.take("honest", 2 * SMALL)
    budget.take("honest", SMALL).close()
    (await budget.acquire("honest", 2 * SMALL, wait_seconds=WAIT_SECONDS)).close()
    assert not any(hog.done() for hog in hogs)
    for hog in hogs:
        hog.cancel()
    await asyncio.wait(hogs)
    held.close()
    ended.set()
    assert (budget.held_bytes, budget.waiting_count, budget._reserved) == (0, 0, None)


@pytest.mark.usefixtures("impatient")
async def test_of_the_requests_that_wait_only_the_next_one_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds that look at the same time would keep the event loop from others."""
    budget = MemoryBudget(CAPACITY)
    looked = list[Lease]()
    wait_for_rest = MemoryBudget._wait_for_rest

    async def noted(budget: MemoryBudget, waiter: Any) -> None:
        looked.append(waiter.lease)
        await wait_for_rest(budget, waiter)

    monkeypatch.setattr(MemoryBudget, "_wait_for_rest", noted)
    held = budget.take("hog", SHARE)
    leases = [Lease(budget, "hog") for _ in range(20)]
    tasks = [asyncio.create_task(lease.acquire(SHARE, WAIT_SECONDS)) for lease in leases]
    await until(lambda: len(looked) > 20)
    assert set(looked) == {leases[0]}
    looked.clear()
    tasks[0].cancel()
    await until(lambda: len(looked) > 20)
    assert set(looked) == {leases[1]}
    held.close()
    for task, lease in zip(tasks[1:], leases[1:], strict=True):
        await task
        lease.close()
    assert not budget.held_bytes


async def test_a_message_that_no_longer_waits_holds_nothing() -> None:
    budget = MemoryBudget(CAPACITY)
    with budget.take("hog", SHARE):
        waiting = asyncio.create_task(budget.acquire("hog", SHARE))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert budget.held_bytes == 0
    assert not budget.waiting_count


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
        assert budget.held_bytes <= CAPACITY + 4 * SMALL
        assert budget.held_bytes == sum(lease.size_bytes for lease in leases)
    for lease in leases:
        lease.close()
    assert (budget.held_bytes, budget._held) == (0, {})


def test_a_lease_of_nothing_is_no_hold() -> None:
    budget = MemoryBudget(CAPACITY)
    with Lease(budget, "one"):
        assert budget.held_bytes == 0


def test_no_lookup_takes_more_memory_than_its_bound() -> None:
    message = LookupRequest(prompt=by_tokens([1] * 500_000)).SerializeToString()
    tracemalloc.start()
    try:
        tokens = list(LookupRequest.FromString(message).prompt.tokens.token_ids)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tokens) == 500_000
    assert 4 * len(tokens) + taken <= DECODED_PROTOBUF_FACTOR * len(message), "4 bytes: protobuf's own, not traced"


def test_the_budget_of_a_process_follows_its_limit() -> None:
    assert 0 < budget_bytes() < memory_limit()
    assert budget_bytes(memory_limit()) == MIN_BYTES


@pytest.mark.parametrize(
    ("line", "own", "above"),
    [
        ("0::/pod/engine", "pod/engine/memory.max", "pod/memory.max"),
        ("4:cpu,memory:/pod/engine", "memory/pod/engine/memory.limit_in_bytes", "memory/pod/memory.limit_in_bytes"),
        ("0::/not/mounted/here", "memory.max", ""),
    ],
    ids=("version 2", "version 1", "the top of the mount"),
)
def test_the_limit_is_the_least_of_the_cgroups_of_this_process(tmp_path: Path, line: str, own: str, above: str) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"9:devices:/\n{line}\n")

    def set_limit(file: str, text: str) -> int:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"{text}\n")
        return memory_limit(proc, root)

    whole = memory_limit(proc, root)
    assert set_limit(own, "max") == whole
    assert set_limit(own, str(2**63 - 4096)) == whole, "how version 1 says that there is none"
    assert set_limit(own, str(64 << 20)) == 64 << 20
    if above:
        assert set_limit(above, str(48 << 20)) == 48 << 20
        assert set_limit(own, "max") == 48 << 20


@pytest.fixture
def nested_cgroup() -> Iterator[Path]:
    """A cgroup below that of this process, where it may make one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    top = Path("/sys/fs/cgroup/memory") if "memory" in paths else Path("/sys/fs/cgroup")
    folder = top / paths.get("memory", paths.get("", "/")).lstrip("/") / f"lmkv-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this process may not make a cgroup: {error}")
    yield folder
    folder.rmdir()


def test_a_process_in_a_nested_cgroup_has_the_limit_of_that(nested_cgroup: Path) -> None:
    limit = 512 << 20
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (nested_cgroup / name).exists():
            (nested_cgroup / name).write_text(str(limit))
            break
    else:
        pytest.skip("memory is not controlled below the cgroup of this process")
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('0'); "
    code += "from lmkv.runtime.memory_budget import memory_limit; print(memory_limit())"
    command = [sys.executable, "-c", code, str(nested_cgroup / "cgroup.procs")]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == limit


async def test_memory_is_returned_until_no_request_waits_and_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived of a request that waits is in memory, too, until it is refused."""
    trimmed: list[int] = []
    monkeypatch.setattr(memory_budget, "_trim", lambda: trimmed.append(1))
    monkeypatch.setattr(memory_budget, "TRIM_SECONDS", 0.05)
    budget = MemoryBudget(2 * TRIM_FROM_BYTES)
    budget.take("caller", TRIM_FROM_BYTES).close()
    held = budget.take("caller", TRIM_FROM_BYTES - 1)
    waiting = asyncio.create_task(budget.acquire("caller", TRIM_FROM_BYTES, WAIT_SECONDS))
    await until(lambda: len(trimmed) > 3)
    assert budget.waiting_count == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    count = len(trimmed)
    await until(lambda: len(trimmed) > count)
    held.close()
