"""The tokenizers of the fleet's models, for whoever has only the text of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from lmkv import tokenizer
from lmkv.errors import ConfigError, ModelAmbiguous, ModelNotFound
from lmkv.tokenizer import Tokenizer


class Tokenizers:
    """One tokenizer for each model, read when it is first asked for.

    `folders` are the models' folders by the names under which they are served. Raises `ConfigError` if one has none.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        for model_name, folder in folders.items():
            try:
                tokenizer.file_of(folder)
            except ConfigError as error:
                raise ConfigError(f"tokenizers[{model_name!r}]: {error}", key="tokenizers") from None
        self._folders = dict(folders)
        self._loaded: dict[str, Tokenizer] = {}
        self._turn = asyncio.Lock()  # one text at a time: lookups keep the other processors

    @property
    def model_names(self) -> list[str]:
        """The models whose text it takes."""
        return sorted(self._folders)

    async def encode(
        self, text: str, model_name: str = "", *, other_names: Iterable[str] = (), add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids that the model makes of a text; the only model need not be named.

        `other_names` are further names of the same model, for one whose tokenizer is configured under another name.

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
        async with self._turn:
            if model_name not in self._loaded:
                self._loaded[model_name] = await asyncio.to_thread(tokenizer.load, self._folders[model_name])
            encode = self._loaded[model_name].encode
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
