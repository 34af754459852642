"""`/tokenize`, with vLLM's shapes, and `/tokenizers`: for who has only the text of a prompt, such as the page."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.core.models import Models
from lmkv_server.coordinator.http.paths import Body, Path
from lmkv_server.coordinator.http.replies import json_response
from lmkv_server.coordinator.tokenizers import Tokenizers


class TokenizeBody(Body):
    """Body of `/tokenize`; `model` may be left out where the coordinator has one tokenizer."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True


def paths(tokenizers: Tokenizers, models: Models) -> dict[str, Path[Any]]:
    """The path that makes token ids of text. `models` are those of the tenant that calls."""

    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        tokens = await tokenizers.encode(
            body.prompt,
            body.model,
            other_names=models.other_names(body.model) if body.model else (),
            add_special_tokens=body.add_special_tokens,
        )
        return {"count": len(tokens), "tokens": tokens}

    return {
        "/tokenize": Path(
            TokenizeBody,
            "Make token ids of a prompt, as vLLM's /tokenize does.",
            tokenize,
            {"count": 3, "tokens": [128000, 9906, 1917]},
            tag="as in vLLM",
        )
    }


def routes(tokenizers: Tokenizers) -> list[Route]:
    """What can be asked about it."""

    async def models(_: Request) -> Response:
        return json_response({"models": tokenizers.model_names})

    return [Route("/tokenizers", models)]
