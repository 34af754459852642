"""Limits how many instances join at a time. Pure; time is passed in.

A joining instance reports all its chunks, which takes the coordinator milliseconds. A thousand at once take longer than
the timeout of nodes: they would all time out and retry, and none would ever complete.
"""

from __future__ import annotations

from collections import defaultdict

from lmkv.errors import Full
from lmkv.runtime.places import Places
from lmkv_server.coordinator.core.instances import Instance

MAX_JOINING = 64
"""Instances of all tenants that join at a time."""
MAX_JOINING_OF_TENANT = 32
"""Those of a tenant that is alone; see `Places`."""
GUESSED_PACE_SECONDS = 0.02
"""Approximate duration of a snapshot of ten thousand chunks."""
GUESS_WEIGHT = 8
"""Weight of the guess, in observed joins."""
REMEMBERED_JOINS = 64
"""Older joins lose weight."""
TURNS_PER_JOIN = 2
"""Turns per join: with one, joins could never be faster than turns, and would be measured as slow for ever."""


class JoinAdmission:
    """Admits `limit` joining instances at a time, `share` of one tenant, and refuses others with a retry delay."""

    def __init__(self, limit: int = MAX_JOINING, share: int = MAX_JOINING_OF_TENANT) -> None:
        self._joining = Places[Instance]("places to join", limit, share)
        self._rushes: defaultdict[str, _Rush] = defaultdict(_Rush)
        """By tenant."""

    def check(self, now: float, tenant: str = "") -> None:
        """Raises `Full` if no further instance may join now. Retry delays follow the current duration of joins."""
        try:
            self._joining.check(tenant)
        except Full:
            self._forget_joined(now)
        try:
            self._joining.check(tenant)
        except Full:
            raise Full(
                f"{len(self._joining)} instances are joining, {self._joining.count(tenant)} of them of this tenant; "
                "retry after the delay",
                retry_seconds=self._rushes[tenant].next_turn(now),
            ) from None

    def admit(self, instance: Instance, tenant: str = "") -> None:
        """Adds a joining instance, which `check` has admitted; it has joined once it is `synced`."""
        self._joining.take(instance, tenant)

    def leave(self, instance: Instance) -> None:
        """Removes an instance that is gone, was replaced, or reports its chunks elsewhere. Idempotent."""
        self._joining.release(instance)

    def _forget_joined(self, now: float) -> None:
        """Removes instances that have joined, or whose lease expired."""
        before = {tenant: self._joining.count(tenant) for tenant in self._rushes}
        for instance in list(self._joining):
            if instance.synced or instance.expire_time <= now:
                self._joining.release(instance)
        for tenant, count in before.items():
            rush, joining = self._rushes[tenant], self._joining.count(tenant)
            rush.joined(count - joining, now)
            if joining < self._joining.share // 2:
                rush.end()


class _Rush:
    """The instances of one tenant that join while others wait for their turn, and the turns of those."""

    def __init__(self) -> None:
        self._last_turn = 0.0
        self._since: float | None = None
        self._joined_count = 0.0

    def next_turn(self, now: float) -> float:
        """The delay after which one more instance may retry, in seconds."""
        if self._since is None:
            self._since, self._joined_count = now, 0.0
        seconds = GUESSED_PACE_SECONDS * GUESS_WEIGHT + now - self._since
        pace_seconds = seconds / (GUESS_WEIGHT + self._joined_count)
        self._last_turn = max(self._last_turn, now) + pace_seconds / TURNS_PER_JOIN
        return round(self._last_turn - now, 3)

    def joined(self, count: int, now: float) -> None:
        """Counts instances that have joined."""
        self._joined_count += count
        if self._since is not None and self._joined_count > REMEMBERED_JOINS:
            self._joined_count /= 2
            self._since += (now - self._since) / 2

    def end(self) -> None:
        """Few instances are joining: the next rush is measured from its own beginning."""
        self._since = None
