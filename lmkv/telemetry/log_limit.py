"""Bounds how often callers can make a process log: one line of a kind an interval, with a count of those left out."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

INTERVAL_SECONDS = 1.0
"""Minimum time between two lines of one kind."""

if TYPE_CHECKING:
    Base = logging.LoggerAdapter[logging.Logger]
else:
    Base = logging.LoggerAdapter


class LimitedLogger(Base):
    """A logger for lines that callers cause. Lines are of one kind if their template is.

    Templates are constants of the code, so that no caller can choose the kind, and their number is bounded.
    """

    def __init__(self, logger: logging.Logger, interval_seconds: float = INTERVAL_SECONDS) -> None:
        super().__init__(logger, {})
        self._interval_seconds = interval_seconds
        self._kinds: dict[object, tuple[float, int]] = {}
        """Time of the last line, and the number of those left out since, by template."""

    @property
    def level(self) -> int:
        """The logger's own level, which uvicorn reads."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Logs, unless a line of this kind was logged within the interval."""
        if not self.isEnabledFor(level):
            return
        now = time.monotonic()
        last, left_out = self._kinds.get(msg, (-self._interval_seconds, 0))
        if now - last < self._interval_seconds:
            self._kinds[msg] = last, left_out + 1
            return
        self._kinds[msg] = now, 0
        if left_out:
            msg, args = f"{msg} (%d more such lines were left out)", (*args, left_out)
        self.logger.log(level, msg, *args, **options)
