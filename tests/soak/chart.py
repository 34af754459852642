"""Draws series over time as SVG: one panel of lines for each quantity, all on one time scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tests.soak.slope import Point

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 140, 70, 24, 44
COLOURS = ("#2a78d6", "#c2571a", "#1f8a5b", "#8b5cc7", "#b0365f", "#6b7280", "#8a7a1f")
TEXT = 'font-family="system-ui, sans-serif" font-size="12" fill="#7b8490"'
MAX_POINTS = 400
"""Drawn of each line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Lines of one quantity, by name, on a scale that begins at zero."""

    title: str
    lines: Mapping[str, Sequence[Point]]


def draw(panels: Sequence[Panel]) -> str:
    """The panels, one below the other."""
    seconds = max((at for panel in panels for line in panel.lines.values() for at, _ in line), default=1.0) or 1.0
    parts: list[str] = []
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (HEIGHT + GAP), seconds)
    height = TOP + len(panels) * (HEIGHT + GAP)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="resources and latencies over time">\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, top: float, seconds: float) -> Iterator[str]:
    most = max((value for line in panel.lines.values() for _, value in line), default=1.0) or 1.0
    bottom, across = top + HEIGHT, WIDTH - LEFT - 8
    yield f'<text x="{LEFT}" y="{top - 8}" {TEXT} font-weight="600">{escape(panel.title)}</text>'
    yield f'<path d="M{LEFT} {top}V{bottom}H{WIDTH - 8}" fill="none" stroke="#7b8490"/>'
    yield f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end" {TEXT}>{most:.4g}</text>'
    yield f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end" {TEXT}>0</text>'
    yield f'<text x="{WIDTH - 8}" y="{bottom + 14}" text-anchor="end" {TEXT}>{seconds / 60:.3g} min</text>'
    x = float(LEFT)
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        shown = line[:: max(len(line) // MAX_POINTS, 1)]
        points = " ".join(
            f"{LEFT + across * at / seconds:.1f},{bottom - HEIGHT * value / most:.1f}" for at, value in shown
        )
        yield f'<polyline points="{points}" fill="none" stroke="{colour}"/>'
        yield f'<text x="{x:.0f}" y="{bottom + 14}" {TEXT.replace("#7b8490", colour)}>{escape(name)}</text>'
        x += 12 + 7.2 * len(name)
