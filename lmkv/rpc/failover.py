"""One of several equals, such as coordinators: the same one as long as it serves, and the next when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

One = TypeVar("One")


class Failover(Generic[One]):
    """At least one of them."""

    def __init__(self, equals: Sequence[One]) -> None:
        self._equals = tuple(equals)
        self._at = 0

    def __len__(self) -> int:
        return len(self._equals)

    @property
    def current(self) -> One:
        """Whom to ask."""
        return self._equals[self._at]

    def failed(self, one: One) -> None:
        """One did not answer; nothing if another is current since."""
        if one is self.current:
            self._at = (self._at + 1) % len(self._equals)
