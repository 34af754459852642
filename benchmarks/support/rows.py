"""Results of a benchmark: rows and the report, as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number, and what it was measured against, if anything. Raises `ValueError` if a number is not finite."""

    name: str
    value: float
    unit: str
    baseline: str | None = None
    """What was measured beside it, in the same run."""
    baseline_value: float | None = None
    """What that gave, in the row's unit unless `baseline` names another."""
    ratio: float | None = None
    """How the two compare; the measured thing is on top."""

    def __post_init__(self) -> None:
        numbers = [self.value, self.baseline_value, self.ratio]
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"{self.name}: {numbers} are not all finite")
        if (self.baseline is None) != (self.baseline_value is None):
            raise ValueError(f"{self.name}: a baseline has a name and a value, or there is none")

    def to_json(self) -> dict[str, Any]:
        """The row as it is written."""
        return {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def compare(name: str, value: float, unit: str, baseline: str, baseline_value: float) -> Row:
    """A row whose ratio is its value over the baseline's."""
    ratio = value / baseline_value
    return Row(name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio)


@dataclass(kw_only=True, slots=True)
class Report:
    """A run of a benchmark: where and how it was made, and its rows in order."""

    benchmark: str
    command: str
    quick: bool
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a reader must know besides the numbers: what was left out, and why."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Adds a row. Raises `ValueError` if there is one of that name."""
        if any(row.name == other.name for other in self.rows):
            raise ValueError(f"there are two rows called {row.name}")
        self.rows.append(row)

    def to_json(self) -> dict[str, Any]:
        """The report as it is written; everything that is not a row comes first."""
        head = {
            name: getattr(self, name)
            for name in ("benchmark", "command", "quick", "seconds", "machine", "settings", "notes")
        }
        return head | {"seconds": round(self.seconds, 1), "rows": [row.to_json() for row in self.rows]}

    def write(self, file: Path) -> None:
        """Writes the JSON."""
        file.write_text(json.dumps(self.to_json(), indent=2) + "\n")


def read_report(file: Path) -> Report:
    """The report in a file. Raises `ValueError` if it is none."""
    try:
        content = json.loads(file.read_text())
        rows = [Row(**row) for row in content.pop("rows")]
        return Report(**content, rows=rows)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no report: {error}") from None


def make_table(title: str, rows: Iterable[Row]) -> Table:
    """Rows for a terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", no_wrap=True)
    for heading in ("value", "unit"):
        table.add_column(heading, justify="right" if heading == "value" else "left", no_wrap=True)
    table.add_column("baseline")
    for heading in ("its value", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown_table(rows: Sequence[Row], meanings: Mapping[str, str]) -> str:
    """Rows as a Markdown table of four columns, which phones show too; `meanings` describes each row by its name.

    Without any baseline and ratio there are two columns.
    """
    width = 4 if any(row.baseline or row.ratio is not None for row in rows) else 2
    lines = [["row", "value", "baseline", "ratio"], ["---", "---:", "---", "---:"]]
    for row in rows:
        name, value, unit, baseline, baseline_value, ratio = cells(row)
        against = f"{baseline}: {baseline_value}" if baseline else ""
        lines.append([f"{meanings[row.name]}<br>`{name}`", f"{value} {unit}", against, ratio])
    return "\n".join(_markdown_line(line[:width]) for line in lines)


def _markdown_line(columns: Sequence[str]) -> str:
    if columns[0] == "---":
        return f"|{'|'.join(columns)}|"
    return f"| {' | '.join(columns)} |"


def cells(row: Row) -> list[str]:
    """A row's fields for people; nothing where there is nothing."""
    return [
        row.name,
        number(row.value),
        row.unit,
        row.baseline or "",
        number(row.baseline_value),
        number(row.ratio),
    ]


def number(value: float | None) -> str:
    """A number for people: three digits that count, and never an exponent."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def rounded(value: float) -> float:
    """The number with as many digits as it deserves."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
