"""Delays between a session's attempts to register. Pure. Used by `CoordinatorSession`."""

from __future__ import annotations

import random

MIN_DELAY_SECONDS = 0.05
MAX_DELAY_SECONDS = 0.5
"""If the coordinator does not accept connections; an attempt may take `REGISTER_TIMEOUT_SECONDS` besides."""
MAX_BUSY_DELAY_SECONDS = 3.0
"""If it accepts connections and does not answer in time: perhaps thousands of nodes are registering."""
MAX_REQUESTED_DELAY_SECONDS = 30.0
"""Upper bound for the delay that a coordinator without room asks for."""
REFUSED_DELAY_SECONDS = 5.0
"""While another node has the instance id. If the coordinator speaks another protocol: at first, then twice as long."""


class RegisterBackoff:
    """Exponential backoff with jitter, so that nodes that lost a coordinator together do not return together."""

    def __init__(self) -> None:
        self._delay_seconds = MIN_DELAY_SECONDS
        self._least_seconds = 0.0

    def request(self, seconds: float) -> None:
        """Sets a lower bound for the next delay only."""
        self._least_seconds = min(seconds, MAX_REQUESTED_DELAY_SECONDS)

    def next_delay(self, max_seconds: float, *, was_stable: bool) -> float:
        """Seconds to wait: twice as many as last time up to `max_seconds`, or few if the last session `was_stable`."""
        least_seconds, self._least_seconds = self._least_seconds, 0.0
        self._delay_seconds = MIN_DELAY_SECONDS if was_stable else min(2 * self._delay_seconds, max_seconds)
        return max(self._delay_seconds * random.uniform(0.5, 1.0), least_seconds)  # noqa: S311 # jitter
