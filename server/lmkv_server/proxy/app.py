"""All that the proxy serves over HTTP, put together. Handlers translate only."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkv.auth.authenticator import Authenticator
from lmkv.errors import PermissionDenied, Unauthenticated
from lmkv_server.http.access import CHALLENGE, VIEW_RPC, credentials_of
from lmkv_server.http.guard import HostGuard
from lmkv_server.proxy import page
from lmkv_server.proxy.admission import Admission, AdmissionApp, AdmittedRequest, Refusal
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.pd.handler import Call, RequestHandler
from lmkv_server.proxy.pd.parameters import CHAT, COMPLETIONS, without_hand_over
from lmkv_server.proxy.routing.engines import Fleet
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream.reply import error_body

PASSED_ON = {"/v1/models": "GET", "/tokenize": "POST", "/detokenize": "POST"}
"""What all engines answer alike."""
PROBES = frozenset({"/health", "/healthz", "/readyz"})
"""Paths that are answered at any time."""


def make_app(
    door: Admission,
    exchange: RequestHandler,
    fleet: Fleet,
    statistics: Statistics,
    metrics: Metrics,
    gate: Authenticator,
    guard: HostGuard,
) -> Guarded:
    """The application of a proxy. `guard` is before everything; `gate` only before the page and the metrics, since
    requests carry the credentials that engines ask for.
    """

    async def complete(visit: AdmittedRequest) -> None:
        await exchange.serve(_call(visit), visit.reply)

    async def pass_on(visit: AdmittedRequest) -> None:
        body = visit.body if visit.method == "POST" else None
        await visit.reply.answer(await exchange.pass_on(visit.method, visit.path, visit.headers, body))

    async def alive(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        missing = "it is about to stop" if door.is_closing else fleet.missing()
        return _json({"status": "not ready", "detail": missing}, 503) if missing else _json({"status": "ok"})

    async def show_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = Starlette(
        routes=[
            *(Route(path, AdmissionApp(door, complete), methods=["POST"]) for path in (COMPLETIONS, CHAT)),
            *(Route(path, AdmissionApp(door, pass_on), methods=[method]) for path, method in PASSED_ON.items()),
            *(_gated(route, gate) for route in [*page.routes(fleet, statistics), Route("/metrics", show_metrics)]),
            Route("/health", ready),
            Route("/healthz", alive),
            Route("/readyz", ready),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    return Guarded(app, guard)


class Guarded:
    """An application that refuses what pages of other sites can have a browser send: see `HostGuard`.

    A body must say that it is JSON. A page may send a form or plain text to any site without asking it, but not JSON.
    """

    def __init__(self, app: Starlette, guard: HostGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers
        app: ASGIApp = self._app
        if refusal := self._guard.refusal(headers.get("host", ""), headers.get("origin")):
            app = _error(403, refusal)
        elif scope["method"] == "POST" and (kind := _media_type(headers)) != "application/json":
            given = f"not {kind}" if kind else "which it does not say"
            app = _error(415, f"the body must be JSON, {given}; send the header Content-Type: application/json")
        await app(scope, receive, send)


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(status, message), status, headers, media_type="application/json")


def _gated(route: BaseRoute, gate: Authenticator) -> BaseRoute:
    """The route, for whom the gate lets look."""
    if isinstance(route, Route):
        inner = route.app

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            try:
                gate.authenticate(VIEW_RPC, credentials_of(request))
            except (Unauthenticated, PermissionDenied) as error:
                is_unknown = isinstance(error, Unauthenticated)
                status, headers = (401, CHALLENGE) if is_unknown else (403, {})
                await _error(status, str(error), headers)(scope, receive, send)
            else:
                await inner(scope, receive, send)

        route.app = serve
    return route


def _call(visit: AdmittedRequest) -> Call:
    """What a client asks for. Raises `Refusal` if it is no JSON object."""
    try:
        body = msgspec.json.decode(visit.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    user = body.get("user")
    session = visit.session or (user if isinstance(user, str) else "")
    return Call(path=visit.path, body=without_hand_over(body), headers=visit.headers, session=session)


def _json(content: dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.url.path} takes {(error.headers or {}).get('Allow', '')}, not {request.method}"
    else:
        message = f"there is no {request.url.path} here"
    return _error(error.status_code, message, error.headers)
