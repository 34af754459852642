"""Writes the committed results into the pages that show them, and draws the charts: `python -m benchmarks.tables`.

A page marks the place of a table by a pair of comments; this program writes what is between them:

    <!-- benchmark data_path -->                       all rows, and the report's notes
    <!-- benchmark data_path: peer_ttft_ratio ... -->  these rows
    <!-- benchmark rivals by lmkv lmcache: *_cold_ms_4097 ... -->
                                                   a line for each name, a column for each of these in place of `*`
    <!-- benchmark eviction as matrix -->              a column for each policy of eviction
    <!-- end of benchmark -->

Below its first table of a benchmark a page has the command and the machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.support import bar_chart, column_table, policy_table
from benchmarks.support.charts import CHARTS
from benchmarks.support.meanings import meaning_of
from benchmarks.support.rows import Report, markdown_table, read_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PICTURES = {ROOT / "docs" / "images" / f"{name}.svg": name for name in CHARTS}
"""By file: the name of the chart that it shows."""

USUAL_SIZE = (2, 24)
"""Cores and GB of memory of a machine that the pages do not describe."""

_PLACE = re.compile(
    r"(?P<open><!-- benchmark (?P<name>[a-z_]+?)"
    r"(?: as (?P<layout>matrix)|(?: by (?P<columns>[a-z0-9_ ]+?))?: (?P<rows>[a-z0-9_*\- ]+?))? -->\n)"
    r".*?(?P<close><!-- end of benchmark -->)",
    re.DOTALL,
)


def fill(page: str, results: Path = RESULTS) -> str:
    """The page with its tables as the results say. Raises `ValueError` if a result or a row is missing."""

    named: set[str] = set()

    def table(place: re.Match[str]) -> str:
        file = results / f"{place['name']}.json"
        if not file.exists():
            raise ValueError(f"there is no {file.name}; make it with: {make_command(place['name'])}")
        report = read_report(file)
        names = place["rows"].split() if place["rows"] else []
        if place["columns"]:
            body = column_table.render(report, place["columns"].split(), names)
        else:
            body = policy_table.render(report) if place["layout"] else render(report, names)
        text = body if report.benchmark in named else f"{body}\n\n{origin(report)}"
        if not place["layout"] and not names and report.notes:
            text = "\n\n".join([text, *(f"- {note}" for note in report.notes)])
        named.add(report.benchmark)
        return f"{place['open']}\n{text}\n\n{place['close']}"

    return _PLACE.sub(table, page)


def draw(file: Path, results: Path = RESULTS) -> str:
    """One of the pictures, as the results say. Raises `ValueError` if a row is missing."""
    name, make_chart = CHARTS[PICTURES[file]]
    try:
        return bar_chart.draw(make_chart(read_report(results / f"{name}.json")))
    except KeyError as missing:
        raise ValueError(f"{name} has no row {missing}") from None


def render(report: Report, names: list[str]) -> str:
    """The rows of these names, or all of them. Raises `ValueError` if one is missing."""
    rows = {row.name: row for row in report.rows}
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"{report.benchmark} has no row {', '.join(missing)}")
    chosen = [rows[name] for name in names] if names else report.rows
    meanings = {row.name: meaning_of(row.name, report.benchmark) for row in chosen}
    return markdown_table(chosen, meanings)


def origin(report: Report) -> str:
    """A sentence about command and machine; docs/performance/benchmarks.md has what is equal for all."""
    machine, settings = report.machine, report.settings
    command = re.sub(r" --json \S+", "", report.command)
    size = (machine["cores"], round(machine["memory_gb"]))
    loads = [machine[name] for name in ("load_average", "load_average_at_end") if name in machine]
    engine = f"SGLang {settings['sglang']}" if "sglang" in settings else f"vLLM {machine['vllm']}"
    facts = [
        f"`{command}`",
        f"{report.seconds:.0f} s",
        *([settings["gpu"]] if "gpu" in settings else []),
        _short_cpu(machine["cpu"]),
        *([f"{size[0]} cores", f"{size[1]} GB"] if size != USUAL_SIZE else []),
        *([f"load {loads[0]} to {loads[-1]}"] if loads else []),
        *([engine] if {"sglang", "dtype"} & settings.keys() else []),
        *([settings["dtype"]] if "dtype" in settings else []),
    ]
    return f"{', '.join(facts)}."


def _short_cpu(cpu: str) -> str:
    """The name without marks, and family and model in short: `AMD EPYC (25/1)`."""
    name = re.sub(r"\(R\)|\(TM\)| Processor| CPU", "", cpu)
    return re.sub(r"\(family (\d+), model (\d+)\)", r"(\1/\2)", name)


def make_command(name: str) -> str:
    """What makes a result."""
    return f"python -m benchmarks.{name} --json benchmarks/results/{name}.json"


def main(arguments: list[str] | None = None) -> int:
    """Fills all pages. Returns 1 if a page was to be checked and is not up to date, or cannot be filled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="Puts results into the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is not up to date")
    args = parser.parse_args(arguments)
    stale = 0
    for file in (*PAGES, *PICTURES):
        page = file.read_text() if file.exists() else ""
        try:
            filled = draw(file) if file in PICTURES else fill(page)
        except ValueError as error:
            print(f"{file.name}: {error}", file=sys.stderr)
            return 1
        if filled == page:
            continue
        stale += 1
        if args.check:
            print(f"{file.name} is not up to date; run: python -m benchmarks.tables", file=sys.stderr)
        else:
            file.write_text(filled)
            print(f"{file.name} is up to date")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
