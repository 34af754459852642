"""HTTP routes by which operators list, add, drain and remove engines. Their handlers only translate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.errors import BadRequest, Conflict, EngineNotFound, LmkvError
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.engines.endpoints import Endpoints
from lmkv_server.proxy.engines.engines_file import read_endpoint, read_url
from lmkv_server.proxy.openai import error_body
from lmkv_server.proxy.routing.pools import EnginePools

PATH = "/engines"
MAX_BODY_BYTES = 4096
_STATUSES: dict[type[LmkvError], int] = {BadRequest: 400, EngineNotFound: 404, Conflict: 409}


def list_route(pools: EnginePools) -> Route:
    """`GET /engines`: the engines and their state."""

    async def list_engines(_: Request) -> Response:
        return _json({"engines": [_state(engine) for engine in pools.engines]})

    return Route(PATH, list_engines, methods=["GET"])


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
