"""Work of hints that continues after their results. Bounded; ends with the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from lmkv.errors import Full
from lmkv.runtime.places import Places, most_of, requester

logger = logging.getLogger(__name__)

MAX_TASKS = 64
"""Most prefetches and demotions that run or wait."""


class BackgroundTasks:
    """The tasks of one node's hints. Engines have shares of their number."""

    def __init__(self) -> None:
        self._tasks = Places[asyncio.Task[None]]("hints", MAX_TASKS, most_of(MAX_TASKS))
        self._is_closing = False

    @property
    def is_full(self) -> bool:
        """Whether no more hints of the one that requests this may start work."""
        try:
            self._tasks.check(requester.get())
        except Full:
            return True
        return self._is_closing

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or the node does. It must not be full."""
        task = asyncio.create_task(work)
        self._tasks.take(task, requester.get())
        task.add_done_callback(self._ended)

    async def settle(self) -> None:
        """Returns once no task runs."""
        while tasks := list(self._tasks):
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Cancels all tasks; no more may start. Idempotent."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.release(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a hint failed unexpectedly", exc_info=error)
