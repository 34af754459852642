"""Tables of the commands: text to the left, numbers to the right."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lmkv.safe_text import safe_text

MAX_CELL_CHARACTERS = 1_000
"""Maximum length of a table cell: nodes choose the names of models."""


class Number(str):
    """The heading of a column of numbers. Such a column is aligned to the right."""

    __slots__ = ()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: with a frame on a terminal, else as aligned columns for other programs.

    Cells that do not fit are folded, never cut: people copy addresses and ids from them.
    """
    if not sys.stdout.isatty():
        print("\n".join(align(columns, rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if isinstance(column, Number) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(safe_text(cell, MAX_CELL_CHARACTERS)) for cell in row))  # no markup, no emoji: `[::1:2:3]`
    Console().print(table, markup=False)


def align(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The headings and the rows as lines. With `width`, cells of the first column are shortened so that lines fit."""
    cells = [list(columns), *([safe_text(cell, MAX_CELL_CHARACTERS) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        room = max(width - sum(widths[1:]) - 2 * len(widths[1:]), len(columns[0]))
        widths[0] = min(widths[0], room)
        for row in cells:
            row[0] = shorten(row[0], room)
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(size) if isinstance(column, Number) else cell.ljust(size)
            for column, cell, size in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def shorten(text: str, width: int) -> str:
    """Shortens the longest words in the middle until the text fits."""
    words = text.split(" ")
    sizes = [len(word) for word in words]
    while sum(sizes) + len(sizes) - 1 > width and max(sizes) > 1:
        sizes[sizes.index(max(sizes))] -= 1
    return " ".join(map(_cut, words, sizes))


def _cut(word: str, size: int) -> str:
    if len(word) <= size:
        return word
    head = size // 2
    return f"{word[:head]}…{word[len(word) - (size - 1 - head) :]}"
