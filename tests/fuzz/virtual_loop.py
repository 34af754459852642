"""An event loop whose clock jumps to the next timer: handlers run to their end without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

MAX_STEPS = 20_000
"""Iterations of the loop for one input: more are a loop without end."""
MAX_SECONDS = 7200.0
"""Longest time on the loop's clock for one input: every call of lmkv ends within an hour."""


class NeverEnds(AssertionError):
    """A coroutine waits for an event that cannot happen, or runs without end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Work for threads runs at once, on the loop's own thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._jumps = _JumpingSelector(self)
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._seconds

    def jump(self, seconds: float) -> None:
        """Moves the clock."""
        self._seconds += seconds

    def run_in_executor(  # type: ignore[override]  # less general: it is called by `asyncio` only
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs to the end, and cancels what is left. Raises `NeverEnds`."""
        self._jumps.begin()
        try:
            return self.run_until_complete(work)
        finally:
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            if left:
                self._jumps.begin()
                self.run_until_complete(asyncio.wait(left))


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self.begin()

    def begin(self) -> None:
        self._steps = 0
        self._end = self._loop.time() + MAX_SECONDS if hasattr(self._loop, "_seconds") else MAX_SECONDS

    def select(self, timeout: float | None = None) -> Any:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise NeverEnds(f"{MAX_STEPS} iterations of the event loop for one input")
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NeverEnds("all tasks wait, and no timer is set")
        self._loop.jump(max(timeout, 1e-6))
        if self._loop.time() > self._end:
            raise NeverEnds(f"a call takes longer than {MAX_SECONDS} seconds")
        return []


def run(work: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run(work)
    finally:
        loop.close()
