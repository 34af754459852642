"""Output of the commands: tables, JSON, and the words for counts, times and sizes."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lmkv.safe_text import safe_text
from lmkv.units import format_bytes, format_duration
from lmkv.v1.registry_service_pb2 import Instance, TierUsage


def print_json(message: Message) -> None:
    """Prints a message with the field names of its proto, including empty fields."""
    print(json.dumps(to_json(message), indent=2))


def to_json(message: Message) -> dict[str, Any]:
    """The fields of a message with the names of its proto, including empty ones."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def count(number: int, noun: str) -> str:
    """`1 chunk`, `1,024 chunks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def seconds_until(moment: Timestamp) -> float:
    """Seconds until `moment`; negative if it has passed."""
    return moment.ToNanoseconds() / 1e9 - time.time()


STANDBY = "0, standby"
"""The engines of a node that stays without any: it takes copies of the chunks of every registered spec."""


def engines(instance: Instance) -> str:
    """Its attached engines; without any, also when the node ends unless one attaches, or that it is a standby node."""
    if instance.engine_count:
        return str(instance.engine_count)
    if not instance.HasField("end_time"):
        return STANDBY
    return f"0, ends in {format_duration(max(1, round(seconds_until(instance.end_time))))}"


def format_fill(tier: TierUsage) -> str:
    """Used bytes of a tier, and its capacity if it has a limit: `0.63/5.00 GiB`, `512 MiB/5.00 GiB`."""
    used = format_bytes(tier.used_bytes)
    if not tier.capacity_bytes:
        return used
    capacity = format_bytes(tier.capacity_bytes)
    number, _, unit = used.partition(" ")
    return f"{number if capacity.endswith(f' {unit}') else used}/{capacity}"


def in_order(instances: Iterable[Instance]) -> list[Instance]:
    """The instances by name, numbers by their value: `lmkv-2` is before `lmkv-10`."""

    def order(instance: Instance) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", instance.instance_id)
        return [(int(part) if part.isdecimal() else -1, part) for part in parts]

    return sorted(instances, key=order)


MAX_CELL_CHARACTERS = 1_000
"""Maximum length of a table cell: nodes choose the names of models."""


class Number(str):
    """The heading of a column of numbers. Such a column is aligned to the right."""

    __slots__ = ()


class Items(str):
    """The heading of a column of lists. A terminal shows an item a line."""

    __slots__ = ()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: with a frame on a terminal, else as aligned columns for other programs.

    On a terminal that is too narrow, each row becomes lines of a heading and its cell, without empty cells. Cells are
    never cut: people copy addresses and ids from them.
    """
    if not sys.stdout.isatty():
        print("\n".join(align(columns, rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [
        [
            safe_text(cell, MAX_CELL_CHARACTERS).replace(", ", "\n" if isinstance(column, Items) else ", ")
            for column, cell in zip(columns, row, strict=True)
        ]
        for row in rows
    ]
    console = Console()
    texts = [[Text(cell) for cell in row] for row in cells]  # no markup, no emoji: `[::1:2:3]`
    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if isinstance(column, Number) else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=MAX_CELL_CHARACTERS)).maximum > console.width:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in texts:
            for column, text in zip(columns, row, strict=True):
                if text:
                    table.add_row(column, text)
            table.add_row()
    console.print(table, markup=False)


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
