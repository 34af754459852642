"""The application of the HTTP port: the routes of each tenant, who may call them, probes, and samples for the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.rpc import code_pb2, status_pb2
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkv import rpc, telemetry
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.caller import ROLES
from lmkv.errors import LmkvError, PermissionDenied, TooManyRequests, Unauthenticated
from lmkv.telemetry.spans import TRACEPARENT
from lmkv_server.coordinator.core.history import PERIOD_SECONDS, Series
from lmkv_server.coordinator.http import gateway, lmcache, openapi
from lmkv_server.coordinator.http.bodies import CallAborted, HttpError, json_response, routes, status_of, to_json
from lmkv_server.coordinator.http.metrics import CoordinatorMetrics, MetricSource, TenantMetrics
from lmkv_server.coordinator.http.tokenizers import Tokenizers, tokenizer_paths, tokenizer_routes
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.services.services import Services, Tenants
from lmkv_server.http.guard import CHALLENGE, VIEW_RPC, HostGuard, credentials_of

STATIC = Path(__file__).parent / "static"
ONLY = {"lmkv.v1.RegistryService": ("ListInstances",)}
"""Services of which HTTP serves only these methods: nodes register and report over gRPC."""
MAX_REFUSAL_DELAY_SECONDS = 1.0
"""Limit of `LmkvError.delay_seconds`: connections are few, and several callers may share an address."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Sent with every response: pages load nothing from other origins, run no inline scripts, and cannot be framed.
Browsers revalidate files at each load, so that an upgrade takes effect at once."""


def make_app(
    tenants: Tenants,
    tokenizers: Tokenizers,
    guard: HostGuard,
    authenticator: Authenticator,
    *own: Collector,
    grpc_port: Callable[[], int] = lambda: 0,
) -> CoordinatorApp:
    """The application of a coordinator, protected by `guard` and `authenticator`; `own` are metrics of the process."""

    def probes() -> list[Route]:
        return probe_routes(lambda: (services.core for services in tenants), grpc_port, names=authenticator.is_open)

    def make(services: Services) -> TenantApp:
        return _tenant_app(services, tokenizers, probes(), own if services is tenants.unnamed else ())

    return CoordinatorApp(tenants, make, guard, authenticator)


class TenantApp(NamedTuple):
    """The application and the metrics of one tenant."""

    app: Starlette
    metrics: CoordinatorMetrics
    paths: frozenset[str]


def _tenant_app(services: Services, tokenizers: Tokenizers, probes: list[Route], own: Sequence[Collector]) -> TenantApp:
    metrics = CoordinatorMetrics(services, own)
    handlers = {
        "lmkv.v1.CacheService": services.cache,
        "lmkv.v1.RegistryService": services.registry,
        "google.longrunning.Operations": services.operations,
    }
    paths = lmcache.paths(services) | tokenizer_paths(tokenizers, services.core.instances.models)
    refusals = dict.fromkeys((LmkvError, HttpError, CallAborted, HTTPException), _refusal)
    app = Starlette(
        routes=[
            *gateway.routes(handlers, ONLY),
            *routes(paths),
            *tokenizer_routes(tokenizers),
            *metrics.routes(),
            _history_route(services),
            *probes,
            Route("/openapi.json", _constant(openapi.document(gateway.methods(handlers, ONLY), paths))),
            Route("/", _page("index.html")),
            Route("/docs", _page("docs.html")),
            Mount("/static", StaticFiles(directory=STATIC, packages=[("lmkv_server.http", "static")])),
        ],
        exception_handlers={**refusals, Exception: _failure},
    )
    return TenantApp(app, metrics, frozenset(route.path for route in app.routes if isinstance(route, Route)))


class CoordinatorApp:
    """Checks host, origin and caller of each request, and passes it to the application of the caller's tenant.

    `make` creates the application of a tenant. Adds security headers, and counts requests.
    """

    def __init__(
        self, tenants: Tenants, make: Callable[[Services], TenantApp], guard: HostGuard, authenticator: Authenticator
    ) -> None:
        self._tenants = tenants
        self._make = make
        self._guard = guard
        self._authenticator = authenticator
        self._apps: dict[Services, TenantApp] = {}
        self.metrics = TenantMetrics(self._sources).registry
        self.paths = self._app(tenants.unnamed).paths
        """The served paths, except static files."""

    def _app(self, services: Services) -> TenantApp:
        if services not in self._apps:
            self._apps[services] = self._make(services)
        return self._apps[services]

    def _sources(self) -> Iterator[MetricSource]:
        for tenant, services in self._tenants.by_name():
            metrics = self._app(services).metrics
            # Metrics of the process are counted once: with the tenant without a name.
            yield tenant, metrics.collect if tenant else metrics.registry.collect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            if refusal := self._guard.refusal(request.headers.get("host", ""), request.headers.get("origin")):
                raise HttpError(403, "PERMISSION_DENIED", refusal)
            with self._authenticator.authorized_call(rpc_of(scope["path"]), credentials_of(request)):
                tenant = self._app(self._tenants.current)
                await self._serve(tenant, tenant.app, request, receive, send)
        except (HttpError, Unauthenticated, PermissionDenied, TooManyRequests) as error:
            if isinstance(error, TooManyRequests):
                await asyncio.sleep(min(error.delay_seconds, MAX_REFUSAL_DELAY_SECONDS))
            answer = await _refusal(request, error)
            if isinstance(error, Unauthenticated):
                answer.headers.update(CHALLENGE)
            await self._serve(self._app(self._tenants.unnamed), answer, request, receive, send)

    async def _serve(self, tenant: TenantApp, app: ASGIApp, request: Request, receive: Receive, send: Send) -> None:
        """Answers with a tenant's application, or with a refusal."""
        scope = request.scope
        # Unknown paths share one label: clients must not be able to create metrics.
        path = scope["path"] if scope["path"] in tenant.paths else "other"
        span = telemetry.serve_http(request.method, path, request.headers.get(TRACEPARENT, ""))

        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                tenant.metrics.count_http(path, message["status"])
                span.set_http_status(message["status"])
                span.end()  # the response of a watch may never end
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        with span:
            await app(scope, receive, send_strict)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return FileResponse(STATIC / name, headers={"Cache-Control": "no-cache"})

    return serve


def _constant(content: Any) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return json_response(content)

    return serve


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _no_route(request, error)
    known = status_of(error)
    assert known is not None, "handlers are registered for errors that status_of knows"
    http_status, status = known
    return _error(request, http_status, status, getattr(error, "headers", None))


async def _failure(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, and uvicorn logs it.
    message = f"{request.url.path} failed unexpectedly: {error!r}; see the server's log"
    return _error(request, 500, status_pb2.Status(code=code_pb2.INTERNAL, message=rpc.short(message)))


def _no_route(request: Request, error: HTTPException) -> HttpError:
    path = rpc.short(request.url.path)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(405, "UNIMPLEMENTED", f"{path} takes {allowed}, not {request.method}", {"Allow": allowed})
    return HttpError(error.status_code, "NOT_FOUND", f"{path} does not exist; /docs lists the paths")


def _error(
    request: Request, http_status: int, status: status_pb2.Status, headers: Mapping[str, str] | None = None
) -> Response:
    """An error response: `google.rpc.Status` on an RPC's path, elsewhere LMCache's `detail` with the status."""
    content = to_json(status)
    if "." not in request.url.path.split("/")[1]:
        content = {"detail": status.message, "error": content}
    response = json_response(content, http_status)
    response.headers.update(headers or {})
    return response


_PROBE = "grpc.health.v1.Health/Check"
_LOOKUP = "lmkv.v1.CacheService/Lookup"

RPC_BY_PATH: Mapping[str, str] = {
    "/healthz": _PROBE,
    "/readyz": _PROBE,
    "/grpc_port": _PROBE,
    "/lookup": _LOOKUP,
    "/tokenize": _LOOKUP,
    "/tokenizers": _LOOKUP,
    "/move": "lmkv.v1.CacheService/Move",
    "/clear": "lmkv.v1.CacheService/Clear",
    "/pin": "lmkv.v1.CacheService/Pin",
    "/unpin": "lmkv.v1.CacheService/Unpin",
    "/check_finish": "google.longrunning.Operations/GetOperation",
    "/health": VIEW_RPC,
    "/query_instance": VIEW_RPC,
    "/query_worker_info": VIEW_RPC,
    "/history": VIEW_RPC,
    "/metrics": VIEW_RPC,
    "/openapi.json": VIEW_RPC,
    "/": VIEW_RPC,
    "/docs": VIEW_RPC,
}
"""The RPC of each path. RPCs have their own paths, too."""


def rpc_of(path: str) -> str:
    """The RPC that a path corresponds to; static files and unknown paths need the role of `LOOK`."""
    return RPC_BY_PATH.get(path) or (path[1:] if path[1:] in ROLES else VIEW_RPC)


def probe_routes(cores: Callable[[], Iterable[Registry]], grpc_port: Callable[[], int], *, names: bool) -> list[Route]:
    """`/healthz` and `/readyz` for probes, and `/grpc_port` for gRPC clients that know the HTTP port only.

    They need no token; `names` is whether responses may contain instance ids.
    """

    async def alive(_: Request) -> Response:
        stopped = [one.info.instance_id for core in cores() for one in core.instances if one.stats.stopped_models]
        if not stopped:
            return json_response({"status": "ok"})
        at = ", ".join(stopped[:10]) if names else f"{len(stopped)} instances"
        detail = f"a model is not served from the cache any more at {at}: too many chunks were wrong (lmkv doctor)"
        return json_response({"status": "ok", "detail": detail})

    async def ready(_: Request) -> Response:
        for core in cores():
            if not core.is_partial(time.monotonic()):
                continue
            if not names:
                return json_response({"status": "not ready", "detail": "the layout map is being rebuilt"}, 503)
            unsynced = [instance.info.instance_id for instance in core.instances if not instance.synced]
            on = f"for {', '.join(unsynced[:10])}" if unsynced else "for more instances"
            return json_response(
                {"status": "not ready", "detail": f"the layout map is being rebuilt: waiting {on}"}, 503
            )
        return json_response({"status": "ok"})

    async def grpc(_: Request) -> Response:
        return json_response({"grpc_port": grpc_port()})

    return [Route("/healthz", alive), Route("/readyz", ready), Route("/grpc_port", grpc)]


def _history_route(services: Services) -> Route:
    """`/history`: the samples of the last hour, for the page. An HTTP path only: metrics are for programs."""

    async def serve(request: Request) -> Response:
        """The fleet's samples, or those of `instance_id`. Raises `InstanceNotFound`."""
        instance_id = request.query_params.get("instance_id", "")
        if not instance_id:
            return json_response(content_of(services.history.fleet))
        services.core.instances.named(instance_id, "instance_id")
        return json_response(content_of(services.history.series(instance_id)))

    return Route("/history", serve)


def content_of(series: Series) -> dict[str, Any]:
    """Samples as columns of equal length, the oldest sample first."""
    return {
        "period_seconds": PERIOD_SECONDS,
        "times": _numbers(series.times),
        **{name: _numbers(column) for name, column in series.counts.items()},
        "used_bytes": {tier: _numbers(column) for tier, column in series.used_bytes.items()},
    }


def _numbers(column: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in column]
