"""The HTTP application of the webhook."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.errors import TooManyRequests
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv_server.http.bodies import BodyTooLarge, caller_of, read_body
from lmkv_server.webhook.additions import Additions
from lmkv_server.webhook.review import InvalidReview, review

PATH = "/mutate"
BODY_TIMEOUT_SECONDS = 10.0
MAX_BODY_BYTES = 4 << 20
"""More than two objects of the largest size that etcd stores, 1.5 MiB."""


def make_app(additions: Mapping[str, Additions]) -> Starlette:
    """The application of a webhook."""

    async def mutate(request: Request) -> Response:
        with Lease(of_process(), caller_of(request)) as lease:
            return await _mutate(request, lease)

    async def _mutate(request: Request, lease: Lease) -> Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await read_body(request, lease, MAX_BODY_BYTES)
            async with turns.of_loop().take(lease.caller, len(body)):
                answer = review(msgspec.json.decode(body), additions)
        except BodyTooLarge:
            return _error(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            return _error(408, f"the body was not complete within {BODY_TIMEOUT_SECONDS:g} s")
        except ClientDisconnect:
            return _error(400, "the connection closed during the body")
        except TooManyRequests as error:
            return _error(503, str(error), {"retry-after": "1"})
        except (InvalidReview, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, str(error))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def alive(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    return Starlette(routes=[Route(PATH, mutate, methods=["POST"]), Route("/healthz", alive), Route("/readyz", alive)])


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, headers, media_type="application/json")
