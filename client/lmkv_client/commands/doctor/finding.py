"""What a check finds: one line, with the fix where there is something to fix."""

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
    """All is well."""
    return Finding(check=check, level="ok", text=text)


def warn(check: str, text: str) -> Finding:
    """It works, but perhaps not as meant."""
    return Finding(check=check, level="warn", text=text)


def fail(check: str, text: str) -> Finding:
    """It will not work."""
    return Finding(check=check, level="fail", text=text)
