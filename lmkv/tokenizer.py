"""A model's own tokenizer, read from its folder: the one home of the package `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkv.errors import ConfigError

FILE = "tokenizer.json"


class Tokenizer:
    """Makes token ids of text as vLLM does for the same model."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids, those included with which the model's prompts begin, unless they are unwanted."""
        # A batch of one, for it lets other threads run meanwhile: a megabyte of text takes half a second.
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def file_of(folder: str | Path) -> Path:
    """Where the tokenizer is in a model's folder. Raises `ConfigError` if there is none."""
    file = Path(folder, FILE)
    if not file.is_file():
        raise ConfigError(f"there is no {file}: name the folder of a model that has a {FILE}")
    return file


def load(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model's folder; that takes up to a second. Raises `ConfigError` if it is not there."""
    file = file_of(folder)
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ConfigError("making tokens of text needs the package tokenizers: `pip install tokenizers`") from None
    try:
        return Tokenizer(Inner.from_file(str(file)))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{file} is no tokenizer: {error}") from None
