"""The page at `/`: latencies, and the state of engines. Shares the style sheet of the coordinator's page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from html import escape
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import lmkv_server.http
from lmkv_server.proxy.engine import Engine, PrefixHits
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.statistics import LatencyStatistics, summarize

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
"""The page loads nothing from other sites, runs no inline scripts, and cannot be framed."""
_NAMES = {
    "Prefill node TTFT": "Prefill",
    "TTFT": "Time to first token",
    "ITL": "Inter-token latency",
    "Total": "Total",
}


def routes(pools: EnginePools, metrics: ProxyMetrics) -> list[Route]:
    """The routes of the page and of its files."""
    template = Template((OWN / "index.html").read_text(encoding="utf-8"))

    async def page(_: Request) -> Response:
        return Response(template.substitute(_fields(pools, metrics.latencies)), media_type="text/html", headers=HEADERS)

    files = [SHARED / "page.css", SHARED / "theme.js", SHARED / "icon.svg", OWN / "proxy.js", OWN / "proxy.css"]
    return [Route("/", page), *(Route(f"/static/{file.name}", _file(file)) for file in files)]


def _fields(pools: EnginePools, statistics: LatencyStatistics) -> dict[str, str]:
    unavailable = pools.unavailable_reason()
    return {
        "state": "lost" if unavailable else "live",
        "state_text": "No engine available" if unavailable else "Serving",
        "request_count": f"{statistics.request_count:,}",
        "in_flight_count": str(sum(engine.in_flight_count for engine in pools.engines)),
        "healthy_count": f"{sum(engine.is_healthy for engine in pools.engines)} of {len(pools.engines)}",
        "latencies": "".join(_latencies(statistics)) or '<tr><td colspan="4" class="muted">No request yet.</td></tr>',
        "engines": "".join(map(_engine, pools.engines)),
    }


def _latencies(statistics: LatencyStatistics) -> Iterator[str]:
    for kind, summary in statistics.summaries().items():
        cells = "".join(f"<td>{value:,.1f}</td>" for value in (summary.average_ms, summary.median_ms, summary.p99_ms))
        yield f'<tr><th scope="row">{_NAMES[kind]}</th>{cells}</tr>'


def _engine(engine: Engine) -> str:
    state, text = ("live", "healthy") if engine.is_healthy else ("lost", "unhealthy")
    if engine.is_draining and engine.is_healthy:
        state, text = "rebuilding", "draining"
    failure = "" if engine.is_healthy else f'<p class="failure">{escape(engine.failure)}</p>'
    served = " · ".join(filter(None, (", ".join(model.name for model in engine.models), engine.instance_id)))
    latency = summarize(engine.first_token_seconds) if engine.first_token_seconds else None
    median, p99 = (f"{latency.median_ms:,.1f}", f"{latency.p99_ms:,.1f}") if latency else ("–", "–")
    cells = (
        f'<td><span class="reports" data-state="{state}"><span class="dot"></span>'
        f'<span class="word">{text}</span></span></td>'
        f"<td data-minor>{escape(engine.role)}</td><td data-minor>{escape(served)}</td>"
        f'<td class="number">{_hits(engine.hits if engine.is_healthy else None)}</td><td class="number">{median}</td>'
        f'<td class="number" data-minor>{p99}</td><td class="number">{engine.in_flight_count}</td>'
    )
    return f'<tr><th scope="row">{_address(engine.url)}{failure}</th>{cells}</tr>'


def _address(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return (
        f'<span class="address" title="{escape(url)}">'
        f"<span data-minor>{escape(scheme + separator)}</span>{escape(rest)}</span>"
    )


def _hits(hits: PrefixHits | None) -> str:
    if hits is None or not hits.asked_tokens:
        return "–"
    own, loaded = (100 * tokens / hits.asked_tokens for tokens in (hits.own_tokens, hits.external_tokens))
    title = f"{own:.0f} % in its own prefix cache, {loaded:.0f} % loaded, of {hits.asked_tokens:,.0f} tokens"
    return f'<span title="{title}">{own + loaded:.0f} %</span>'


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return FileResponse(path, headers=HEADERS)

    return serve
