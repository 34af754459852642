"""The page at `/`: latencies, and how the engines are. It looks like the coordinator's, by the same style sheet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from html import escape
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import lmkv_server.http
from lmkv_server.proxy.routing.engines import Engine, Fleet
from lmkv_server.proxy.statistics import Statistics

OWN = Path(__file__).parent / "static"
SHARED = Path(lmkv_server.http.__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page loads nothing from elsewhere, runs no inline scripts, and nobody frames it."""
_NAMES = {
    "Prefill node TTFT": "Prefill",
    "TTFT": "Time to first token",
    "ITL": "Between tokens",
    "Total": "Whole answer",
}


def routes(fleet: Fleet, statistics: Statistics) -> list[Route]:
    """The page and what it is made of."""
    template = Template((OWN / "index.html").read_text(encoding="utf-8"))

    async def page(_: Request) -> Response:
        return Response(template.substitute(_parts(fleet, statistics)), media_type="text/html", headers=HEADERS)

    files = [SHARED / "page.css", SHARED / "theme.js", SHARED / "icon.svg", OWN / "proxy.js", OWN / "proxy.css"]
    return [Route("/", page), *(Route(f"/static/{file.name}", _file(file)) for file in files)]


def _parts(fleet: Fleet, statistics: Statistics) -> dict[str, str]:
    missing = fleet.missing()
    return {
        "state": "lost" if missing else "live",
        "state_text": "No engine can answer" if missing else "Serving",
        "request_count": f"{statistics.request_count:,}",
        "in_flight_count": str(sum(engine.in_flight_count for engine in fleet.engines)),
        "healthy_count": f"{sum(engine.is_healthy for engine in fleet.engines)} of {len(fleet.engines)}",
        "latencies": "".join(_latencies(statistics)) or '<tr><td colspan="4" class="muted">No request yet.</td></tr>',
        "engines": "".join(map(_engine, fleet.engines)),
    }


def _latencies(statistics: Statistics) -> Iterator[str]:
    for kind, summary in statistics.summaries().items():
        cells = "".join(f"<td>{value:,.1f}</td>" for value in (summary.average_ms, summary.median_ms, summary.p99_ms))
        yield f'<tr><th scope="row">{_NAMES[kind]}</th>{cells}</tr>'


def _engine(engine: Engine) -> str:
    state = "live" if engine.is_healthy else "lost"
    models = ", ".join(model.name for model in engine.models)
    about = " · ".join(filter(None, (models, engine.instance_id))) if engine.is_healthy else engine.trouble
    return (
        f'<li class="line"><span class="reports" data-state="{state}"><span class="dot"></span>'
        f'<span class="kind">{escape(engine.role)}</span></span>'
        f'<h3 class="address">{escape(engine.url)}</h3><span class="muted">{escape(about)}</span>'
        f'<span class="number">{engine.in_flight_count} in flight</span></li>'
    )


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return FileResponse(path, headers=HEADERS)

    return serve
