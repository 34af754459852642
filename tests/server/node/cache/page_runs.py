"""The rule of the free list, over a naive map of pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def first_page(is_free: Sequence[bool], count: int, largest: int) -> int | None:
    """The first of the pages that a take of `count` pages gets, where `largest` is the largest take so far."""
    runs = []
    for free, group in groupby(range(len(is_free)), lambda page: is_free[page]):
        pages = list(group)
        if free and len(pages) >= count:
            runs.append(pages)
    if not runs:
        return None
    if count >= largest:
        return runs[0][0]
    return min(reversed(runs), key=len)[-count]
