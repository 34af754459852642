"""Rows of a report that differ in one part of their names as one table: a column for each of these parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.support.meanings import meaning_of, words_of
from benchmarks.support.rows import Report, Row, number

_VERSUS = re.compile(r"_vs_\*(_\d+)?$")
"""Ends names of rows whose columns are baselines."""


def render(report: Report, columns: Sequence[str], names: Sequence[str]) -> str:
    """The table in Markdown; a cell has the value, and the ratio in parentheses if the row has one.

    A name has `*` in the place of the column, and may lack `_vs_` with what follows. `name-column` leaves a cell empty.
    Of `..._vs_*` the columns are baselines: the first cell has the value, the others the baselines' values and ratios.
    Raises `ValueError` if a row is missing, or rows of one line differ in their unit or in the first cell's value.
    """
    versus = {bool(_VERSUS.search(name.partition("-")[0])) for name in names}
    if len(versus) > 1:
        raise ValueError(f"{report.benchmark}: columns are baselines of some rows only")
    lines = [_line(report, columns, name, is_versus=versus == {True}) for name in names]
    headings = [*(["lmkv"] if versus == {True} else []), *(words_of(column, report.benchmark) for column in columns)]
    return "\n".join([f"| row | {' | '.join(headings)} |", f"|---|{'---:|' * len(headings)}", *lines])


def _line(report: Report, columns: Sequence[str], name: str, *, is_versus: bool) -> str:
    pattern, *empty = name.split("-")
    rows = {column: _find(report, pattern.replace("*", column)) for column in columns if column not in empty}
    facts = {(row.unit, row.value if is_versus else None) for row in rows.values()}
    meanings = {_without(meaning_of(row.name, report.benchmark), column, report) for column, row in rows.items()}
    if len(facts) != 1 or len(meanings) != 1:
        raise ValueError(f"{pattern} of {report.benchmark} has different units, values or meanings: {facts} {meanings}")
    ((unit, value),) = facts
    cells = [number(value)] if is_versus else []
    cells += [_cell(rows[column], is_versus=is_versus) if column in rows else "" for column in columns]
    return f"| {meanings.pop()} ({unit})<br>`{pattern}` | {' | '.join(cells)} |"


def _find(report: Report, name: str) -> Row:
    for row in report.rows:
        if row.name == name or row.name.startswith(f"{name}_vs_"):
            return row
    raise ValueError(f"{report.benchmark} has no row {name}")


def _without(meaning: str, column: str, report: Report) -> str:
    """The meaning of a row without that of its column."""
    words = re.escape(words_of(column, report.benchmark))
    return re.sub(rf"^{words}: |; {words}$|(?: by| of| of a hit in| in| from|,) {words}(?=[,;]|$)", "", meaning)


def _cell(row: Row, *, is_versus: bool) -> str:
    value = number(row.baseline_value if is_versus else row.value)
    return value if row.ratio is None else f"{value} ({number(row.ratio)})"
