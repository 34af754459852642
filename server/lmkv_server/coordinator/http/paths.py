"""A path that takes one kind of JSON body by POST and answers JSON: how it is read, served and described."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.http.bodies import decode, read_body
from lmkv_server.coordinator.http.replies import json_response
from lmkv_server.coordinator.http.tokens import lift_tokens

B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """What a path takes. An unknown field is refused: a misspelt `copy` would make a move of it."""


class Path(Generic[B]):
    """One path: the body it takes, what it does with it, and an answer for example; `tag` says whose it is."""

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
        """Answers a request. Raises what `decode` and the handlers raise."""
        rest, tokens = lift_tokens(await read_body(request))
        body: Any = decode(rest, self._decoder)
        if tokens is not None and bytes(body.tokens) == b"[]":  # the last one counts, should tokens stand there twice
            body.tokens = tokens
        return json_response(await self.answer(body))


def routes(paths: Mapping[str, Path[Any]]) -> list[Route]:
    """A route for each path."""
    return [Route(name, path.serve, methods=["POST"]) for name, path in paths.items()]
