"""Long-running work that can be started, waited for and cancelled: the operations behind `Move`, `Clear` and `Drain`.

    start ──► running ──► ended ──ttl──► forgotten
                 └── the coordinator stops: a caller that repeats the request continues the work, here or elsewhere

An operation belongs to the coordinator that started it; no other process can change how it ends. If that coordinator
is gone, so is the operation, and its caller repeats the request with the same `request_id`: what was done stays done,
and the repeat does the rest. SDKs and CLI repeat by themselves.

One event loop owns them. An operation's name contains its start time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from google.longrunning import operations_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from google.rpc import status_pb2

from lmkv import rpc, telemetry
from lmkv.errors import BadMessage, BadSelection, Full, LmkvError, OperationCancelled, OperationNotFound
from lmkv.v1 import cache_service_pb2, chunk_pb2

logger = logging.getLogger(__name__)

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
    """The request; None if another coordinator runs the operation."""
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


MAX_ENDED = 10_000
"""Ended operations that are kept; the oldest are evicted. As many may be running."""
MAX_BYTES = 64 << 20
"""Maximum size of all operations of a tenant. Ended operations are evicted, the oldest first."""
MAX_REQUEST_ID_BYTES = 256


def kind_of(request: Request) -> str:
    """The kind of the operation that a request starts, with which its name begins."""
    if isinstance(request, cache_service_pb2.MoveRequest):
        return "copy" if request.copy else "move"
    return "drain" if isinstance(request, cache_service_pb2.DrainRequest) else "clear"


class OperationTable:
    """Operations by name and by request id.

    Ended operations are kept for `ttl_seconds` by the monotonic clock: a jump of the wall clock loses none.
    """

    def __init__(self, ttl_seconds: float) -> None:
        self.ttl_seconds = ttl_seconds
        self._running: dict[str, Operation] = {}
        self._ended: OrderedDict[str, Operation] = OrderedDict()  # in the order in which they were stored
        self._ended_since: dict[str, float] = {}  # by the monotonic clock
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self._sizes: dict[str, int] = {}
        self.used_bytes = 0
        """Approximate size of all operations."""

    def running(self) -> list[Operation]:
        """The operations that have not ended, oldest first."""
        return list(self._running.values())

    def all(self) -> list[Operation]:
        return [*self._running.values(), *self._ended.values()]

    def find(self, name: str) -> Operation | None:
        return self._running.get(name) or self._ended.get(name)

    def repeated(self, request: Request) -> Operation | None:
        """The operation that an earlier call with the same `request_id` started.

        Raises `BadSelection` if that call was another request, `BadMessage` if the id is too long.
        """
        if (size_bytes := len(request.request_id.encode())) > MAX_REQUEST_ID_BYTES:
            raise BadMessage(
                f"request_id has {size_bytes} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed: send a UUID"
            )
        known = self._by_request_id.get((request.DESCRIPTOR.name, request.request_id))
        if known and known.request != request:
            raise BadSelection(
                f"request_id {request.request_id[:100]!r} was used for another request; choose a new one",
                request_id=request.request_id[:100],
            )
        return known

    def store(self, operation: Operation) -> None:
        """Adds an operation, or files it again after it changed, with its current size."""
        self._running.pop(operation.name, None)
        self._ended.pop(operation.name, None)
        if operation.done:
            self._ended[operation.name] = operation
            self._ended_since.setdefault(operation.name, time.monotonic())
        else:
            self._running[operation.name] = operation
            self._ended_since.pop(operation.name, None)
        self.used_bytes += operation.size_bytes - self._sizes.get(operation.name, 0)
        self._sizes[operation.name] = operation.size_bytes
        request = operation.request
        if request and request.request_id:
            self._by_request_id[request.DESCRIPTOR.name, request.request_id] = operation

    def make_room(self, size_bytes: int) -> bool:
        """Forgets ended operations, the oldest first, until one of this size fits; returns whether it does."""
        while self.used_bytes + size_bytes > MAX_BYTES and self._ended:
            self.forget(next(iter(self._ended.values())))
        return self.used_bytes + size_bytes <= MAX_BYTES

    def forget(self, operation: Operation) -> None:
        """Removes an operation if it has ended."""
        if self._ended.pop(operation.name, None):
            del self._ended_since[operation.name]
            self.used_bytes -= self._sizes.pop(operation.name)
            if request := operation.request:
                self._by_request_id.pop((request.DESCRIPTOR.name, request.request_id), None)

    def expire(self) -> None:
        """Removes operations that ended too long ago, and the oldest of too many."""
        oldest = time.monotonic() - self.ttl_seconds
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and self._ended_since[first.name] >= oldest:
                return
            self.forget(first)


MAX_RUNNING = 256
"""Operations that run at a time."""
LONGEST_SECONDS = 600.0
"""Longest duration of an operation."""


class Work(Protocol):
    """The work of an operation: a move, a clear or a drain."""

    progress: Any
    """The `Progress` of the operation, which it updates."""

    @property
    def size_bytes(self) -> int:
        """The memory that it needs."""

    async def run(self, operation: Operation) -> Message:
        """Does it and returns the result. Raises `LmkvError` if it did nothing, or was stopped."""


class Operations:
    """All operations of one tenant that this coordinator has started. Ended operations are kept for `ttl_seconds`."""

    def __init__(self, ttl_seconds: float) -> None:
        self.ttl_seconds = ttl_seconds
        self.ended_counts: dict[tuple[str, str], int] = {}
        """Operations that ended since the process started, by kind and state."""
        self.changed = asyncio.Event()
        """Set when an operation starts, ends or is deleted."""
        self._last_ns = time.time_ns()
        self._table = OperationTable(ttl_seconds)

    @property
    def used_bytes(self) -> int:
        """Approximate size of all operations."""
        return self._table.used_bytes

    def running(self) -> list[Operation]:
        """The operations that run, oldest first."""
        return self._table.running()

    def newest_first(self) -> list[Operation]:
        """All operations, by start time."""
        self._table.expire()
        return sorted(self._table.all(), key=lambda operation: operation.start_key, reverse=True)

    def repeated(self, request: Request) -> Operation | None:
        """The operation that an earlier call with the same `request_id` started.

        Raises `BadSelection` if that call was another request, `BadMessage` if the id is too long.
        """
        self._table.expire()
        return self._table.repeated(request)

    def find(self, name: str) -> Operation | None:
        self._table.expire()
        return self._table.find(name)

    def get(self, name: str) -> Operation:
        """The operation of this name. Raises `OperationNotFound`."""
        if known := self.find(name):
            return known
        raise OperationNotFound(
            f"there is no operation {name[:100]!r} here: its coordinator has restarted or is another one, or it ended "
            f"more than {self.ttl_seconds:g} s ago; to finish it, repeat the call with the same request_id, which "
            "continues what was done",
            name=name[:100],
        )

    def delete(self, name: str) -> None:
        """Forgets an operation if it has ended. Raises as `get`."""
        self._table.forget(self.get(name))
        self.changed.set()

    def start(self, request: Request, work: Work, seconds: float) -> Operation:
        """Starts an operation that ends after `seconds` at the latest.

        Raises `Full` if too many operations run, or too large ones.
        """
        self._table.expire()
        if len(self.running()) >= MAX_RUNNING:
            raise Full(f"{MAX_RUNNING} operations are running; wait for one, or cancel one", retry_seconds=1)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        kind = kind_of(request)
        operation = Operation(
            name=f"{kind}-{self._last_ns:016x}",
            kind=kind,
            progress=work.progress,
            request=request,
            create_time=self._last_ns / 1e9,
            expire_time=self._last_ns / 1e9 + seconds,
        )
        operation.size_bytes = operation.measure(work.size_bytes)
        if not self._table.make_room(operation.size_bytes):
            raise Full(
                f"the running operations use {self.used_bytes} bytes, at most {MAX_BYTES} are allowed; wait for one, "
                "or cancel one",
                retry_seconds=1,
            )
        self._table.store(operation)
        self.changed.set()
        operation.task = asyncio.create_task(self._observe(operation, work), name=operation.name)
        return operation

    async def aclose(self) -> None:
        """Stops running operations. They do not end: who waits for one repeats the request."""
        tasks = [operation.task for operation in self.running() if operation.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _observe(self, operation: Operation, work: Work) -> None:
        """Runs it in a span of the request's trace; log lines meanwhile carry its name."""
        name = operation.name
        with telemetry.bound(operation_id=name), telemetry.begin(f"lmkv.{operation.kind}", operation_id=name) as span:
            await self._run(operation, work)
            if operation.error:
                span.fail(operation.error.reason, str(operation.error))

    async def _run(self, operation: Operation, work: Work) -> None:
        try:
            operation.result = await work.run(operation)
        except LmkvError as failure:
            operation.error = failure
        except Exception as failure:
            logger.exception("operation %s failed unexpectedly", operation.name)
            operation.error = LmkvError(f"{operation.name} failed unexpectedly: {failure!r}; see the coordinator's log")
        now_ns = time.time_ns()
        operation.progress.end_time.FromNanoseconds(now_ns)
        operation.end_time = now_ns / 1e9
        operation.task = None
        operation.ended.set()
        operation.size_bytes = operation.measure()
        self._table.store(operation)
        self._table.make_room(0)
        self.changed.set()
        outcome = (operation.kind, operation.state)
        self.ended_counts[outcome] = self.ended_counts.get(outcome, 0) + 1
        seconds = operation.end_time - operation.create_time
        reason = f": {operation.error}" if operation.error else ""
        logger.info("%s: %s after %.2f s%s", operation.name, operation.state, seconds, reason)
