"""Tokenizers of the fleet's models, and the paths `/tokenize` (with vLLM's shapes) and `/tokenizers`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv import tokenizer
from lmkv.auth.caller import current_caller
from lmkv.errors import ConfigError, ModelAmbiguous, ModelNotFound
from lmkv.tokenizer import Tokenizer
from lmkv_server.coordinator.core.models import Models
from lmkv_server.coordinator.http.bodies import Body, Path, json_response


class Tokenizers:
    """One tokenizer per model, loaded when it is first used.

    `folders` maps served names to the models' folders. Raises `ConfigError` if a folder has no tokenizer.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        for model_name, folder in folders.items():
            try:
                tokenizer.file_of(folder)
            except ConfigError as error:
                raise ConfigError(f"tokenizers[{model_name!r}]: {error}", key="tokenizers") from None
        self._folders = dict(folders)
        self._loaded: dict[str, Tokenizer] = {}
        self._turn = asyncio.Lock()  # one text at a time: the other processors stay free for lookups
        self._turns_of_tenants: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One text of each tenant at a time waits for that turn, so that tenants have equal shares of it."""

    @property
    def model_names(self) -> list[str]:
        """The models that have a tokenizer, sorted."""
        return sorted(self._folders)

    async def encode(
        self, text: str, model_name: str = "", *, other_names: Iterable[str] = (), add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a text. `model_name` may be empty if there is one model.

        `other_names` are further names of the same model, under which its tokenizer may be configured.

        Raises `ModelNotFound` if there is no such tokenizer, `ModelAmbiguous` if there are several and none is named,
        `ConfigError` if the tokenizer cannot be read.
        """
        known = ", ".join(self.model_names)
        if not model_name and len(self._folders) > 1:
            raise ModelAmbiguous(f"there are tokenizers of several models; set model to one of: {known}", known=known)
        model_name = model_name or next(iter(self._folders), "")
        if model_name not in self._folders:
            model_name = next((name for name in other_names if name in self._folders), model_name)
        if model_name not in self._folders:
            fix = f"there are those of: {known}" if known else "set tokenizers to the models' folders by name"
            raise ModelNotFound(
                f"the coordinator has no tokenizer of model {model_name[:100]!r}; {fix}",
                model_name=model_name[:100],
                known=known,
            )
        async with self._turns_of_tenants[current_caller().tenant], self._turn:
            if model_name not in self._loaded:
                self._loaded[model_name] = await asyncio.to_thread(tokenizer.load, self._folders[model_name])
            encode = self._loaded[model_name].encode
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)


class TokenizeBody(Body):
    """Body of `/tokenize`; `model` may be omitted if the coordinator has one tokenizer."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True


def tokenizer_paths(tokenizers: Tokenizers, models: Models) -> dict[str, Path[Any]]:
    """The path `/tokenize`. `models` are those of the calling tenant."""

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
            "Tokenize a prompt, as vLLM's /tokenize does.",
            tokenize,
            {"count": 3, "tokens": [128000, 9906, 1917]},
            tag="as in vLLM",
        )
    }


def tokenizer_routes(tokenizers: Tokenizers) -> list[Route]:

    async def models(_: Request) -> Response:
        return json_response({"models": tokenizers.model_names})

    return [Route("/tokenizers", models)]
