"""A picture of the time to the first token by turn of a chat, out of the rows of `multi_turn`. Made by `tables`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.support.rows import Report

SYSTEMS = {
    "alone": ("nothing kept: the engine alone", "#9aa3ad"),
    "lmkv": ("lmkv", "#2f8f6b"),
    "vllm_offload": ("vLLM's OffloadingConnector", "#3b78c2"),
    "lmcache": ("LMCache", "#d1781f"),
}
"""What each line is called, and its colour, which stands out on white and on black."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 330, 84, 20, 36, 64
TEXT = 'font-family="system-ui, sans-serif" font-size="13" fill="#7b8490"'
GRID_LINES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """From turns and milliseconds to places in the picture."""

    turn_count: int
    top_ms: int

    def x(self, turn: int) -> float:
        """How far to the right a turn is, the first being 1."""
        return LEFT + (WIDTH - RIGHT - LEFT) * (turn - 1) / max(1, self.turn_count - 1)

    def y(self, ms: float) -> float:
        """How far down a time is."""
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * ms / self.top_ms


def draw(report: Report) -> str:
    """The picture as SVG. Raises `KeyError` if the report has no turns."""
    lines = {name: turns for name in SYSTEMS if (turns := _turns(report, name))}
    if not lines:
        raise KeyError("..._turn_1_ms")
    scale = Scale(
        turn_count=max(len(turns) for turns in lines.values()),
        top_ms=_round_up(max(ms for turns in lines.values() for ms in turns)),
    )
    parts = [f'<text x="0" y="18" {TEXT}>{escape(_title(report))}</text>', *_grid(scale)]
    for name, turns in lines.items():
        parts += _line(scale, name, turns)
    body = "\n".join([*parts, *_legend(lines)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Time to the first token by turn of a chat">\n{body}\n</svg>\n'
    )


def _grid(scale: Scale) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for step in range(GRID_LINES + 1):
        ms = scale.top_ms * step / GRID_LINES
        y = scale.y(ms)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#7b849055"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" {TEXT}>{ms:,.0f} ms</text>'
    for turn in range(1, scale.turn_count + 1):
        yield f'<text x="{scale.x(turn):.1f}" y="{bottom + 18}" text-anchor="middle" {TEXT}>{turn}</text>'


def _line(scale: Scale, name: str, turns: Sequence[float]) -> Iterator[str]:
    words, colour = SYSTEMS[name]
    places = [(scale.x(turn), scale.y(ms)) for turn, ms in enumerate(turns, 1)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
    for turn, ((x, y), ms) in enumerate(zip(places, turns, strict=True), 1):
        title = f"<title>{escape(words)}, turn {turn}: {ms:,.0f} ms</title>"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>'


def _legend(names: Iterable[str]) -> Iterator[str]:
    x = float(LEFT)
    for words, colour in (SYSTEMS[name] for name in names):
        yield f'<rect x="{x:.0f}" y="{HEIGHT - 26}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17:.0f}" y="{HEIGHT - 15}" {TEXT}>{escape(words)}</text>'
        x += 34 + 6.7 * len(words)


def _turns(report: Report, name: str) -> list[float]:
    pattern = re.compile(rf"{name}_turn_\d+_ms")
    return [row.value for row in report.rows if pattern.fullmatch(row.name)]


def _title(report: Report) -> str:
    users, cache = report.settings["users"], report.settings["chats_in_cache"]
    return f"Time to the first token, by turn: {users} chats at a time, room for {cache} in the engine's own cache"


def _round_up(ms: float) -> int:
    """The next number whose grid lines are round ones."""
    unit: int = 10 ** (len(str(int(ms))) - 1)
    return next(unit * factor for factor in (1, 2, 4, 6, 8, 10) if unit * factor >= ms)
