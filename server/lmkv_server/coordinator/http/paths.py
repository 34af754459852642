"""A path that takes a JSON body by POST and returns JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.http.bodies import body_of, decode, json_response, turn
from lmkv_server.coordinator.http.tokens import lift_tokens, token_array

B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a path. Unknown fields are refused: a misspelt `copy` would turn a copy into a move."""


class Path(Generic[B]):
    """A path: type of its body, handler, and an example of the response; `tag` groups it in the documentation."""

    def __init__(
        self,
        body: type[B],
        summary: str,
        answer: Callable[[B], Awaitable[dict[str, Any]]],
        example: dict[str, Any],
        *,
        tag: str = "as in LMCache",
    ) -> None:
        self.body = body
        self.summary = summary
        self.answer = answer
        self.example = example
        self.tag = tag
        self._decoder = msgspec.json.Decoder(body)

    async def serve(self, request: Request) -> Response:
        """Answers a request. Raises the errors of `decode` and of the handler."""
        async with body_of(request) as whole:
            async with turn(request, whole) as is_large:
                rest, tokens = lift_tokens(whole)
                body: Any = decode(rest, self._decoder)
                if tokens is not None and bytes(body.tokens) == b"[]":  # the last one wins if the body has tokens twice
                    body.tokens = tokens
                if is_large and hasattr(body, "tokens"):
                    body.tokens = await asyncio.to_thread(token_array, body.tokens)
            return json_response(await self.answer(body))


def routes(paths: Mapping[str, Path[Any]]) -> list[Route]:
    """A route for each path."""
    return [Route(name, path.serve, methods=["POST"]) for name, path in paths.items()]
