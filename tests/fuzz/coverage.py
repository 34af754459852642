"""Selects inputs by the lines that they cover: `python -m tests.fuzz.coverage TARGET FOLDER [--keep]`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fuzz.harness import FOUND, Line, Target, code_lines, load_target, measure

MAX_KEPT_BYTES = 4 << 10
"""Size of the inputs of one target that are committed because the fuzzer found them."""


def main(name: str, folder: Path, *, keep: bool) -> None:
    """Prints the coverage of a target's corpus and of the fuzzer's; with `keep`, adds inputs to the committed one."""
    target = load_target(name)
    lines = code_lines(target.covers)
    covered: set[Line] = set()
    for data in target.corpus():
        covered |= measure(target, data)
    committed = len(covered & lines)
    kept: list[bytes] = []
    room = MAX_KEPT_BYTES
    for data in sorted(
        (file.read_bytes() for file in (folder / "corpus").iterdir()), key=lambda data: (len(data), data)
    ):
        new = (measure(target, data) & lines) - covered
        covered |= new
        if new and len(repr(data)) <= room:
            kept.append(data)
            room -= len(repr(data))
    if keep and kept:
        _append(target, kept)
    print(f"{len(covered & lines)} of {len(lines)} lines, {committed} of them by the committed corpus")


def _append(target: Target, kept: list[bytes]) -> None:
    file = target.corpus_file
    text = file.read_text() if file.exists() else ""
    if FOUND not in text:
        text += f"{FOUND}\n"
    file.write_text(text + "".join(f"{data!r}\n" for data in kept))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), keep="--keep" in sys.argv)
