"""The series that several charts share, and the bars and groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.support.bar_chart import Bar, Group, Series
from benchmarks.support.rows import Report, Row

LMKV = Series("lmkv", "#2f8f6b")
VLLM = Series("vLLM OffloadingConnector", "#3b78c2")
NIXL = Series("vLLM NixlConnector", "#3b78c2")
LMCACHE = Series("LMCache", "#d1781f")
ALONE = Series("engine without a connector", "#9aa3ad")
SECOND = Series("lmkv, second value", "#8b6fc8")


def by_name(report: Report) -> dict[str, Row]:
    return {row.name: row for row in report.rows}


def bar_of(series: Series, row: Row) -> Bar:
    """A row's value."""
    return Bar(((series, row.value),))


def baseline_of(series: Series, row: Row) -> Bar:
    """The value of a row's baseline."""
    return Bar(((series, row.baseline_value or 0.0),))


def bar_with_limit(series: Series, row: Row) -> Bar:
    """A row's value, with that of its baseline as limit."""
    return Bar(((series, row.value),), row.baseline_value)


def groups_of(
    rows: Mapping[str, Row],
    systems: Mapping[str, Series],
    labels: Mapping[str, str],
    *,
    bar: Callable[[Series, Row], Bar] = bar_of,
    skips_missing: bool = False,
) -> list[Group]:
    """A group for each label, with a bar for each system.

    `labels` are by the names of rows, with `*` for a key of `systems`. Raises `KeyError` if a row is missing; with
    `skips_missing` its bar is left out.
    """
    groups = []
    for pattern, label in labels.items():
        named = {pattern.replace("*", key): series for key, series in systems.items()}
        bars = (bar(series, rows[name]) for name, series in named.items() if name in rows or not skips_missing)
        groups.append(Group(label, tuple(bars)))
    return groups
