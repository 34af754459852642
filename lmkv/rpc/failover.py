"""One of several equal targets, such as coordinators: the same one while it answers, the next one after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Target = TypeVar("Target")


class Failover(Generic[Target]):
    """Selects one of at least one equal targets. Pure."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = tuple(targets)
        self._index = 0

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def current(self) -> Target:
        """The target to use now."""
        return self._targets[self._index]

    def report_failure(self, target: Target) -> None:
        """Switches to the next target; does nothing if `target` is no longer the current one."""
        if target is self.current:
            self._index = (self._index + 1) % len(self._targets)
