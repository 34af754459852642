"""A picture of what each step contributes to a TTFT, out of the rows of `data_path`. Made by `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from benchmarks.support.rows import Report

KINDS = {"prefix": "vLLM's own prefix cache", "own": "lmkv: the own pool", "peer": "lmkv: a peer's pool"}
STEPS = {
    "lookup": ("lookup", "#8b6fc8"),
    "fetch": ("fetch from the peer, verified", "#d1781f"),
    "load": ("pool to pages", "#2f8f6b"),
    "compute": ("last tokens computed", "#3b78c2"),
    "rest": ("HTTP, tokens, vLLM's loop", "#9aa3ad"),
}
"""What each step is called, and its colour, which stands out on white and on black."""
WIDTH, LEFT, BAR, GAP = 800, 190, 26, 14
TEXT = 'font-family="system-ui, sans-serif" font-size="13" fill="#7b8490"'


def draw(report: Report) -> str:
    """The picture as SVG. Raises `KeyError` if the report has no steps."""
    values = {row.name: row.value for row in report.rows}
    bars = {kind: _steps(values, kind) for kind in KINDS}
    cold_ms = values["ttft_cold_ms_4000"]
    scale = (WIDTH - LEFT - 90) / max(sum(steps.values()) for steps in bars.values())
    parts, y = [], 34
    parts.append(f'<text x="0" y="18" {TEXT}>{escape(_title(cold_ms))}</text>')
    for kind, steps in bars.items():
        parts.append(f'<text x="0" y="{y + 18}" {TEXT}>{escape(KINDS[kind])}</text>')
        x = float(LEFT)
        for step, ms in steps.items():
            name, colour = STEPS[step]
            title = f"<title>{escape(name)}: {ms:.1f} ms</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{BAR}" fill="{colour}">{title}</rect>'
            )
            x += ms * scale
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 18}" {TEXT}>{sum(steps.values()):.0f} ms</text>')
        y += BAR + GAP
    x = 0.0
    for name, colour in STEPS.values():
        parts.append(f'<rect x="{x:.0f}" y="{y + 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{y + 17}" {TEXT}>{escape(name)}</text>')
        x += 30 + 6.7 * len(name)
    height = y + 26
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="Steps of the time to the first token">\n{body}\n</svg>\n'
    )


def _title(cold_ms: float) -> str:
    return f"Time to the first token of 4,000 tokens, by step; computed cold it takes {cold_ms:,.0f} ms"


def _steps(values: Mapping[str, float], kind: str) -> dict[str, float]:
    steps = {step: values.get(f"step_{kind}_{step}_ms", 0.0) for step in STEPS}
    if not any(steps.values()):
        raise KeyError(f"step_{kind}_...")
    return {step: ms for step, ms in steps.items() if ms}
