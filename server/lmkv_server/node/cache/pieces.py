"""Long work on many chunks, cut into pieces: what may stop in between, or be told of as it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What takes so many bytes."""

    @property
    def size_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


def pieces(items: Iterable[Item], size_bytes: int, max_count: int = 1 << 30) -> Iterator[list[Item]]:
    """The items in order, as many at a time as have `size_bytes` together, the last of them included."""
    piece: list[Item] = []
    taken_bytes = 0
    for item in items:
        piece.append(item)
        taken_bytes += item.size_bytes
        if taken_bytes >= size_bytes or len(piece) >= max_count:
            yield piece
            piece, taken_bytes = [], 0
    if piece:
        yield piece
