"""Divides copies by KV-cache group. Used by the page copiers and `WorkerSide`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from lmkv_client.connector.worker.handles import CopyHandle, JoinedCopies
from lmkv_kernels import ChunkCopy, Pages, copied_bytes


def by_group(copies: Sequence[ChunkCopy], group_count: int) -> dict[int, list[int]]:
    """Indices of the copies of each group. Raises `ValueError` if there is no such group."""
    indices: dict[int, list[int]] = {}
    for index, copy in enumerate(copies):
        if not 0 <= copy.group < group_count:
            raise ValueError(f"copies[{index}]: group {copy.group} is not among the rank's {group_count}")
        indices.setdefault(copy.group, []).append(index)
    return indices


def grouped_bytes(pages: Sequence[Pages], copies: Sequence[ChunkCopy]) -> int:
    """Total bytes of the copies, for the heads of this rank; `pages` are those of each group."""
    if len(pages) == 1:
        return copied_bytes(pages[0], copies)
    groups = by_group(copies, len(pages))
    return sum(copied_bytes(pages[group], [copies[index] for index in own]) for group, own in groups.items())


def begin_each(
    copies: Sequence[ChunkCopy], group_count: int, begin: Callable[[int, list[ChunkCopy]], CopyHandle]
) -> CopyHandle:
    """Begins the copies of each group. If one of them cannot begin, those before it have ended when this raises."""
    groups = by_group(copies, group_count)
    begun: list[CopyHandle] = []
    try:
        for group, own in groups.items():
            begun.append(begin(group, [copies[index] for index in own]))
    except BaseException:
        with suppress(ValueError, RuntimeError):
            JoinedCopies(begun, []).wait()
        raise
    return JoinedCopies(begun, list(groups.values()))
