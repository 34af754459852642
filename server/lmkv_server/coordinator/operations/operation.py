"""One move, copy or clear: what is known of it, whoever sees it through. Used by `Operations`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.message import Message

from lmkv.errors import LmkvError, OperationCancelled
from lmkv.v1 import cache_service_pb2

Request: TypeAlias = cache_service_pb2.MoveRequest | cache_service_pb2.ClearRequest
Progress: TypeAlias = cache_service_pb2.MoveProgress | cache_service_pb2.ClearProgress

OPERATION_BYTES = 2048
"""What an operation takes besides its messages, about."""


@dataclass(kw_only=True, eq=False)
class Operation:
    """One piece of work. Times are in seconds since 1970."""

    name: str
    kind: str
    """`move`, `copy` or `clear`."""
    progress: Progress
    """The work keeps it up to date."""
    request: Request | None
    """None where it was too long to be told."""
    create_time: float
    expire_time: float
    """When it ends, however far it is."""
    attempt: int = 1
    """Rises with each coordinator that takes it over."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once somebody wants it to stop; the work looks at it."""
    result: Message | None = None
    """What it did, once it has succeeded, wholly or in part."""
    error: LmkvError | None = None
    """Why it did nothing, or stopped."""
    end_time: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """What drives it, if it is driven here."""
    keepers: set[str] = field(default_factory=set)
    """Ids of the instances that keep, or shall keep, its record."""
    size_bytes: int = 0
    """What it takes here, about."""
    owner: str = ""
    """Id of the instance that reported its record first; empty if it was booked here."""
    kept: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once one of them does."""

    def measure(self, work_bytes: int = 0) -> int:
        """Bytes that it takes, about, with `work_bytes` for the work on it."""
        parts = (self.progress, self.request, self.result)
        return OPERATION_BYTES + work_bytes + sum(part.ByteSize() for part in parts if part is not None)

    @property
    def done(self) -> bool:
        """Whether it is over, one way or the other."""
        return self.end_time is not None

    @property
    def driven(self) -> bool:
        """Whether it is this coordinator that sees it through."""
        return self.task is not None and not self.done

    @property
    def rank(self) -> tuple[int, bool]:
        """What counts where coordinators know different things of it; see `lmkv.operation_records`."""
        return self.attempt, self.done

    @property
    def order(self) -> str:
        """Rises with the time of the beginning."""
        return self.name.rpartition("-")[2]

    @property
    def state(self) -> str:
        """`running`, `done`, `failed` or `cancelled`."""
        if not self.done:
            return "running"
        if isinstance(self.error, OperationCancelled):
            return "cancelled"
        return "failed" if self.error else "done"

    async def wait(self, timeout_seconds: float) -> bool:
        """Waits until it is over; whether it is."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ended.wait()
        except TimeoutError:
            pass
        return self.done
