"""Parses and formats sizes and durations, for the configuration, log lines and the CLI.

Sizes are printed in KiB, MiB, GiB and TiB. Input may omit the i; its units are binary too: 1 KB is 1024 bytes.
"""

from __future__ import annotations

import math
import re

GIB = 1 << 30
"""Bytes in a GiB."""

_BYTES = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
_SECONDS: dict[str, tuple[int, int]] = {  # as fractions, so that 100 ms is 0.1 to the last bit
    "us": (1, 1_000_000),
    "ms": (1, 1_000),
    "s": (1, 1),
    "m": (60, 1),
    "h": (3_600, 1),
    "d": (86_400, 1),
}
_MEASURE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?) *([a-z]*)", re.IGNORECASE)


def parse_gib(value: object) -> float:
    """A size in GiB: 5, 5.0 and "5" are 5 GiB; "512MB", "1.5 GiB" and "64Ki" name their own unit.

    Raises `ValueError` for anything else, negative text included.
    """
    number, unit = _measure(value)
    prefix = re.sub(r"(?<=[KMGT])I?B?$", "", unit.upper()) or "G"
    if prefix not in _BYTES:
        raise ValueError(f"{unit!r} is not a unit of size")
    return number * (_BYTES[prefix] / GIB)


def parse_seconds(value: object) -> float:
    """A duration in seconds: 60, 60.0 and "60" are seconds; "500ms", "60s", "2m", "1h" name their own unit.

    Raises `ValueError` for anything else, negative text included.
    """
    number, unit = _measure(value)
    if (unit.lower() or "s") not in _SECONDS:
        raise ValueError(f"{unit!r} is not a unit of time")
    factor, divisor = _SECONDS[unit.lower() or "s"]
    return number * factor / divisor


def _measure(value: object) -> tuple[float, str]:
    """A number and its unit, which may be empty."""
    unit = ""
    if isinstance(value, str) and (match := _MEASURE.fullmatch(value.strip())):
        number, unit = float(match[1]), match[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf  # a larger int would raise OverflowError
    else:
        raise ValueError(f"{value!r} is not a number")
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number, unit


def format_bytes(size_bytes: float) -> str:
    """A readable size: `512 B`, `64.0 KiB`, `0.63 GiB`. From 0.1 GiB on the unit is GiB."""
    if size_bytes >= 1 << 40:
        return f"{size_bytes / (1 << 40):.2f} TiB"
    if size_bytes >= GIB / 10:
        return f"{size_bytes / GIB:.2f} GiB"
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_rate(size_bytes: float, seconds: float) -> str:
    """A readable throughput, always in GiB/s: `15.3 GiB/s`, `0.0421 GiB/s`; `- GiB/s` if no time has passed."""
    if seconds <= 0:
        return "- GiB/s"
    rate = size_bytes / seconds / GIB
    return f"{rate:.1f} GiB/s" if rate >= 10 else f"{rate:.3g} GiB/s"


def format_duration(seconds: float) -> str:
    """A readable duration: `85 us`, `41.2 ms`, `1.53 s`, `2 m 5 s`, `3 h 10 m`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} m"
