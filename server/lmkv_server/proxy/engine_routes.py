"""HTTP routes for operators: the page at `/`, and lists and changes of engines. Their handlers only translate."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import lmkv_server.http
from lmkv.errors import BadRequest, Conflict, EngineNotFound, LmkvError
from lmkv_server.proxy.engine import Engine, PrefixHits
from lmkv_server.proxy.engines import Endpoints, read_endpoint, read_url
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import error_body
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.statistics import LatencyStatistics, summarize

PATH = "/engines"
MAX_BODY_BYTES = 64 << 10
_STATUSES: dict[type[LmkvError], int] = {BadRequest: 400, EngineNotFound: 404, Conflict: 409}


def list_route(pools: EnginePools) -> Route:
    """`GET /engines`: the engines and their state."""

    async def list_engines(_: Request) -> Response:
        return _json({"engines": [_state(engine) for engine in pools.engines]})

    return Route(PATH, list_engines, methods=["GET"])


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class _HeldPrompt(msgspec.Struct, forbid_unknown_fields=True):
    token_count: Count
    held: Mapping[str, Count] = {}


def explain_route(pools: EnginePools) -> Route:
    """`POST /engines/explain`: what a prompt would cost at each engine by `kv_aware`, and the last copies.

    The body has the number of its tokens, and how many of them each instance holds.
    """
    pool = pools.prefill or pools.decode

    async def explain(request: Request) -> Response:
        try:
            asked = msgspec.convert(await _body(request), _HeldPrompt)
        except (BadRequest, msgspec.ValidationError) as error:
            return _error(400, str(error))
        found, chosen = pool.expectations(time.monotonic(), asked.held, asked.token_count)
        engines = [
            {
                "url": engine.url,
                "instance_id": engine.instance_id,
                "held_token_count": min(asked.token_count, asked.held.get(engine.instance_id, 0)),
                "tokens_per_second": engine.queue.tokens_per_second,
                "wait_seconds": one.wait,
                "prompt_seconds": one.prompt,
                "memory_seconds": one.memory,
                "is_chosen": engine is chosen,
            }
            for engine, one in found.items()
        ]
        copies = [asdict(copy) for copy in pool.replicas.copies] if pool.replicas else []
        return _json({"engines": engines, "copies": copies})

    return Route(f"{PATH}/explain", explain, methods=["POST"])


def engine_routes(endpoints: Endpoints, roles: Collection[str], refusal: str) -> list[Route]:
    """`POST /engines/add`, `drain` and `remove`. `refusal` is why no client may call them, if none may."""

    async def add(body: Any) -> None:
        await endpoints.add(read_endpoint(body, roles))

    async def drain(body: Any) -> None:
        endpoints.drain(_url(body))

    async def remove(body: Any) -> None:
        endpoints.remove(_url(body))

    def route(name: str, change: Any) -> Route:
        async def serve(request: Request) -> Response:
            if refusal:
                return _error(403, refusal)
            try:
                await change(await _body(request))
            except (BadRequest, Conflict, EngineNotFound) as error:
                status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
                return _error(status, str(error))
            return _json({"engines": [_state(engine) for engine in endpoints.engines]})

        return Route(f"{PATH}/{name}", serve, methods=["POST"])

    return [route("add", add), route("drain", drain), route("remove", remove)]


def _state(engine: Engine) -> dict[str, Any]:
    state = "draining" if engine.is_draining else "healthy" if engine.is_healthy else "unhealthy"
    return {
        "url": engine.url,
        "role": engine.role,
        "state": state,
        "failure": engine.failure,
        "in_flight_count": engine.in_flight_count,
        "instance_id": engine.instance_id,
        "models": [model.name for model in engine.models],
    }


async def _body(request: Request) -> Any:
    """The decoded body. Raises `BadRequest`."""
    received = b""
    try:
        async for chunk in request.stream():
            received += chunk
            if len(received) > MAX_BODY_BYTES:
                raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
        return msgspec.json.decode(received)
    except ClientDisconnect:
        raise BadRequest("the body ended early") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _url(body: Any) -> str:
    if not isinstance(body, dict) or body.keys() != {"url"}:
        raise BadRequest("the body must be an object with url")
    return read_url(body["url"])


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return Response(error_body(status, message), status, media_type="application/json")


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


def page_routes(pools: EnginePools, metrics: ProxyMetrics) -> list[Route]:
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
