"""The finding of a check: one line, with the fix if there is a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    text: str


def ok(check: str, text: str) -> Finding:
    """The check passed."""
    return Finding(check=check, level="ok", text=text)


def warn(check: str, text: str) -> Finding:
    """The check passed, but the configuration may be unintended."""
    return Finding(check=check, level="warn", text=text)


def fail(check: str, text: str) -> Finding:
    """The check failed."""
    return Finding(check=check, level="fail", text=text)
