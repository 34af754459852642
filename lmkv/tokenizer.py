"""The tokenizer of a model, read from the model's folder. The only module that imports `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkv.errors import ConfigError

FILE = "tokenizer.json"


class Tokenizer:
    """Tokenizes text as vLLM does for the same model."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids; with `add_special_tokens` those that the model adds to prompts are included."""
        # A batch of one releases the GIL: a megabyte of text takes half a second.
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def file_of(folder: str | Path) -> Path:
    """Path of the tokenizer in a model's folder. Raises `ConfigError` if there is none."""
    file = Path(folder, FILE)
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; name the folder of a model that has a {FILE}")
    return file


def load(folder: str | Path) -> Tokenizer:
    """Loads the tokenizer in a model's folder, in up to a second. Raises `ConfigError` if it cannot."""
    file = file_of(folder)
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ConfigError(
            "tokenizing text needs the package tokenizers: `pip install '.[tokenizers]'` in a clone of lmkv"
        ) from None
    try:
        return Tokenizer(Inner.from_file(str(file)))
    except Exception as error:  # the package raises plain `Exception`
        raise ConfigError(f"{file} is not a tokenizer: {error}") from None
