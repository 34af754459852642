"""Does what its time has come for, and looks again whenever something changed. For whatever has deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress


class DeadlineTimer:
    """To be used as an async context manager, on the loop that owns what it acts on."""

    def __init__(self, callback: Callable[[], float | None]) -> None:
        """`callback` acts, and says when to be called again, by `time.monotonic()`; None: not before `changed`."""
        self._callback = callback
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """What `callback` said may be no longer so: it is called soon."""
        self._changed.set()

    async def __aenter__(self) -> DeadlineTimer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Rings no more. Idempotent."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            due = self._callback()
            self._changed.clear()  # what it changed itself it has looked at
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - time.monotonic()):
                    await self._changed.wait()
