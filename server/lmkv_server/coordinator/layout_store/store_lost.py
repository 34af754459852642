"""The error that ends a connection to the shared store, and how concurrent calls raise it. Needs no store's client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class StoreLost(Exception):
    """The store does not answer, refuses, or holds another map than before: connect again."""


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls concurrently and returns their results. Raises `StoreLost` if one does, after all have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except* StoreLost as lost:
        raise lost.exceptions[0] from None
    return [task.result() for task in tasks]
