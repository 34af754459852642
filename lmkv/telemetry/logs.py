"""Logs of lmkv's own processes: readable lines, or JSON with the ids that operations, orders and traces go by."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from lmkv.telemetry.spans import current_ids

_bound: ContextVar[Mapping[str, str]] = ContextVar("lmkv_log_ids", default={})  # noqa: B039  # never changed in place


@contextmanager
def bound(**ids: str) -> Iterator[None]:
    """Everything that is logged inside, and by tasks that are started inside, carries these ids."""
    token = _bound.set({**_bound.get(), **ids})
    try:
        yield
    finally:
        _bound.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per record and line.

    Always there: `time`, `level`, `logger`, `message` and what was given here. Where they apply: the bound ids,
    `trace_id` and `span_id`, and `exception`.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, str] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **_bound.get(),
        }
        if ids := current_ids():
            line["trace_id"], line["span_id"] = ids
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str, log_format: str, text: str, **always: str) -> None:
    """Logs to standard error: by the pattern `text`, or as JSON with `always` in each record."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(**always) if log_format == "json" else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
