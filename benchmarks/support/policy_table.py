"""Hit rates of eviction policies as one table: a line for each trace and pool, a column for each policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from benchmarks.support.meanings import word
from benchmarks.support.rows import Report, Row

POLICIES = ("learned", "lru", "arc", "s3_fifo", "two_queues", "sieve", "gdsf", "opt")
BASELINE = "lru"
BOUND = "opt"
"""Belady's policy, which no other can exceed."""
_CELL = re.compile(rf"(?P<trace>[a-z_]+)_(?P<pool>\d+[km])_(?P<policy>{'|'.join(POLICIES)})")


def hit_rates(rows: Iterable[Row]) -> Mapping[tuple[str, str], Mapping[str, float]]:
    """Percent of tokens by trace and pool, then by policy."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if match := _CELL.fullmatch(row.name):
            cell = found.setdefault((match["trace"], match["pool"]), {BASELINE: row.baseline_value or 0.0})
            cell[match["policy"]] = row.value
    return found


def render(report: Report) -> str:
    """The table in Markdown; the best policy of a line is bold. Raises `ValueError` if a policy is missing."""
    lines = [f"| trace | {' | '.join(map(word, POLICIES))} |", f"|---|{'---:|' * len(POLICIES)}"]
    for (trace, pool), rates in hit_rates(report.rows).items():
        if missing := set(POLICIES) - set(rates):
            raise ValueError(f"{report.benchmark} has no row {trace}_{pool}_{missing.pop()}")
        best = max(round(rate, 1) for policy, rate in rates.items() if policy != BOUND)
        values = [f"{rates[policy]:.1f}" for policy in POLICIES]
        cells = [
            f"**{value}**" if policy != BOUND and float(value) == best else value
            for policy, value in zip(POLICIES, values, strict=True)
        ]
        lines.append(f"| {word(trace)}, {word(pool)} | {' | '.join(cells)} |")
    return "\n".join(lines)
