"""What `Store` raises when it is of no use any more, and `SharedMap` takes in; and how several calls fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class StoreLost(Exception):
    """The store does not answer, refuses, or is another one than it was: connect anew."""


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all calls answer. Raises `StoreLost` if one of them does, when the others have ended, too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except* StoreLost as lost:
        raise lost.exceptions[0] from None
    return [task.result() for task in tasks]
