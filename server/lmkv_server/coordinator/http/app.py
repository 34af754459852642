"""All that the HTTP port serves, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.rpc import code_pb2, status_pb2
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv_server.coordinator.http import gateway
from lmkv_server.coordinator.http.guard import refuse_foreign
from lmkv_server.coordinator.http.replies import CallAborted, HttpError, json_response, status_of, to_json

STATIC = Path(__file__).parent / "static"
ONLY = {"lmkv.v1.RegistryService": ("ListInstances",)}
"""Services of which HTTP does not serve all: nodes register and report over gRPC."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Sent with every answer: pages load nothing from elsewhere, run no inline scripts, and nobody frames them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """The servicers that gRPC calls too."""

    cache: Any
    registry: Any
    operations: Any

    @property
    def by_name(self) -> dict[str, object]:
        """By the full name of their service."""
        return {
            "lmkv.v1.CacheService": self.cache,
            "lmkv.v1.RegistryService": self.registry,
            "google.longrunning.Operations": self.operations,
        }


def make_app(handlers: Handlers, host: str = "127.0.0.1") -> ASGIApp:
    """The application of a coordinator that is bound to `host`."""
    refusals = dict.fromkeys((LmkvError, HttpError, CallAborted, HTTPException), _refusal)
    app = Starlette(
        routes=[
            *gateway.routes(handlers.by_name, ONLY),
            Route("/", _index),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        exception_handlers={**refusals, Exception: _failure},
    )
    return Guarded(app, host)


class Guarded:
    """An application that answers only its own pages and programs, with headers that keep browsers strict."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self._app
        request = Request(scope)
        try:
            refuse_foreign(request, self._host)
        except HttpError as error:
            app = await _refusal(request, error)
        await app(scope, receive, send_strict)


async def _index(_: Request) -> Response:
    page = STATIC / "index.html"
    if not page.exists():
        raise HttpError(404, "NOT_FOUND", "this version of lmkv has no page here")
    return FileResponse(page, headers={"Cache-Control": "no-cache"})


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _no_route(request, error)
    known = status_of(error)
    assert known is not None, "only what status_of knows comes here"
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
    return HttpError(error.status_code, "NOT_FOUND", f"there is no {path} here; /docs lists what there is")


def _error(
    request: Request, http_status: int, status: status_pb2.Status, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal: over an RPC's path the bare `google.rpc.Status`, elsewhere LMCache's `detail` with the status."""
    content = to_json(status)
    if "." not in request.url.path.split("/")[1]:
        content = {"detail": status.message, "error": content}
    response = json_response(content, http_status)
    response.headers.update(headers or {})
    return response
