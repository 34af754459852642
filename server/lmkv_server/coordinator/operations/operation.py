"""The state of one move, copy, clear or drain. Used by `Operations`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from google.longrunning import operations_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from google.rpc import status_pb2

from lmkv import rpc
from lmkv.errors import LmkvError, OperationCancelled
from lmkv.v1 import cache_service_pb2, chunk_pb2

Request: TypeAlias = cache_service_pb2.MoveRequest | cache_service_pb2.ClearRequest | cache_service_pb2.DrainRequest
Progress: TypeAlias = cache_service_pb2.MoveProgress | cache_service_pb2.ClearProgress | cache_service_pb2.DrainProgress
Failures: TypeAlias = "RepeatedCompositeFieldContainer[chunk_pb2.ChunkFailure]"

OPERATION_BYTES = 2048
"""Approximate size of an operation without its messages."""


@dataclass(kw_only=True, eq=False)
class Operation:
    """One operation. Times are in seconds since 1970."""

    name: str
    kind: str
    """`move`, `copy`, `clear` or `drain`."""
    progress: Progress
    """Updated by the work."""
    request: Request | None
    """None if another coordinator runs it."""
    create_time: float
    expire_time: float
    """Deadline."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client cancels it; the work checks it."""
    result: Message | None = None
    """Set once it has succeeded, completely or in part."""
    error: LmkvError | None = None
    """Set if it did nothing, or was stopped."""
    end_time: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """The task that runs it; None before its start and after its end."""
    size_bytes: int = 0
    """Approximate size in memory."""

    def measure(self, work_bytes: int = 0) -> int:
        """Approximate size in memory, with `work_bytes` for the work."""
        parts = (self.progress, self.request, self.result)
        return OPERATION_BYTES + work_bytes + sum(part.ByteSize() for part in parts if part is not None)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.end_time is not None

    @property
    def start_key(self) -> str:
        """Sorts operations by start time."""
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
        """Waits until it has ended; returns whether it has."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ended.wait()
        except TimeoutError:
            pass
        return self.done


def add_failure(failures: Failures, chunk_keys: Sequence[bytes], status: status_pb2.Status) -> None:
    """Adds chunks to the failures of an operation; chunks with equal status share one entry."""
    for known in failures:
        if known.status == status:
            known.chunk_keys.extend(chunk_keys)
            return
    if chunk_keys:
        failures.add(chunk_keys=chunk_keys, status=status)


def to_proto(operation: Operation) -> operations_pb2.Operation:
    """The operation for clients, in its current state."""
    message = operations_pb2.Operation(name=operation.name, done=operation.done)
    message.metadata.Pack(operation.progress)
    if operation.error:
        message.error.CopyFrom(rpc.to_status(operation.error))
    elif operation.result:
        message.response.Pack(operation.result)
    return message
