"""Results of futures that are set once a lock is released: a callback may then call the engine again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Outcomes:
    """Futures with their results, in order. Added to with the lock held, set without it."""

    def __init__(self) -> None:
        self._pending: list[tuple[Future[Any], Any, Callable[[], None] | None]] = []

    def add(self, future: Future[T], result: T, undo: Callable[[], None] | None = None) -> None:
        """`undo` is called instead if the caller has cancelled the future. No future may be added twice."""
        self._pending.append((future, result, undo))

    def take(self) -> Outcomes:
        """What was added, for the caller to `set`."""
        taken = Outcomes()
        self._pending, taken._pending = [], self._pending
        return taken

    def set(self) -> None:
        """Sets all results."""
        for future, result, undo in self._pending:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            elif undo:
                undo()
