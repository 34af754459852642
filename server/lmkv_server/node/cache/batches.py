"""Splits items into batches by bytes and count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class HasSize(Protocol):
    """An item with a size."""

    @property
    def size_bytes(self) -> int: ...


Item = TypeVar("Item", bound=HasSize)


def batched(items: Iterable[Item], size_bytes: int, max_count: int = 1 << 30) -> Iterator[list[Item]]:
    """The items in order, in batches that each end with the item that reaches `size_bytes` or `max_count`."""
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        batch.append(item)
        batch_bytes += item.size_bytes
        if batch_bytes >= size_bytes or len(batch) >= max_count:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch
