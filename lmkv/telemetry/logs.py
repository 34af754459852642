"""Logs of lmkv's processes: text lines, or JSON with the ids of operations, orders and traces.

`LimitedLogger` limits the rate of lines that callers cause, to one per template and interval.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lmkv.safe_text import safe_text
from lmkv.telemetry.spans import current_ids

MAX_MESSAGE_CHARACTERS = 16_384
"""Maximum length of a message; some messages quote callers."""
MAX_LINE_CHARACTERS = 2_048
MAX_TRACEBACK_LINES = 200
"""Limits of a traceback in a record; of more lines, those in the middle are omitted."""

_bound: ContextVar[Mapping[str, str]] = ContextVar("lmkv_log_ids", default={})  # noqa: B039  # never changed in place


@contextmanager
def bound(**ids: str) -> Iterator[None]:
    """Adds these ids to all records that are logged inside, and by tasks that are started inside."""
    token = _bound.set({**_bound.get(), **ids})
    try:
        yield
    finally:
        _bound.reset(token)


class SafeFormatter(logging.Formatter):
    """Formats records so that no text in them can forge another record or flood the log.

    A message is one line (`safe_text`). Lines of a traceback are indented, so that none looks like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of the record, and the lines of its exception."""
        record.message = _message(record)
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        return "\n    ".join([self.formatMessage(record), *_exception_lines(record)])


def _message(record: logging.LogRecord) -> str:
    return safe_text(record.getMessage(), MAX_MESSAGE_CHARACTERS)


def _exception_lines(record: logging.LogRecord) -> list[str]:
    """The lines of a record's exception and stack; empty if it has none."""
    if not (record.exc_info or record.stack_info):
        return []
    exception = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
    text = f"{exception}\n{record.stack_info or ''}".strip()
    lines = [safe_text(line, MAX_LINE_CHARACTERS) for line in text.split("\n")]
    if (extra := len(lines) - MAX_TRACEBACK_LINES) > 0:
        half = MAX_TRACEBACK_LINES // 2
        lines[half:-half] = [f"... {extra} lines are omitted ..."]
    return lines


class JsonFormatter(logging.Formatter):
    """One JSON object per record and line.

    Always present: `time`, `level`, `logger`, `message` and the fields given here. If applicable: the bound ids,
    `trace_id` and `span_id`, and `exception`.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, str] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._always,
            **{name: safe_text(value, MAX_LINE_CHARACTERS) for name, value in _bound.get().items()},
        }
        if ids := current_ids():
            line["trace_id"], line["span_id"] = ids
        if lines := _exception_lines(record):
            line["exception"] = "\n".join(lines)
        return json.dumps(line, ensure_ascii=False)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """False for the traceback that gRPC logs as a servicer's failure when a caller has gone before its answer."""
    error = record.exc_info[0] if record.exc_info else None
    return error is None or (error.__module__, error.__name__) != ("grpc._cython.cygrpc", "ExecuteBatchError")


def set_up_logging(level: str, log_format: str, *, service: str, **always: str) -> None:
    """Logs to standard error: as text lines that name the service, or as JSON with it and the fields `always` in each.

    A later call replaces the setup of an earlier one.
    """
    text = f"%(asctime)s {service.replace('-', ' ')} %(levelname)s %(message)s"
    handler = logging.StreamHandler()
    handler.addFilter(_is_of_interest)
    handler.setFormatter(JsonFormatter(service=service, **always) if log_format == "json" else SafeFormatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


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
