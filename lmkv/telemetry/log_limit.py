"""Rate limit of log lines that callers cause: one line per template and interval, with a count of those omitted."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

INTERVAL_SECONDS = 1.0
"""Minimum time between two lines of one template."""

if TYPE_CHECKING:
    Base = logging.LoggerAdapter[logging.Logger]
else:
    Base = logging.LoggerAdapter


class LimitedLogger(Base):
    """A logger that limits each message template to one line per interval.

    Templates are constants of the code, so callers cannot choose them, and their number is bounded.
    """

    def __init__(self, logger: logging.Logger, interval_seconds: float = INTERVAL_SECONDS) -> None:
        super().__init__(logger, {})
        self._interval_seconds = interval_seconds
        self._lines: dict[object, tuple[float, int]] = {}
        """Time of the last line and number of lines omitted since, by template."""

    @property
    def level(self) -> int:
        """The level of the logger, which uvicorn reads."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Logs, unless a line of this template was logged within the interval."""
        if not self.isEnabledFor(level):
            return
        now = time.monotonic()
        last, omitted = self._lines.get(msg, (-self._interval_seconds, 0))
        if now - last < self._interval_seconds:
            self._lines[msg] = last, omitted + 1
            return
        self._lines[msg] = now, 0
        if omitted:
            msg, args = f"{msg} (%d more such lines were omitted)", (*args, omitted)
        self.logger.log(level, msg, *args, **options)
