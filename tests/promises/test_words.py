"""The project is written in plain technical English: code, comments, tests, pages and messages avoid these words."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = {
    "tells?|telling|told": "report, send, describe, show",
    "somebody|someone|whoever": "a client, a process, the caller",
    "nobody": "no instance, no client",
    "anybody|everybody": "any client, all processes",
    "anew": "again; restart, reload, regenerate",
    r"hand(?:s|ed|ing)?(?:-| |)over": "transfer, pass; handoff for prefill and decode",
    "so many": "the number of, this number of",
    "lets? in|letting in": "admit, accept",
    "go(?:es|ing)? on|went on": "continue, resume",
    "is no error": "is idempotent",
    "the like": "name the things",
    "as far as": "up to, the part that",
    "words travel": "the control plane uses gRPC",
    "by and by": "over time",
    "in the midst|amid": "during",
    "(?:hears?|heard) of": "learn of, receive",
}
"""Patterns of words that readers misunderstood, and what to write instead. Spaces match underscores and line breaks."""

EXCEPTIONS = {
    "tests/promises/test_words.py": "lists the words",
}
"""Files that may contain the words, each with the reason."""

GENERATED = (
    *(
        "lmkv/v1/",
        "lmkv/internal/v1/",
        "client/typescript/src/gen/",
        "client/typescript/package-lock.json",
        "benchmarks/results/",
    ),
    "server/lmkv_server/coordinator/http/static/swagger-ui",
    "docs/javascripts/",
)
"""Their sources are checked, or they contain no text, or others wrote them."""
BINARY = {".binpb", ".gz", ".webp", ".png", ".ico", ".woff2"}

PATTERN = re.compile(
    "(?<![a-z])(?:{})(?![a-z])".format("|".join(WORDS).replace(" ", r"[\s_]+(?:(?:#|//|\*)\s*)?")), re.IGNORECASE
)


def test_no_file_contains_words_to_avoid(root: Path) -> None:
    files = [file for file in texts(root) if str(file.relative_to(root)) not in EXCEPTIONS]
    assert len(files) > 500
    hits = [f"{file.relative_to(root)}:{hit}" for file in files for hit in found(file.read_text(encoding="utf-8"))]
    assert not hits, "write plain technical English (WORDS has alternatives):\n" + "\n".join(hits)


@pytest.mark.parametrize("path", EXCEPTIONS)
def test_every_exception_is_needed(root: Path, path: str) -> None:
    assert list(found((root / path).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("a node reports, continues and is admitted", []),
        ("retelling, foretold, gondola, a handoff, unlet inn", []),
        ("Nobody is told", ["1: Nobody", "1: told"]),
        ("def test_it_is_told_once():", ["1: told"]),
        ("what was\nhanded over", ["2: handed over"]),
        ("# the stream goes\n    # on after that", ["1: goes on"]),
        ("hand_over = Hand-Over", ["1: hand_over", "1: Hand-Over"]),
    ],
)
def test_words_are_found_in_text_and_in_names(text: str, hits: list[str]) -> None:
    assert list(found(text)) == hits


def texts(root: Path) -> Iterator[Path]:
    """The checked files of the repository: what git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        file = root / path
        if not path.startswith(GENERATED) and file.suffix not in BINARY and file.is_file():
            yield file


def found(text: str) -> Iterator[str]:
    """The words to avoid in a text, each with its line."""
    for match in PATTERN.finditer(text):
        words = re.sub(r"\s+(?:(?:#|//|\*)\s*)?", " ", match[0])
        yield f"{text.count(chr(10), 0, match.start()) + 1}: {words}"
