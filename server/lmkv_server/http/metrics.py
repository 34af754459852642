"""`/metrics`: the response, and the application of a server that serves nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lmkv.auth.authenticator import Authenticator
from lmkv.errors import PermissionDenied, Unauthenticated
from lmkv_server.http.guard import CHALLENGE, VIEW_RPC, HostGuard, credentials_of


def metrics_response(registry: CollectorRegistry) -> Response:
    """The metrics of a registry in Prometheus's text format."""
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_metrics_app(registry: CollectorRegistry, authenticator: Authenticator, guard: HostGuard) -> Starlette:
    """Serves the metrics of a registry, and no other path, to clients that have the permission for `VIEW_RPC`."""

    async def show(request: Request) -> Response:
        if refusal := guard.refusal(request.headers.get("host", ""), request.headers.get("origin")):
            return _text(403, refusal)
        try:
            authenticator.authenticate(VIEW_RPC, credentials_of(request))
        except Unauthenticated as error:
            return _text(401, str(error), CHALLENGE)
        except PermissionDenied as error:
            return _text(403, str(error))
        return metrics_response(registry)

    async def no_path(_request: Request, _error: Exception) -> Response:
        return _text(404, "only /metrics is served")

    async def no_method(_request: Request, _error: Exception) -> Response:
        return _text(405, "use GET", {"Allow": "GET, HEAD"})

    return Starlette(routes=[Route("/metrics", show)], exception_handlers={404: no_path, 405: no_method})


def _text(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{message}\n", status, headers)
