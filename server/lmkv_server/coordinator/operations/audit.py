"""The audit log: a line of JSON for each action on the fleet: caller, role, action, request and outcome.

It contains no prompt: tokens and keys are counted, and a salt is replaced by `hidden`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lmkv.auth.caller import current_caller
from lmkv.errors import ConfigError, LmkvError
from lmkv.rpc.error_status import short

logger = logging.getLogger("lmkv.audit")

_HIDDEN = ("cache_salt",)


class AuditEntry:
    """An action in progress. `names` are those of what it created, such as an operation."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}


@contextmanager
def audited(name: str, request: Message) -> Iterator[AuditEntry]:
    """Writes the line of an action at its end, whether it succeeded or not."""
    entry, outcome = AuditEntry(), "OK"
    try:
        yield entry
    except LmkvError as error:
        outcome = error.reason
        raise
    except BaseException:
        outcome = "FAILED"
        raise
    finally:
        caller = current_caller()
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "caller": caller.name,
            "role": caller.role.value,
            "tenant": caller.tenant,
            "act": name,
            "request": redacted(request),
            **entry.names,
            "outcome": outcome,
        }
        logger.info("%s", json.dumps(line))  # in ASCII: no text in it can break the line


def redacted(request: Message) -> dict[str, object]:
    """The fields of a request, without content of a prompt."""
    return {field.name: _redacted(field, value) for field, value in request.ListFields()}


def _redacted(field: FieldDescriptor, value: object) -> object:
    if field.name in _HIDDEN:
        return "hidden"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if field.is_repeated:
        return f"{len(value)} {field.name}"  # type: ignore[arg-type]
    if isinstance(value, Message):
        return redacted(value)
    if field.enum_type is not None and isinstance(value, int):
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return short(value) if isinstance(value, str) else value


def write_audit_to(path: str) -> None:
    """Appends the lines to a file, which may be rotated at any time; without a path they go to the process's log.

    Raises `ConfigError` if the file cannot be written.
    """
    if not path:
        return
    try:
        Path(path).touch(mode=0o600)
        handler = WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"audit_log: cannot write {path}: {error.strerror}", key="audit_log") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
