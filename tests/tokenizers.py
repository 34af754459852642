"""A model's folder with a real tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

UNKNOWN = "[UNK]"


def save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> Path:
    """Makes words between spaces tokens, unknown ones token 0; returns the folder."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0, **vocabulary}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
