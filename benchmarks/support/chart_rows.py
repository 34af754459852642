"""The series that several charts share, and bars of rows."""

from __future__ import annotations

from benchmarks.support.bar_chart import Bar, Series
from benchmarks.support.rows import Report, Row

LMKV = Series("lmkv", "#2f8f6b")
VLLM = Series("vLLM OffloadingConnector", "#3b78c2")
NIXL = Series("vLLM NixlConnector", "#3b78c2")
LMCACHE = Series("LMCache", "#d1781f")
ALONE = Series("engine without a connector", "#9aa3ad")
SECOND = Series("lmkv, second value", "#8b6fc8")


def by_name(report: Report) -> dict[str, Row]:
    """The rows of a report, by their names."""
    return {row.name: row for row in report.rows}


def bar_of(series: Series, row: Row) -> Bar:
    """A row's value."""
    return Bar(((series, row.value),))


def baseline_of(series: Series, row: Row) -> Bar:
    """The value of a row's baseline."""
    return Bar(((series, row.baseline_value or 0.0),))


def bar_with_limit(row: Row, series: Series = LMKV) -> Bar:
    """A row's value, with that of its baseline as limit."""
    return Bar(((series, row.value),), row.baseline_value)
