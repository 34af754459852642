"""Draws horizontal bar charts as SVG, readable on light and dark pages and on phones. `charts` says what they show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.support.rows import number

WIDTH, BAR, LINE, GAP = 560, 16, 20, 10
GLYPH_WIDTH = 7.8
"""Average width of a character of the text."""
TEXT = 'font-family="system-ui, sans-serif" font-size="14" fill="#7b8490"'
LIMIT_COLOUR = "#7b8490"


@dataclass(frozen=True, slots=True)
class Series:
    """What all bars, or parts of bars, of one colour show. The colour has contrast on white and on black."""

    name: str
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The parts of one bar, from left to right, and the value of the limit to mark, if there is one."""

    parts: tuple[tuple[Series, float], ...]
    limit: float | None = None

    @property
    def value(self) -> float:
        """The sum of the parts."""
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under one label."""

    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Groups of bars on one scale that starts at zero."""

    title: str
    unit: str
    groups: Sequence[Group]
    limit: str = ""
    """Name of what `Bar.limit` marks, for the legend."""

    @property
    def bars(self) -> list[Bar]:
        """The bars of all groups."""
        return [bar for group in self.groups for bar in group.bars]


def draw(chart: Chart) -> str:
    """The chart as SVG. Raises `KeyError` if it has no bar above zero."""
    longest = max((max(bar.value, bar.limit or 0.0) for bar in chart.bars), default=0.0)
    if not longest:
        raise KeyError(f"nothing to draw: {chart.title}")
    scale = (WIDTH - 16 - GLYPH_WIDTH * max(len(_value(bar, chart)) for bar in chart.bars)) / longest
    parts = [f'<text x="0" y="15" {TEXT} font-weight="600">{escape(chart.title)}</text>']
    y = float(LINE + GAP)
    for group in chart.groups:
        parts.append(f'<text x="0" y="{y + 14:.0f}" {TEXT}>{escape(group.label)}</text>')
        y += LINE
        for bar in group.bars:
            parts += _bar(bar, y, scale, chart)
            y += BAR + 3
        y += GAP
    legend = list(_legend(chart, y))
    height = y + LINE * (len({line for line, _ in legend})) + 4
    body = "\n".join([*parts, *(text for _, text in legend)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(chart.title)}">\n{body}\n</svg>\n'
    )


def _bar(bar: Bar, y: float, scale: float, chart: Chart) -> Iterator[str]:
    x = 0.0
    for series, value in bar.parts:
        width = max(value * scale, 1.0)
        title = f"<title>{escape(series.name)}: {number(value)} {escape(chart.unit)}</title>"
        yield f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" fill="{series.colour}">{title}</rect>'
        x += width
    if bar.limit is not None:
        at = bar.limit * scale
        yield f'<rect x="{at - 1:.1f}" y="{y - 2:.0f}" width="3" height="{BAR + 4}" fill="{LIMIT_COLOUR}"/>'
        x = max(x, at + 2)
    yield f'<text x="{x + 6:.1f}" y="{y + 13:.0f}" {TEXT}>{escape(_value(bar, chart))}</text>'


def _value(bar: Bar, chart: Chart) -> str:
    limit = "" if bar.limit is None else f" of {number(bar.limit)}"
    return f"{number(bar.value)}{limit} {chart.unit}"


def _legend(chart: Chart, top: float) -> Iterator[tuple[int, str]]:
    """Each entry with the number of its line. A chart of one series and no limit needs none."""
    series = list(dict.fromkeys(series for bar in chart.bars for series, _ in bar.parts))
    entries = [(one.name, one.colour, 12) for one in series]
    entries += [(chart.limit, LIMIT_COLOUR, 3)] if chart.limit else []
    x, line = 0.0, 0
    for name, colour, width in entries if len(entries) > 1 else []:
        if x and x + 18 + GLYPH_WIDTH * len(name) > WIDTH:
            x, line = 0.0, line + 1
        y = top + LINE * line
        yield line, f'<rect x="{x:.0f}" y="{y + 2:.0f}" width="{width}" height="12" fill="{colour}"/>'
        yield line, f'<text x="{x + 18:.0f}" y="{y + 13:.0f}" {TEXT}>{escape(name)}</text>'
        x += 34 + GLYPH_WIDTH * len(name)
