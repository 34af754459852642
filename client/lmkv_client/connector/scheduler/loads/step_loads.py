"""Which loads are part of the step that computes the rest of their prompt. Pure.

Beside a load of its own, an "asynchronous" one, other requests run; but the request then waits for further steps of the
engine, which cost more than to copy some megabytes. So what is in the pool is copied in the step if it is little, or if
no other request waits meanwhile.
"""

from __future__ import annotations

ALONE_BYTES = 256 << 20
"""Most bytes of a load in the step of a request that is alone: a request that arrives meanwhile waits some 25 ms."""
SHARED_BYTES = 4 << 20
"""Most bytes of all loads in a step with other requests: it takes a millisecond longer at worst."""


class StepLoads:
    """What the loads in the step that is being planned take."""

    def __init__(self, alone_bytes: int = ALONE_BYTES, shared_bytes: int = SHARED_BYTES) -> None:
        self._alone_bytes = alone_bytes
        self._shared_bytes = shared_bytes
        self._taken_bytes = 0
        self._workers_copy = False
        """Whether all workers have copied between pages and the pool of this attachment: before, it may not be mapped,
        for which only loads beside the steps wait."""

    def workers_copy(self) -> None:
        """All workers have copied between pages and the pool."""
        self._workers_copy = True

    def node_lost(self) -> None:
        """The pool is gone; the next one is not mapped yet."""
        self._workers_copy = False

    def have_room(self, size_bytes: int, *, is_alone: bool) -> bool:
        """Whether a load of this size may be in the step; `is_alone`: its request is the only one."""
        if not self._workers_copy:
            return False
        return self._taken_bytes + size_bytes <= (self._alone_bytes if is_alone else self._shared_bytes)

    def take(self, size_bytes: int) -> None:
        """A load of this size is in the step."""
        self._taken_bytes += size_bytes

    def end_step(self) -> None:
        """The step is planned."""
        self._taken_bytes = 0
