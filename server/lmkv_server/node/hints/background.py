"""Work of hints that continues after their results. Bounded; ends with the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

MAX_TASKS = 64
"""Most prefetches and demotions that run or wait."""


class BackgroundTasks:
    """The tasks of one node's hints."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def is_full(self) -> bool:
        """Whether no more hints may start work."""
        return self._is_closing or len(self._tasks) >= MAX_TASKS

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or the node does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def settle(self) -> None:
        """Returns once no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancels all tasks; no more may start. Idempotent."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a hint failed unexpectedly", exc_info=error)
