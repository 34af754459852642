"""The HTTP application of the webhook."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.webhook.additions import Additions
from lmkv_server.webhook.review import InvalidReview, review

PATH = "/mutate"
BODY_TIMEOUT_SECONDS = 10.0
MAX_BODY_BYTES = 8 << 20
"""More than two objects of the largest size that Kubernetes stores."""


def make_app(additions: Mapping[str, Additions]) -> Starlette:
    """The application of a webhook."""

    async def mutate(request: Request) -> Response:
        body = b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BODY_BYTES:
                        return _error(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            return _error(408, f"the body was not complete within {BODY_TIMEOUT_SECONDS:g} s")
        try:
            answer = review(msgspec.json.decode(body), additions)
        except (InvalidReview, msgspec.DecodeError) as error:
            return _error(400, str(error))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def alive(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    return Starlette(routes=[Route(PATH, mutate, methods=["POST"]), Route("/healthz", alive), Route("/readyz", alive)])


def _error(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, media_type="application/json")
