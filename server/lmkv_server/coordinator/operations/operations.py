"""Long-running work that can be asked for, waited for and cancelled: the operations behind `Move` and `Clear`.

One event loop owns them. Some run at this coordinator, others at another one; nodes report those (see
`OperationReplicator`). An operation's name contains its start time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from google.protobuf.message import Message

from lmkv import telemetry
from lmkv.errors import BadMessage, BadSelection, Full, LmkvError, OperationNotFound, OperationTakenOver, Unreachable
from lmkv.operation_records import MAX_RECORD_BYTES
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv_server.coordinator.core.budget import Budget
from lmkv_server.coordinator.operations.operation import Operation, Progress, Request

logger = logging.getLogger(__name__)
_log = LimitedLogger(logger)

MAX_RUNNING = 256
"""Operations that are driven here at a time."""
MAX_ENDED = 10_000
"""Operations that are kept to be asked about after they ended; the oldest give way. As many may run."""
LONGEST_SECONDS = 600.0
"""No operation runs longer."""
MAX_BYTES = 64 << 20
"""What all operations of a tenant take; those that ended give way, the oldest first."""
MAX_REQUEST_ID_BYTES = 256
MAX_KEEPERS = 3
"""Instances that keep the record of one operation: one that is left is enough."""
SILENT_SECONDS = 60.0
"""How long after its time was up nothing is heard of an operation elsewhere before it is taken to be lost."""
_NAME = re.compile(r"(?P<kind>move|copy|clear)-(?P<begun>[0-9a-f]{16})")


Work = Callable[[Operation], Awaitable[Message]]
"""Does what the operation is for. Raises an `LmkvError` if it did nothing, or was stopped."""


class Operations:
    """All operations that one coordinator knows, by name. Those that ended are kept for `ttl_seconds`.

    `is_partial` says whether nodes have yet to tell of some, which they do `news_seconds` after the fact at the latest.
    """

    def __init__(
        self, ttl_seconds: float, *, is_partial: Callable[[], bool] = lambda: False, news_seconds: float = 0.0
    ) -> None:
        self.ttl_seconds = ttl_seconds
        self.on_change: Callable[[Operation], None] = lambda _: None
        """Called when one that is driven here has begun, or ended."""
        self.ended_counts: dict[tuple[str, str], int] = {}
        """Operations that ended here since the start, by kind and state."""
        self._is_partial = is_partial
        self._news_seconds = news_seconds
        self._last_ns = time.time_ns()
        self._running: dict[str, Operation] = {}
        self._ended: OrderedDict[str, Operation] = OrderedDict()  # by the time of their end
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self._budget = Budget(owner_bytes=MAX_RECORD_BYTES, total_bytes=MAX_BYTES)

    @property
    def used_bytes(self) -> int:
        """What all of them take, about."""
        return self._budget.used_bytes

    @property
    def may_drive(self) -> bool:
        """Whether one more may be driven here."""
        return len(self.driven()) < MAX_RUNNING

    def driven(self) -> list[Operation]:
        """Those that this coordinator sees through, oldest first."""
        return [operation for operation in self._running.values() if operation.driven]

    def newest_first(self) -> list[Operation]:
        """All that are known, by the time they began."""
        self._expire()
        known = [*self._running.values(), *self._ended.values()]
        return sorted(known, key=lambda operation: operation.order, reverse=True)

    def repeated(self, request: Request) -> Operation | None:
        """The operation that an earlier call with the same `request_id` began.

        Raises `BadSelection` if that call was for something else, `BadMessage` if the id is too long.
        """
        if (size_bytes := len(request.request_id.encode())) > MAX_REQUEST_ID_BYTES:
            raise BadMessage(
                f"request_id has {size_bytes} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed: send a UUID"
            )
        self._expire()
        known = self._by_request_id.get((request.DESCRIPTOR.name, request.request_id))
        if known and known.request != request:
            raise BadSelection(
                f"request_id {request.request_id[:100]!r} was used for another request; choose a new one",
                request_id=request.request_id[:100],
            )
        return known

    # --- Driving -------------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        request: Request,
        progress: Progress,
        work: Work,
        *,
        seconds: float,
        keepers: Iterable[str],
        work_bytes: int = 0,
    ) -> Operation:
        """Begins an operation that ends after so many seconds at the latest; some of `keepers` shall keep its record.

        The work on it takes `work_bytes`. Raises `Full` if too many are running, or too large ones.
        """
        self._expire()
        if not self.may_drive:
            raise Full(f"{MAX_RUNNING} operations are running; wait for one, or cancel one", retry_seconds=1)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        operation = Operation(
            name=f"{kind}-{self._last_ns:016x}",
            kind=kind,
            progress=progress,
            request=request,
            create_time=self._last_ns / 1e9,
            expire_time=self._last_ns / 1e9 + seconds,
            keepers=set(islice(keepers, MAX_KEEPERS)),
        )
        operation.size_bytes = operation.measure(work_bytes)
        if not self._has_room(operation.name, "", operation.size_bytes):
            raise Full(
                f"the operations that are running take {self.used_bytes} bytes, at most {MAX_BYTES} are allowed; wait "
                "for one, or cancel one",
                retry_seconds=1,
            )
        self._running[operation.name] = operation
        self._note_size(operation)
        self._note_request_id(operation)
        self._drive(operation, work)
        return operation

    def take_over(self, operation: Operation, work: Work) -> None:
        """Goes on with one that nobody drives, and that is not over."""
        operation.attempt += 1
        logger.info("%s: taken over, attempt %d", operation.name, operation.attempt)
        self._drive(operation, work)

    def _drive(self, operation: Operation, work: Work) -> None:
        operation.task = asyncio.create_task(self._observe(operation, work), name=operation.name)
        self.on_change(operation)

    # --- Asking --------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Operation:
        """The operation of this name. Raises `OperationNotFound`, and `Unreachable` if it may yet be told of."""
        self._expire()
        if known := self._running.get(name) or self._ended.get(name):
            return known
        if self._may_be_told(name):
            raise Unreachable(f"this coordinator has yet to hear of {name}; ask again in a moment", name=name)
        raise OperationNotFound(
            f"there is no operation {name[:100]!r}; those that ended are kept for {self.ttl_seconds:g} s, "
            "unless all nodes that they concerned are gone",
            name=name[:100],
        )

    def _may_be_told(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None or name in self._forgotten:
            return False
        seconds = time.time() - int(match["begun"], 16) / 1e9
        if abs(seconds) < self._news_seconds:
            return True
        return self._is_partial() and 0 < seconds < self.ttl_seconds + LONGEST_SECONDS + SILENT_SECONDS

    def delete(self, name: str) -> None:
        """Forgets an operation that is over; one that runs is still known. Raises as `get`."""
        self._forget(self.get(name))

    async def aclose(self) -> None:
        """Drives nothing any more. What runs is not over: whoever is told of it goes on."""
        tasks = []
        for operation in self.driven():
            if task := operation.task:
                task.cancel()
                tasks.append(task)
            operation.task = None
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- What is told of others ----------------------------------------------------------------------------------

    def hear(self, told: Operation, owner: str) -> Operation | None:
        """Takes in what an instance reports of an operation, unless more is known. What is known.

        None if it was forgotten, or if there is no room for it.
        """
        if told.name in self._forgotten or not _NAME.fullmatch(told.name):
            return None
        known = self._running.get(told.name) or self._ended.get(told.name)
        if known is None and len(self._running) + len(self._ended) > 2 * MAX_ENDED:
            return None
        if known is None or told.rank > known.rank:
            told.owner = owner if known is None else known.owner
            if known is not None and known.request is not None:
                told.size_bytes += known.request.ByteSize()
            if not self._has_room(told.name, told.owner, told.size_bytes):
                _log.warning("no room for what instance %s reports of %s", owner, told.name)
                return known
            known = self._become(known or told, told)
        if told.cancelled.is_set():
            known.cancelled.set()
        return known

    def _become(self, known: Operation, told: Operation) -> Operation:
        """Makes an operation what was told of it; if it is driven here, it is so no longer."""
        if known.task:
            known.task.cancel()
            known.task = None
        self._running.pop(known.name, None)
        self._ended.pop(known.name, None)
        known.attempt, known.progress = told.attempt, told.progress
        known.result, known.error, known.end_time = told.result, told.error, told.end_time
        known.size_bytes = told.size_bytes
        (self._ended if known.done else self._running)[known.name] = known
        self._note_size(known)
        if known.done:
            known.ended.set()
        else:
            known.ended.clear()
        self._note_request_id(known)
        return known

    # --- Inside --------------------------------------------------------------------------------------------------

    def _has_room(self, name: str, owner: str, size_bytes: int) -> bool:
        """Whether an operation may take so much, once those that ended have given way: the owner's, then the oldest."""
        while not self._budget.fits(owner, name, size_bytes):
            is_owners = not self._budget.owner_fits(owner, name, size_bytes)
            ended = self._budget.items(owner) if is_owners else iter(self._ended)
            first = next((self._ended[one] for one in ended if one != name and one in self._ended), None)
            if first is None:
                return False
            self._forget(first)
        return True

    def _note_size(self, operation: Operation) -> None:
        self._budget.set(operation.owner, operation.name, operation.size_bytes)

    def _note_request_id(self, operation: Operation) -> None:
        request = operation.request
        if request and request.request_id:
            self._by_request_id[request.DESCRIPTOR.name, request.request_id] = operation

    async def _observe(self, operation: Operation, work: Work) -> None:
        """Runs it as a span of the trace that it was asked for in; what is logged meanwhile carries its id."""
        name = operation.name
        with telemetry.bound(operation_id=name), telemetry.begin(f"lmkv.{operation.kind}", operation_id=name) as span:
            await self._run(operation, work)
            if operation.error:
                span.fail(operation.error.reason, str(operation.error))

    async def _run(self, operation: Operation, work: Work) -> None:
        """Sees it through to its end, unless somebody else does: then this is cancelled, or told so by a node."""
        result: Message | None = None
        error: LmkvError | None = None
        try:
            result = await work(operation)
        except OperationTakenOver as taken:
            logger.warning("%s", taken)
            operation.task = None
            return
        except LmkvError as failure:
            error = failure
        except Exception as failure:
            logger.exception("operation %s failed unexpectedly", operation.name)
            error = LmkvError(f"{operation.name} failed unexpectedly: {failure!r}; see the coordinator's log")
        if operation.task is not asyncio.current_task():  # somebody else sees it through by now
            return
        self._end(operation, result, error)
        outcome = (operation.kind, operation.state)
        self.ended_counts[outcome] = self.ended_counts.get(outcome, 0) + 1
        self.on_change(operation)

    def _end(self, operation: Operation, result: Message | None, error: LmkvError | None) -> None:
        operation.result, operation.error = result, error
        operation.end_time = time.time()
        operation.progress.end_time.FromNanoseconds(round(operation.end_time * 1e9))
        operation.ended.set()
        self._ended[operation.name] = self._running.pop(operation.name)
        operation.size_bytes = operation.measure()
        self._note_size(operation)
        self._has_room(operation.name, operation.owner, operation.size_bytes)
        seconds = operation.end_time - operation.create_time
        why = f": {operation.error}" if operation.error else ""
        logger.info("%s: %s after %.2f s%s", operation.name, operation.state, seconds, why)

    def _expire(self) -> None:
        """Forgets what ended too long ago, or gives way; ends what ran elsewhere, and nobody tells of any more."""
        now = time.time()
        for operation in list(self._running.values()):
            if now > operation.expire_time + SILENT_SECONDS and not operation.driven:
                lost = Unreachable(f"nobody tells of {operation.name} any more; look up where its chunks are")
                self._end(operation, None, lost)
        oldest = now - self.ttl_seconds
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and (first.end_time or 0) >= oldest:
                return
            self._forget(first)

    def _forget(self, operation: Operation) -> None:
        if self._ended.pop(operation.name, None):
            self._budget.drop(operation.owner, operation.name)
            self._forgotten[operation.name] = None
            if len(self._forgotten) > MAX_ENDED:
                self._forgotten.popitem(last=False)
            if request := operation.request:
                self._by_request_id.pop((request.DESCRIPTOR.name, request.request_id), None)
