"""What every fuzz target asserts: documented errors only, bounded answers, and no log line of an unexpected failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lmkv.errors import LmkvError
from lmkv.rpc.error_status import from_status, to_status

MAX_STATUS_BYTES = 16 << 10
"""An error as it is sent: gRPC sends it in trailers, which are limited."""


@contextmanager
def refused_as(*errors: type[Exception]) -> Iterator[None]:
    """Accepts these errors. One of lmkv's own has a bounded status, and the same class at the other end."""
    try:
        yield
    except errors as error:
        if isinstance(error, LmkvError):
            check_status(error)


def check_status(error: LmkvError) -> None:
    """Asserts that an error can be sent."""
    status = to_status(error)
    assert status.ByteSize() <= MAX_STATUS_BYTES, f"the status has {status.ByteSize()} bytes"
    assert status.message.isprintable()
    assert type(from_status(status)) is type(error)


class FailureLog(logging.Handler):
    """Keeps log records of failures that the code did not expect: those with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        if record.exc_info or record.levelno >= logging.CRITICAL:
            self.failures.append(record)


@contextmanager
def no_unexpected_failures() -> Iterator[None]:
    """Raises what the code logged as an unexpected failure; other records are discarded."""
    log, roots = FailureLog(), [logging.getLogger(name) for name in ("lmkv", "lmkv_server", "lmkv_client", "asyncio")]
    propagated = [root.propagate for root in roots]
    for root in roots:
        root.addHandler(log)
        root.propagate = False
    try:
        yield
    finally:
        for root, before in zip(roots, propagated, strict=True):
            root.removeHandler(log)
            root.propagate = before
    for record in log.failures:
        error = record.exc_info[1] if record.exc_info else None
        raise AssertionError(f"logged as unexpected: {record.getMessage()}") from error
