"""How many instances join at a time. Pure; time is passed in.

An instance that joins tells all that it holds, which takes the coordinator milliseconds. A thousand at once take longer
than nodes wait for an answer: they would give up one after the other and begin again, and none would ever be in.
"""

from __future__ import annotations

from lmkv.errors import Full
from lmkv_server.coordinator.core.instances import Instance

MAX_JOINING = 32
GUESSED_PACE_SECONDS = 0.02
"""What a snapshot of ten thousand chunks takes, about."""
GUESS_WEIGHT = 8
"""Joins that have to be seen until they count as much as the guess."""
REMEMBERED_JOINS = 64
"""What was before these counts less and less."""
TURNS_PER_JOIN = 2
"""Turns come faster than joins: else these could never come faster than turns, and would be found as slow for good."""


class JoinAdmission:
    """Lets in `limit` instances at a time, of all tenants together, and tells the others when to come back."""

    def __init__(self, limit: int = MAX_JOINING) -> None:
        self._limit = limit
        self._joining: set[Instance] = set()
        self._last_turn = 0.0
        self._rush_since: float | None = None
        self._joined_count = 0.0
        """In this rush."""

    def check(self, now: float) -> None:
        """Raises `Full` if nobody more may join now. How far turns are apart follows how long joins take at present."""
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
            f"{self._limit} instances are telling what they hold; others have their turn later",
            retry_seconds=round(self._last_turn - now, 3),
        )

    def admit(self, instance: Instance) -> None:
        """Notes somebody who joins, and is not `synced` until it has."""
        self._joining.add(instance)

    def leave(self, instance: Instance) -> None:
        """Makes the room of somebody who tells nothing here after all."""
        self._joining.discard(instance)

    def _forget_joined(self, now: float) -> None:
        """Whoever has joined makes room, and whoever gave up when its lease is over."""
        before = len(self._joining)
        self._joining = {one for one in self._joining if not one.synced and one.expire_time > now}
        self._joined_count += before - len(self._joining)
        if len(self._joining) < self._limit // 2:  # nobody came for a while
            self._rush_since = None
        elif self._rush_since is not None and self._joined_count > REMEMBERED_JOINS:
            self._joined_count /= 2
            self._rush_since += (now - self._rush_since) / 2
