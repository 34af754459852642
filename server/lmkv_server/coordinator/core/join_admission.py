"""Limits how many instances join at a time. Pure; time is passed in.

A joining instance reports all its chunks, which takes the coordinator milliseconds. A thousand at once take longer than
the timeout of nodes: they would all time out and retry, and none would ever complete.
"""

from __future__ import annotations

from lmkv.errors import Full
from lmkv_server.coordinator.core.instances import Instance

MAX_JOINING = 32
GUESSED_PACE_SECONDS = 0.02
"""Approximate duration of a snapshot of ten thousand chunks."""
GUESS_WEIGHT = 8
"""Weight of the guess, in observed joins."""
REMEMBERED_JOINS = 64
"""Older joins lose weight."""
TURNS_PER_JOIN = 2
"""Turns per join: with one, joins could never be faster than turns, and would be measured as slow for ever."""


class JoinAdmission:
    """Admits `limit` joining instances at a time, over all tenants, and refuses others with a retry delay."""

    def __init__(self, limit: int = MAX_JOINING) -> None:
        self._limit = limit
        self._joining: set[Instance] = set()
        self._last_turn = 0.0
        self._rush_since: float | None = None
        self._joined_count = 0.0
        """Joins in this rush."""

    def check(self, now: float) -> None:
        """Raises `Full` if no further instance may join now. Retry delays follow the current duration of joins."""
        if len(self._joining) >= self._limit:
            self._forget_joined(now)
        if len(self._joining) < self._limit:
            return
        if self._rush_since is None:
            self._rush_since, self._joined_count = now, 0.0
        seconds = GUESSED_PACE_SECONDS * GUESS_WEIGHT + now - self._rush_since
        pace_seconds = seconds / (GUESS_WEIGHT + self._joined_count)
        self._last_turn = max(self._last_turn, now) + pace_seconds / TURNS_PER_JOIN
        raise Full(
            f"{self._limit} instances are joining; retry after the delay",
            retry_seconds=round(self._last_turn - now, 3),
        )

    def admit(self, instance: Instance) -> None:
        """Adds a joining instance; it has joined once it is `synced`."""
        self._joining.add(instance)

    def leave(self, instance: Instance) -> None:
        """Removes an instance that reports its chunks elsewhere. Idempotent."""
        self._joining.discard(instance)

    def _forget_joined(self, now: float) -> None:
        """Removes instances that have joined, or whose lease expired."""
        before = len(self._joining)
        self._joining = {one for one in self._joining if not one.synced and one.expire_time > now}
        self._joined_count += before - len(self._joining)
        if len(self._joining) < self._limit // 2:  # the rush is over
            self._rush_since = None
        elif self._rush_since is not None and self._joined_count > REMEMBERED_JOINS:
            self._joined_count /= 2
            self._rush_since += (now - self._rush_since) / 2
