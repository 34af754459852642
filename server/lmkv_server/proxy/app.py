"""The HTTP application of the proxy. Its handlers only translate."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.caller import ENGINES_RPC
from lmkv.errors import PermissionDenied, Unauthenticated
from lmkv.runtime import turns
from lmkv_server.http.guard import CHALLENGE, VIEW_RPC, HostGuard, credentials_of
from lmkv_server.http.server import metrics_response
from lmkv_server.proxy.admission import Admission, AdmissionApp, AdmittedRequest, fields_of
from lmkv_server.proxy.engine_routes import explain_route, list_route, page_routes
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, error_body
from lmkv_server.proxy.passthrough import PATHS, PassThrough
from lmkv_server.proxy.pd.handler import RequestHandler
from lmkv_server.proxy.pd.parameters import without_handoff
from lmkv_server.proxy.pd.prefill import CompletionRequest
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.routing.prompt import needed_fields

PROBES = frozenset({"/health", "/healthz", "/readyz"})
"""Paths that no limit applies to."""


def client_routes(admission: Admission, handler: RequestHandler, pass_through: PassThrough) -> list[Route]:
    """The paths that engines serve. Engines check the credentials, or `admission` does by `cache_salt_policy`."""

    async def complete(request: AdmittedRequest) -> None:
        async with turns.of_loop().take(request.caller, request.body.text_bytes):
            decoded = _completion_request(request, needed_fields(request.path, reads_prompt=handler.reads_prompts))
        await handler.serve(decoded, request.writer)

    async def passed(request: AdmittedRequest) -> None:
        await pass_through.serve(request)

    return [
        *(Route(path, AdmissionApp(admission, complete), methods=["POST"]) for path in (COMPLETIONS, CHAT)),
        *(Route(path, AdmissionApp(admission, passed), methods=[method]) for path, method in PATHS.items()),
    ]


def probe_routes(admission: Admission, pools: EnginePools) -> list[Route]:
    """The health probes."""

    async def alive(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        reason = "the proxy is stopping" if admission.is_closed else pools.unavailable_reason()
        return _json({"status": "not ready", "detail": reason}, 503) if reason else _json({"status": "ok"})

    return [Route("/health", ready), Route("/healthz", alive), Route("/readyz", ready)]


def operator_routes(
    pools: EnginePools, metrics: ProxyMetrics, authenticator: Authenticator, changes: Sequence[Route]
) -> list[BaseRoute]:
    """The page, the metrics, and `changes`, by which operators change the engines. `authenticator` applies to all."""

    async def show_metrics(_: Request) -> Response:
        return metrics_response(metrics.registry)

    protected = [*page_routes(pools, metrics), list_route(pools), explain_route(pools), Route("/metrics", show_metrics)]
    return [
        *(authenticated(route, authenticator) for route in protected),
        *(authenticated(route, authenticator, ENGINES_RPC) for route in changes),
    ]


def make_app(routes: Sequence[BaseRoute], guard: HostGuard) -> ProxyApp:
    """The application of a proxy. `guard` applies to all paths."""
    return ProxyApp(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}), guard)


class ProxyApp:
    """Rejects requests that a page of another site has a browser send: see `HostGuard`.

    A body must be declared as JSON. A page may send forms and plain text to other sites without a CORS preflight, but
    not JSON.
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
            given = f"not {kind}" if kind else "but the request has no Content-Type"
            app = _error(415, f"the body must be JSON, {given}; send the header Content-Type: application/json")
        await app(scope, receive, send)


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(status, message), status, headers, media_type="application/json")


def authenticated(route: BaseRoute, authenticator: Authenticator, rpc: str = VIEW_RPC) -> BaseRoute:
    """The route for clients that may call `rpc`, by default view the proxy's state; others get 401 or 403."""
    if isinstance(route, Route):
        inner = route.app

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            try:
                authenticator.authenticate(rpc, credentials_of(request))
            except (Unauthenticated, PermissionDenied) as error:
                is_unknown = isinstance(error, Unauthenticated)
                status, headers = (401, CHALLENGE) if is_unknown else (403, {})
                await _error(status, str(error), headers)(scope, receive, send)
            else:
                await inner(scope, receive, send)

        route.app = serve
    return route


def _completion_request(request: AdmittedRequest, needed: Container[str]) -> CompletionRequest:
    """Reads a completion request. Raises `InvalidRequest` if the body is not a JSON object."""
    sent = fields_of(request, needed)
    user = sent.get("user")
    session = request.session or (user if isinstance(user, str) else "")
    body = request.client.salted(request.path, without_handoff(sent))
    return CompletionRequest(
        path=request.path,
        body=body,
        size_bytes=request.body.text_bytes,
        headers=request.headers,
        caller=request.caller,
        session=session,
        sent=request.body.text if body == sent else b"",
    )


def _json(content: dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.url.path} requires {(error.headers or {}).get('Allow', '')}, not {request.method}"
    else:
        message = f"the path {request.url.path} does not exist"
    return _error(error.status_code, message, error.headers)
