"""Keeps the pool of a node without engines for a time: the engine may be restarting, which may take minutes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from lmkv.pool.memory import available_bytes
from lmkv.pool.pool import LEFT_BYTES
from lmkv.units import format_bytes, format_duration

logger = logging.getLogger(__name__)

WANTED_BYTES = 2 * LEFT_BYTES
"""Other processes want memory if less than this is available."""
SHORT_LINGER_SECONDS = 60.0
"""A node without engines keeps memory that others want for at most this time."""
MAX_POLL_SECONDS = 5.0
FIRST_NOTICE_SECONDS = 60.0
"""The log has the time that is left when it is this, and twice, four times, ... this."""


class Linger:
    """Counts down to the end of a node without engines. One event loop owns it."""

    def __init__(
        self,
        seconds: float,
        has_engines: Callable[[], bool],
        *,
        first_seconds: float = 0.0,
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` are `node_linger`. For its first engine the node waits `first_seconds` longer."""
        self._seconds = seconds
        self._has_engines = has_engines
        self._available = available
        self._clock = clock
        self._idle_since = clock() + first_seconds
        self._is_short = False
        self._noticed_seconds = float("inf")

    def restart(self) -> None:
        """Engines or their workers have come or left: the time counts from now."""
        self._idle_since = self._clock()
        self._noticed_seconds = float("inf")

    @property
    def left_seconds(self) -> float:
        """The time that is left unless an engine attaches; all of it while there are engines."""
        seconds = min(self._seconds, SHORT_LINGER_SECONDS) if self._is_short else self._seconds
        return seconds if self._has_engines() else max(0.0, self._idle_since + seconds - self._clock())

    def look(self) -> bool:
        """Looks whether memory is wanted, and writes the time that is left to the log; whether none is left."""
        if self._has_engines():
            self.restart()
            return False
        was_short, self._is_short = self._is_short, self._available() < WANTED_BYTES
        if self._is_short and not was_short and self._seconds > SHORT_LINGER_SECONDS:
            logger.warning(
                "less than %s of memory is available: node_linger is %.0f s until there is more",
                format_bytes(WANTED_BYTES),
                SHORT_LINGER_SECONDS,
            )
        left = self.left_seconds
        if left <= 0:
            logger.info("ending: no engine for %.0f s (node_linger)", self._clock() - self._idle_since)
            return True
        if left < self._noticed_seconds and left > MAX_POLL_SECONDS:
            logger.info("no engine: ending in %s unless one attaches (node_linger)", format_duration(round(left)))
            self._noticed_seconds = _next_notice(left)
        return False

    async def wait(self) -> None:
        """Returns once no time is left."""
        while True:
            if self.look():
                return
            await asyncio.sleep(min(max(self.left_seconds, 0.1), MAX_POLL_SECONDS))


def _next_notice(left: float) -> float:
    """The longest notice that is shorter than the time that is left; 0 if there is none."""
    if left <= FIRST_NOTICE_SECONDS:
        return 0.0
    notice = FIRST_NOTICE_SECONDS
    while 2 * notice < left:
        notice *= 2
    return notice
