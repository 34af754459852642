"""Turns of large messages: one at a time, callers one after the other, and arrivals between two of them."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from lmkv.runtime import turns
from lmkv.runtime.turns import LARGE_BYTES, Slots, Turns

WAIT_SECONDS = 30.0


async def test_callers_take_turns_one_after_the_other() -> None:
    order: list[str] = []
    shared = Turns()

    async def decode(caller: str) -> None:
        async with shared.take(caller, LARGE_BYTES):
            order.append(caller)

    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(decode(caller) for caller in ["hog"] * 20 + ["honest", "other"]))
    assert order[:4] == ["hog", "hog", "honest", "other"]
    assert order[4:] == ["hog"] * 18


async def test_small_messages_wait_for_no_turn() -> None:
    shared = Turns()
    async with shared.take("hog", LARGE_BYTES):
        small = shared.take("hog", LARGE_BYTES - 1).__aenter__()
        with pytest.raises(StopIteration):  # it has not waited
            small.send(None)


ACCEPT_ITERATIONS = 6
"""Iterations of the loop in which gRPC accepts a call."""


def test_calls_that_arrive_are_accepted_between_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop of servers, whose timers count milliseconds."""
    monkeypatch.setattr(turns, "MAX_PAUSE_SECONDS", WAIT_SECONDS)
    accepted = 0

    async def arrive(shared: Turns) -> None:
        nonlocal accepted
        for _ in range(200):
            shared.count_arrival()
            accepted += 1
            for _ in range(ACCEPT_ITERATIONS):
                await asyncio.sleep(0)

    async def flood() -> None:
        shared = Turns()
        async with asyncio.timeout(WAIT_SECONDS):
            async with shared.take("hog", LARGE_BYTES):
                arriving = asyncio.create_task(arrive(shared))
            async with shared.take("hog", LARGE_BYTES):
                assert accepted > 20, "its turn has come before those that arrived were accepted"
            await arriving

    uvloop.run(flood())


async def test_the_next_turn_comes_once_the_loop_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that works for long after a turn leaves the loop to others, too."""
    monkeypatch.setattr(turns, "MAX_PAUSE_SECONDS", WAIT_SECONDS)
    shared = Turns()

    async def handle() -> None:
        for _ in range(10):
            end = time.monotonic() + 3 * turns.QUIET_SECONDS
            while time.monotonic() < end:
                pass
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_SECONDS):
        async with shared.take("hog", LARGE_BYTES):
            handling = asyncio.create_task(handle())
        async with shared.take("hog", LARGE_BYTES):
            assert handling.done()


async def test_the_pause_after_a_turn_is_as_long_as_the_message_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LARGE_BYTES_PER_SECOND", 10 * LARGE_BYTES)
    monkeypatch.setattr(turns, "MAX_PAUSE_SECONDS", WAIT_SECONDS)
    shared = Turns()
    async with shared.take("hog", 2 * LARGE_BYTES):
        pass
    begin = time.monotonic()
    async with shared.take("honest", LARGE_BYTES):
        assert time.monotonic() - begin > 0.1


async def test_a_turn_comes_whatever_arrives() -> None:
    shared = Turns()

    async def arrive() -> None:
        while True:
            shared.count_arrival()
            await asyncio.sleep(0)

    arriving = asyncio.create_task(arrive())
    async with asyncio.timeout(WAIT_SECONDS):
        for _ in range(3):
            async with shared.take("honest", LARGE_BYTES):
                pass
    arriving.cancel()


@pytest.mark.parametrize("has_turn", [False, True])
async def test_who_waits_no_longer_takes_no_turn_from_others(has_turn: bool) -> None:
    shared = Turns()

    async def decode(caller: str) -> None:
        async with shared.take(caller, LARGE_BYTES):
            pass

    async with shared.take("hog", LARGE_BYTES):
        leaving = [asyncio.create_task(decode(caller)) for caller in ("hog", "honest")]
        staying = asyncio.create_task(decode("honest"))
        await asyncio.sleep(0)
        if has_turn:
            shared._give()
            leaving[0].cancel()
        else:
            for one in leaving:
                one.cancel()
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*leaving, return_exceptions=True)
        await staying
    assert not shared._waiting


async def test_one_part_of_a_large_message_is_read_in_an_iteration_of_the_loop_callers_in_turn() -> None:
    shared = Turns()
    iteration, read = 0, list[tuple[str, int]]()

    async def receive(caller: str) -> None:
        for _ in range(5):
            await shared.read(caller)
            read.append((caller, iteration))

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_SECONDS):
        counting = asyncio.create_task(count())
        await asyncio.gather(*(receive(caller) for caller in ["hog"] * 20 + ["honest"]))
        counting.cancel()
    iterations = [number for _, number in read]
    assert len(set(iterations[1:])) == len(iterations) - 1, "the first is read at once"
    honest = [place for place, (caller, _) in enumerate(read) if caller == "honest"]
    assert honest == [honest[0] + 2 * number for number in range(5)]


async def test_a_reader_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    shared = Turns()
    await shared.read("one")
    waiting = [asyncio.create_task(shared.read("one")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    async with asyncio.timeout(WAIT_SECONDS):
        await waiting[0]
        await waiting[2]
        await shared.read("one")
    assert waiting[1].cancelled()


async def test_one_that_is_cancelled_as_its_turn_comes_leaves_it_to_the_next() -> None:
    """The turn ends in the iteration in which it is cancelled: it has not run since."""
    shared = Turns()

    async def decode() -> None:
        async with shared.take("one", LARGE_BYTES):
            pass

    async with asyncio.timeout(WAIT_SECONDS):
        async with shared.take("another", LARGE_BYTES):
            waiting = [asyncio.create_task(decode()) for _ in range(2)]
            await asyncio.sleep(0)
        waiting[0].cancel()
        shared._give()
        await waiting[1]
        await decode()


async def test_slots_are_taken_by_callers_in_turn_and_all_of_them_return() -> None:
    slots, order, ends = Slots(2), list[str](), asyncio.Event()

    async def work(caller: str) -> None:
        async with slots.take(caller):
            order.append(caller)
            await ends.wait()

    async with asyncio.timeout(WAIT_SECONDS):
        tasks = [asyncio.create_task(work(caller)) for caller in ["hog"] * 10 + ["honest"]]
        while len(order) < 2:  # noqa: ASYNC110 # they have begun in the next iteration
            await asyncio.sleep(0)
        assert slots.is_locked
        tasks[0].cancel()  # has a slot
        tasks[3].cancel()  # waits for one
        ends.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order.index("honest") <= 3
        assert len(order) == 10
        async with slots.take("one"), slots.take("other"):
            assert slots.is_locked
    assert not slots.is_locked
