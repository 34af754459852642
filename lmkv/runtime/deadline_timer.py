"""Calls a function when its next deadline has passed, and after every change of the deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress


class DeadlineTimer:
    """An async context manager; `callback` is called on the event loop that enters it."""

    def __init__(self, callback: Callable[[], float | None]) -> None:
        """`callback` returns the time of its next call, by `time.monotonic()`; None: only after `changed`."""
        self._callback = callback
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Calls `callback` soon, because its deadline may have changed."""
        self._changed.set()

    async def __aenter__(self) -> DeadlineTimer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops the timer. Idempotent."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            due = self._callback()
            self._changed.clear()  # changes that the callback made itself
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - time.monotonic()):
                    await self._changed.wait()
