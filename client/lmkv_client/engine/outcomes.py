"""Results of futures that are set once a lock is released, and blocking waits for them that end at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Outcomes:
    """Futures with their results, in order. Added to with the lock held, set without it: a callback may then call the
    engine again."""

    def __init__(self) -> None:
        self._pending: list[tuple[Future[Any], Any]] = []

    def add(self, future: Future[T], result: T) -> None:
        """Adds the result of a future. No future may be added twice."""
        self._pending.append((future, result))

    def take(self) -> Outcomes:
        """What was added, for the caller to `set`."""
        taken = Outcomes()
        self._pending, taken._pending = [], self._pending
        return taken

    def set(self) -> list[Any]:
        """Sets all results. Returns those whose futures the callers have cancelled."""
        cancelled = []
        for future, result in self._pending:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                cancelled.append(result)
        return cancelled


def await_result(future: Future[T], deadline: float, expire: Callable[[], None]) -> T:
    """The result of a future. At its deadline `expire` ends it with what there is."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        expire()
        return future.result()
