"""Work that continues after a hint's result: how much there may be, and that it ends with the node."""

from __future__ import annotations

import asyncio

import pytest

from lmkv.runtime.places import most_of, requester
from lmkv_server.node.hints.background import MAX_TASKS, BackgroundTasks


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
