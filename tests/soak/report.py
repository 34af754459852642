"""What a soak run has measured, what rises, and both as a file and as a picture."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.chart import Panel, draw
from tests.soak.latencies import HOST, QUANTILES
from tests.soak.resources import Usage
from tests.soak.slope import Point, medians, rises, slope_of

WARM_UP_FRACTION = 0.25
"""Of the run: pools and tables fill, allocators reach their size."""
RELATIVE_BOUND = 0.01
"""Of the level, per hour."""
LATENCY_BOUND = 0.05
"""Likewise: medians of an hour repeat within this on a host with nothing else to do."""
LEAST_BOUNDS = {"memory_bytes": float(1 << 20), "fds": 1.0, "threads": 1.0, "tasks": 1.0}
"""Per hour, where a hundredth of the level is less."""


@dataclass(kw_only=True, slots=True)
class Sample:
    """One look at everything."""

    seconds: float
    """Since the load began."""
    usage: Mapping[str, Usage]
    """By process."""
    latencies: Mapping[str, Mapping[str, float]]
    """In milliseconds, by what was measured and quantile, with the count; since the sample before."""


@dataclass(kw_only=True, slots=True)
class Trend:
    """One series and its verdict."""

    name: str
    bound_per_hour: float
    points: Sequence[Point]
    """After the warm-up."""
    control: Sequence[Point] = ()
    """What the host took meanwhile; a latency rises only if it also rises in proportion to this."""
    level: float = 0.0
    per_hour: float = 0.0
    lower_per_hour: float = -math.inf
    """See `Slope`."""
    has_risen: bool = False

    def judge(self) -> None:
        """Sets the slope and the verdict."""
        grouped = medians(self.points)
        if len(grouped) > 1:
            slope = slope_of(grouped)
            self.level, self.per_hour, self.lower_per_hour = slope.level, slope.per_hour, slope.lower_per_hour
        self.has_risen = rises(self.points, self.bound_per_hour)
        if self.has_risen and self.control:
            host = dict(self.control)
            ratios = [(at, value / host[at]) for at, value in self.points if host.get(at)]
            middle = slope_of(medians(ratios)).level if len(ratios) > 1 else 0.0
            self.has_risen = rises(ratios, LATENCY_BOUND * middle)

    def __str__(self) -> str:
        verdict = "RISES" if self.has_risen else "level"
        return (
            f"{verdict}  {self.name:38} level {self.level:14,.1f}  per hour {self.per_hour:+14,.2f} "
            f"(at least {self.lower_per_hour:+,.2f}, bound {self.bound_per_hour:,.2f})"
        )


@dataclass(kw_only=True)
class Report:
    """All samples of a run."""

    run: str
    """The variables that repeat it."""
    seconds: float
    """Of load."""
    samples: list[Sample] = field(default_factory=list)

    def trends(self) -> list[Trend]:
        """Every series after the warm-up, judged."""
        warm = [sample for sample in self.samples if sample.seconds >= WARM_UP_FRACTION * self.seconds]
        found = []
        for (process, quantity), points in _usages(warm).items():
            level = medians(points, 1)[0][1]
            bound = max(RELATIVE_BOUND * level, LEAST_BOUNDS[quantity])
            found.append(Trend(name=f"{process} {quantity}", bound_per_hour=bound, points=points))
        latencies = _latencies(warm)
        for (what, rank), points in latencies.items():
            bound = LATENCY_BOUND * medians(points, 1)[0][1]
            control = () if what == HOST else latencies.get((HOST, rank), ())
            if what != HOST:
                found.append(Trend(name=f"{what} {rank}_ms", bound_per_hour=bound, points=points, control=control))
        for trend in found:
            trend.judge()
        return found

    def write(self, folder: Path, trends: Sequence[Trend]) -> None:
        """Writes `soak.json` and `soak.svg`."""
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "run": self.run,
            "seconds": self.seconds,
            "trends": [
                {
                    **{key: value for key, value in asdict(trend).items() if key not in ("points", "control")},
                    "lower_per_hour": trend.lower_per_hour if math.isfinite(trend.lower_per_hour) else None,
                }
                for trend in trends
            ],
            "samples": [asdict(sample) for sample in self.samples],
        }
        (folder / "soak.json").write_text(json.dumps(content, indent=1, allow_nan=False))
        (folder / "soak.svg").write_text(draw(self.panels()))

    def panels(self) -> list[Panel]:
        """One of each quantity with a line per process, one of each latency with a line per quantile."""
        panels: defaultdict[str, dict[str, list[Point]]] = defaultdict(dict)
        for (process, quantity), points in _usages(self.samples).items():
            scale = 1 / (1 << 20) if quantity == "memory_bytes" else 1.0
            title = "memory (MiB)" if quantity == "memory_bytes" else quantity
            panels[title][process] = [(at, scale * value) for at, value in points]
        for (what, rank), points in _latencies(self.samples).items():
            panels[f"{what} (ms)"][rank] = points
        return [Panel(title=title, lines=lines) for title, lines in panels.items()]


def _usages(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Point]]:
    series: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    for sample in samples:
        for process, usage in sample.usage.items():
            for quantity, value in usage.values().items():
                series[process, quantity].append((sample.seconds, float(value)))
    return dict(series)


def _latencies(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Point]]:
    series: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    for sample in samples:
        for what, values in sample.latencies.items():
            for rank in QUANTILES:
                series[what, rank].append((sample.seconds, values[rank]))
    return dict(series)
