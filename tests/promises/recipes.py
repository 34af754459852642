"""Recipes in our pages: a command in an `sh` block, and in the `json` block after it what it answers."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCKS = re.compile(r"^```(sh|json)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
TOOLS = ("grpcurl", "buf", "curl")
GRPC_PORT, HTTP_PORT = 9000, 9001
SOCKET = "/run/lmkv/lmkv-1/engine.sock"
NAME = re.compile(r"(move|copy|clear|drain)-[0-9a-f]{16}|[a-z0-9-]+/[0-9a-f]{16}|(lookup|health|query)-[0-9a-f]{32}")
"""Names that the coordinator makes up: operations, pins, events."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One command and its answer; `answers` holds several messages where it answers with a stream."""

    page: str
    line: int
    words: tuple[str, ...]
    answers: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def recipes_of(page: Path) -> list[Recipe]:
    """The recipes of a page, in order."""
    text = page.read_text()
    found: list[Recipe] = []
    blocks = list(BLOCKS.finditer(text))
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block[1] != "sh":
            continue
        words = tuple(shlex.split(block[2].replace("\\\n", " ")))
        if words and words[0] in TOOLS:
            line = text[: block.start()].count("\n") + 1
            is_answered = following and following[1] == "json" and following.start() == block.end()
            answers = tuple(messages(following[2])) if following and is_answered else ()
            found.append(Recipe(page.name, line, words, answers))
    return found


def messages(text: str) -> list[Any]:
    """The JSON values in a text, one after the other."""
    decoder = json.JSONDecoder()
    values = []
    rest = text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        values.append(value)
        rest = rest[end:].lstrip()
    return values


@dataclass(frozen=True, slots=True)
class Place:
    """Where recipes are run: the ports of a coordinator, whose certificates to trust if it speaks TLS, and the socket
    of a node, which never does."""

    buf: str
    grpc_port: int
    http_port: int
    ca: str = ""
    engine_socket: str = ""

    def command(self, recipe: Recipe) -> list[str]:
        """What to run instead of what the recipe says: `buf curl` for `grpcurl`, and this place's ports."""
        if SOCKET in recipe.words:
            return [self.buf, *(self.engine_socket if word == SOCKET else word for word in recipe.words[1:])]
        words = [self._here(word) for word in recipe.words]
        if words[0] == "curl":
            return [*words, *(("--cacert", self.ca) if self.ca else ())]
        if words[0] == "grpcurl":
            assert words[1:3] == ["-plaintext", "-d"], f"{recipe}: say grpcurl -plaintext -d DATA ADDRESS METHOD"
            data, address, method = words[3:]
            words = ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", data]
            words.append(f"http://{address}/{method}")
        if self.ca:
            words = [word.replace("http://", "https://") for word in words if word != "--http2-prior-knowledge"]
            words += ["--cacert", self.ca]
        return [self.buf, *words[1:]]

    def _here(self, word: str) -> str:
        for documented, actual, scheme in (
            (GRPC_PORT, self.grpc_port, ""),
            (HTTP_PORT, self.http_port, "https://" if self.ca else "http://"),
        ):
            found = re.fullmatch(rf"(?:http://)?localhost:{documented}(/.*)?", word)
            if found and scheme:
                return f"{scheme}localhost:{actual}{found[1] or ''}"
            word = word.replace(f"localhost:{documented}", f"localhost:{actual}")
        return word


class Names:
    """What the coordinator made up in place of the names on the page."""

    def __init__(self) -> None:
        self._actual: dict[str, str] = {}

    def translate(self, text: str) -> str:
        for documented, actual in self._actual.items():
            text = text.replace(documented, actual)
        return text

    def difference(self, documented: Any, actual: Any, at: str = "answer") -> str:
        """Where two answers differ; empty if they do not. `...` stands for anything, as does a new name for another.

        A key `...` says that there may be further ones.
        """
        if isinstance(documented, dict) and isinstance(actual, dict):
            expected = {key: value for key, value in documented.items() if key != "..."}
            further = [] if "..." in documented else [key for key in actual if key not in expected]
            missing = [key for key in expected if key not in actual]
            if further or missing:
                return f"{at} lacks {missing} and has {further} besides"
            return next(filter(None, (self.difference(v, actual[k], f"{at}.{k}") for k, v in expected.items())), "")
        if isinstance(documented, list) and isinstance(actual, list) and len(documented) == len(actual):
            pairs = enumerate(zip(documented, actual, strict=True))
            return next(filter(None, (self.difference(d, a, f"{at}[{i}]") for i, (d, a) in pairs)), "")
        if isinstance(documented, str) and isinstance(actual, str):
            if NAME.fullmatch(documented) and NAME.fullmatch(actual):
                if self._actual.setdefault(documented, actual) == actual:
                    return ""
            elif re.fullmatch(re.escape(documented).replace(r"\.\.\.", ".+"), actual, re.DOTALL):
                return ""
        return "" if documented == actual or documented == "..." else f"{at} is {actual!r}, not {documented!r}"
