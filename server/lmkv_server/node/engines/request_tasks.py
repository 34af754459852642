"""The tasks that run for one engine's requests: lookups and loads that wait for other nodes or tiers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class RequestTasks:
    """At most one task per request; they end with the engine's stream."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, lookup_id: str, work: Coroutine[None, None, None]) -> None:
        """Runs `work` until it ends or the request is cancelled."""
        task = asyncio.create_task(work)
        self._tasks[lookup_id] = task
        task.add_done_callback(lambda done: self._remove(lookup_id, done))

    def cancel(self, lookup_id: str) -> None:
        """Cancels the task of a request. Idempotent."""
        if task := self._tasks.pop(lookup_id, None):
            task.cancel()

    def close(self) -> None:
        """Cancels all tasks."""
        for task in self._tasks.values():
            task.cancel()

    def _remove(self, lookup_id: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(lookup_id) is done:
            del self._tasks[lookup_id]
        if not done.cancelled() and (error := done.exception()):
            logger.error("the task of lookup %s failed unexpectedly", lookup_id, exc_info=error)
