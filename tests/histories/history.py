"""Records of calls, and the questions that the rules ask about their order.

A record is one call: its invocation (`start`) and its completion (`end`), by the clock of the one process that records
all of them. Between both the call takes effect, if it does. `a` is before `b` only if `a` had ended when `b` started;
otherwise they are concurrent, and either order is legal. A call without an answer has no end: it may take effect at any
time after its start, or never.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

NEVER = math.inf
KILL = "kill"
STOPS = frozenset({KILL, "freeze"})
"""Faults while which a process does not answer."""


class Outcome(StrEnum):
    """What the caller knows of a call."""

    OK = "ok"
    """It was answered."""
    FAILED = "failed"
    """It was refused: it had no effect."""
    UNKNOWN = "unknown"
    """No answer arrived: it may have had its effect, or may have it later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One call. Requests and answers contain plain JSON values only."""

    call: str
    actor: str
    """The process or client that called."""
    server: str
    """The process that was called."""
    start: float
    end: float = NEVER
    outcome: Outcome = Outcome.OK
    stream: str = ""
    """The stream that it was a message of; empty for a unary call."""
    request: Mapping[str, Any] = field(default_factory=dict)
    answer: Mapping[str, Any] = field(default_factory=dict)

    def before(self, other: Record) -> bool:
        return self.end <= other.start

    def __str__(self) -> str:
        end = "      never" if self.end == NEVER else f"{self.end:11.6f}"
        outcome = "" if self.outcome is Outcome.OK else f" {self.outcome}"
        stream = f" ({self.stream})" if self.stream else ""
        asked, said = (json.dumps(part, separators=(",", ":")) for part in (self.request, self.answer))
        return (
            f"{self.start:11.6f} ─ {end}  {self.actor} → {self.server}{stream}: {self.call} {asked} ⇒{outcome} {said}"
        )


class History:
    """The records of one run, in the order of their starts."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda record: (record.start, record.end))
        self._by_call: dict[str, list[Record]] = {}
        self._faults: dict[str, list[Record]] = {}
        for record in self.records:
            self._by_call.setdefault(record.call, []).append(record)
            if record.call == "Fault":
                self._faults.setdefault(record.server, []).append(record)

    def of(self, *calls: str) -> Iterator[Record]:
        """The answered calls of these kinds; those of one kind in the order of their starts."""
        return (record for call in calls for record in self._by_call.get(call, ()) if record.outcome is Outcome.OK)

    def attempts(self, *calls: str) -> Iterator[Record]:
        """All calls of these kinds that may have had an effect."""
        return (record for call in calls for record in self._by_call.get(call, ()) if record.outcome != Outcome.FAILED)

    def faults(self, target: str, start: float, end: float, kinds: frozenset[str] = STOPS) -> list[Record]:
        """The faults of a process between two times."""
        return [
            fault
            for fault in self._faults.get(target, ())
            if fault.request["kind"] in kinds and fault.start <= end and start <= fault.end
        ]

    def is_one_life(self, server: str, start: float, end: float) -> bool:
        """Whether the process was certainly not restarted between two times."""
        return not self.faults(server, start, end, frozenset({KILL}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A promise that was broken, and the records that show it."""

    rule: str
    what: str
    records: tuple[Record, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.what}", *(f"  {record}" for record in self.records)])


def dump(record: Record) -> str:
    """A record as one line of JSON."""
    fields = {name: getattr(record, name) for name in Record.__slots__}
    return json.dumps({name: value for name, value in fields.items() if value not in (NEVER, "", {})})


def load(path: Path) -> Iterator[Record]:
    """The records of a file of JSON lines."""
    with path.open() as lines:
        for line in lines:
            fields = json.loads(line)
            yield Record(**fields | {"outcome": Outcome(fields["outcome"])})
