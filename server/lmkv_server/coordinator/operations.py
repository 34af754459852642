"""Long-running work that can be asked for, waited for and cancelled: the operations behind `Move` and `Clear`.

One event loop owns them. They are soft state. A name says when its operation began: one from before the start of this
coordinator is over, and what it had done until then stays done.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.message import Message

from lmkv import telemetry
from lmkv.errors import BadSelection, CoordinatorRestarted, Full, LmkvError, OperationCancelled, OperationNotFound
from lmkv.v1 import cache_service_pb2

logger = logging.getLogger(__name__)

MAX_RUNNING = 256
MAX_ENDED = 10_000
"""Operations that are kept to be asked about after they ended; the oldest give way."""
_NAME = re.compile(r"(?P<kind>move|copy|clear)-(?P<begun>[0-9a-f]{16})")


Request: TypeAlias = cache_service_pb2.MoveRequest | cache_service_pb2.ClearRequest
Progress: TypeAlias = cache_service_pb2.MoveProgress | cache_service_pb2.ClearProgress


@dataclass(kw_only=True, eq=False)
class Operation:
    """One piece of work. Times are in seconds since 1970."""

    name: str
    kind: str
    """`move`, `copy` or `clear`."""
    progress: Progress
    """The work keeps it up to date."""
    request: Request
    create_time: float
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once somebody wants it to stop; the work looks at it."""
    result: Message | None = None
    """What it did, once it has succeeded, wholly or in part."""
    error: LmkvError | None = None
    """Why it did nothing, or stopped."""
    end_time: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, one way or the other."""
        return self.end_time is not None

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
        if not self.done:  # one of an earlier coordinator has no end left to wait for
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self.ended.wait()
            except TimeoutError:
                pass
        return self.done


Work = Callable[[Operation], Awaitable[Message]]
"""Does what the operation is for. Raises an `LmkvError` if it did nothing, or was stopped."""


class Operations:
    """All operations of one coordinator, by name. Those that ended are kept for `ttl_seconds`."""

    def __init__(self, ttl_seconds: float) -> None:
        self.ended_counts: dict[tuple[str, str], int] = {}
        """Operations that ended since the start, by kind and state."""
        self._ttl_seconds = ttl_seconds
        self._start_ns = self._last_ns = time.time_ns()
        self._running: dict[str, Operation] = {}
        self._ended: OrderedDict[str, Operation] = OrderedDict()  # by the time of their end
        self._by_request_id: dict[tuple[str, str], Operation] = {}

    def running(self) -> list[Operation]:
        """Those that are not over, oldest first."""
        return list(self._running.values())

    def newest_first(self) -> list[Operation]:
        """All that are known, by the time they began."""
        self._expire()
        known = [*self._running.values(), *self._ended.values()]
        return sorted(known, key=lambda operation: operation.order, reverse=True)

    def repeated(self, request: Request) -> Operation | None:
        """The operation that an earlier call with the same `request_id` began.

        Raises `BadSelection` if that call was for something else.
        """
        known = self._by_request_id.get((request.DESCRIPTOR.name, request.request_id))
        if known and known.request != request:
            raise BadSelection(
                f"request_id {request.request_id[:100]!r} was used for another request; choose a new one",
                request_id=request.request_id[:100],
            )
        return known

    def start(self, kind: str, request: Request, progress: Progress, work: Work) -> Operation:
        """Begins an operation. Raises `Full` if too many are running."""
        self._expire()
        if len(self._running) >= MAX_RUNNING:
            raise Full(f"{MAX_RUNNING} operations are running; wait for one, or cancel one", retry_seconds=1)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        operation = Operation(
            name=f"{kind}-{self._last_ns:016x}",
            kind=kind,
            progress=progress,
            request=request,
            create_time=self._last_ns / 1e9,
        )
        self._running[operation.name] = operation
        if request.request_id:
            self._by_request_id[request.DESCRIPTOR.name, request.request_id] = operation
        operation.task = asyncio.create_task(self._observe(operation, work), name=operation.name)
        return operation

    def get(self, name: str) -> Operation:
        """The operation of this name; one of an earlier coordinator is over, with `CoordinatorRestarted`.

        Raises `OperationNotFound`.
        """
        self._expire()
        if known := self._running.get(name) or self._ended.get(name):
            return known
        match = _NAME.fullmatch(name)
        if match is None or int(match["begun"], 16) >= self._start_ns:
            raise OperationNotFound(
                f"there is no operation {name[:100]!r}; those that ended are kept for {self._ttl_seconds:g} s",
                name=name[:100],
            )
        return _of_earlier_coordinator(name, match["kind"])

    def cancel(self, name: str) -> None:
        """Asks an operation to stop; one that is over is no error. Raises `OperationNotFound`."""
        self.get(name).cancelled.set()

    def delete(self, name: str) -> None:
        """Forgets an operation that is over; one that runs is still known. Raises `OperationNotFound`."""
        self._forget(self.get(name))

    async def aclose(self) -> None:
        """Ends all that run, wherever they are."""
        tasks = [operation.task for operation in self.running() if operation.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _observe(self, operation: Operation, work: Work) -> None:
        """Runs it as a span of the trace that it was asked for in; what is logged meanwhile carries its id."""
        name = operation.name
        with telemetry.bound(operation_id=name), telemetry.begin(f"lmkv.{operation.kind}", operation_id=name) as span:
            await self._run(operation, work)
            if operation.error:
                span.fail(operation.error.reason, str(operation.error))

    async def _run(self, operation: Operation, work: Work) -> None:
        try:
            operation.result = await work(operation)
        except LmkvError as error:
            operation.error = error
        except Exception as error:
            logger.exception("operation %s failed unexpectedly", operation.name)
            operation.error = LmkvError(f"{operation.name} failed unexpectedly: {error!r}; see the coordinator's log")
        finally:
            operation.end_time = time.time()
            operation.progress.end_time.FromNanoseconds(round(operation.end_time * 1e9))
            operation.ended.set()
            self._ended[operation.name] = self._running.pop(operation.name)
            outcome = (operation.kind, operation.state)
            self.ended_counts[outcome] = self.ended_counts.get(outcome, 0) + 1
            seconds = operation.end_time - operation.create_time
            why = f": {operation.error}" if operation.error else ""
            logger.info("%s: %s after %.2f s%s", operation.name, operation.state, seconds, why)

    def _expire(self) -> None:
        """Forgets what ended too long ago, or gives way."""
        oldest = time.time() - self._ttl_seconds
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and (first.end_time or 0) >= oldest:
                return
            self._forget(first)

    def _forget(self, operation: Operation) -> None:
        if self._ended.pop(operation.name, None):
            self._by_request_id.pop((operation.request.DESCRIPTOR.name, operation.request.request_id), None)


def _of_earlier_coordinator(name: str, kind: str) -> Operation:
    is_clear = kind == "clear"
    return Operation(
        name=name,
        kind=kind,
        progress=cache_service_pb2.ClearProgress() if is_clear else cache_service_pb2.MoveProgress(),
        request=cache_service_pb2.ClearRequest() if is_clear else cache_service_pb2.MoveRequest(),
        create_time=0.0,
        error=CoordinatorRestarted(
            f"{name} ended with the coordinator that ran it; no chunk was lost: look up where they are, and repeat it",
            name=name,
        ),
        end_time=time.time(),
    )
