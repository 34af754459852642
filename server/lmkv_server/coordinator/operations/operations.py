"""Long-running work that can be started, waited for and cancelled: the operations behind `Move`, `Clear`
and `Drain`.

One event loop owns them. Some run at this coordinator, others at another one; nodes report those (see
`OperationReplicator`). An operation's name contains its start time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice

from google.protobuf.message import Message

from lmkv import telemetry
from lmkv.errors import Full, LmkvError, OperationNotFound, OperationTakenOver, Unreachable
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv_server.coordinator.operations.operation import Operation, Progress, Request
from lmkv_server.coordinator.operations.operation_table import MAX_BYTES, OperationTable

logger = logging.getLogger(__name__)
_log = LimitedLogger(logger)

MAX_RUNNING = 256
"""Operations that run here at a time."""
LONGEST_SECONDS = 600.0
"""Longest duration of an operation."""
MAX_RECORD_HOLDERS = 3
"""Instances that store the record of one operation: one that survives is enough."""
SILENT_SECONDS = 60.0
"""An operation of another coordinator is lost this long after its deadline, or after the last instance that reported it
has started again."""
_NAME = re.compile(r"(?P<kind>move|copy|clear|drain)-(?P<begun>[0-9a-f]{16})")


Work = Callable[[Operation], Awaitable[Message]]
"""Does the work of an operation and returns its result. Raises `LmkvError` if it did nothing, or was stopped."""


class Operations:
    """All operations that one coordinator knows, by name. Ended ones are kept for `ttl_seconds`.

    `is_partial` returns whether instances have yet to report operations of other coordinators; `report_delay` is the
    number of seconds until they report one. `restarted_seconds` returns how long ago an instance registered with
    a newer epoch than the given one; 0 if it did not.
    """

    def __init__(
        self,
        ttl_seconds: float,
        *,
        is_partial: Callable[[], bool] = lambda: False,
        restarted_seconds: Callable[[str, int], float] = lambda *_: 0.0,
        report_delay: float = 0.0,
    ) -> None:
        self.ttl_seconds = ttl_seconds
        self.on_change: Callable[[Operation], None] = lambda _: None
        """Called when an operation that runs here starts or ends."""
        self.ended_counts: dict[tuple[str, str], int] = {}
        """Operations that ended here since the process started, by kind and state."""
        self._is_partial = is_partial
        self._restarted_seconds = restarted_seconds
        self._report_delay = report_delay
        self._last_ns = time.time_ns()
        self._table = OperationTable(ttl_seconds)

    @property
    def used_bytes(self) -> int:
        """Approximate size of all operations."""
        return self._table.used_bytes

    @property
    def has_capacity(self) -> bool:
        """Whether one more may run here."""
        return len(self.running_here()) < MAX_RUNNING

    def running_here(self) -> list[Operation]:
        """The operations that this coordinator runs, oldest first."""
        return [operation for operation in self._table.running() if operation.runs_here]

    def newest_first(self) -> list[Operation]:
        """All operations, by start time."""
        self._expire()
        return sorted(self._table.all(), key=lambda operation: operation.start_key, reverse=True)

    def of_kind(self, kind: str) -> list[Operation]:
        """All operations of one kind, also those of other coordinators."""
        self._expire()
        return [operation for operation in self._table.all() if operation.kind == kind]

    def repeated(self, request: Request) -> Operation | None:
        """The operation that an earlier call with the same `request_id` started.

        Raises `BadSelection` if that call was another request, `BadMessage` if the id is too long.
        """
        self._expire()
        return self._table.repeated(request)

    def get(self, name: str) -> Operation:
        """The operation of this name. Raises `OperationNotFound`, or `Unreachable` if it may still be reported."""
        self._expire()
        if known := self._table.find(name):
            return known
        if self._may_be_reported(name):
            raise Unreachable(f"no instance has reported {name} to this coordinator yet; retry shortly", name=name)
        raise OperationNotFound(
            f"there is no operation {name[:100]!r}; operations that ended are kept for {self.ttl_seconds:g} s, "
            "unless all nodes that they concerned are gone",
            name=name[:100],
        )

    def delete(self, name: str) -> None:
        """Forgets an operation that has ended; one that runs stays. Raises as `get`."""
        self._table.forget(self.get(name))

    # --- Running -------------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        request: Request,
        progress: Progress,
        work: Work,
        *,
        seconds: float,
        record_holders: Iterable[str],
        work_bytes: int = 0,
    ) -> Operation:
        """Starts an operation that ends after `seconds` at the latest; some of `record_holders` store its record.

        `work_bytes` is the memory that the work needs. Raises `Full` if too many operations run, or too large ones.
        """
        self._expire()
        if not self.has_capacity:
            raise Full(f"{MAX_RUNNING} operations are running; wait for one, or cancel one", retry_seconds=1)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        operation = Operation(
            name=f"{kind}-{self._last_ns:016x}",
            kind=kind,
            progress=progress,
            request=request,
            create_time=self._last_ns / 1e9,
            expire_time=self._last_ns / 1e9 + seconds,
            record_holders=set(islice(record_holders, MAX_RECORD_HOLDERS)),
        )
        operation.size_bytes = operation.measure(work_bytes)
        if not self._table.make_room(operation.name, "", operation.size_bytes):
            raise Full(
                f"the running operations use {self.used_bytes} bytes, at most {MAX_BYTES} are allowed; wait for one, "
                "or cancel one",
                retry_seconds=1,
            )
        self._table.store(operation)
        self._run_task(operation, work)
        return operation

    def take_over(self, operation: Operation, work: Work) -> None:
        """Continues an operation that has not ended and that no coordinator runs."""
        operation.attempt += 1
        logger.info("%s: taken over, attempt %d", operation.name, operation.attempt)
        self._run_task(operation, work)

    async def aclose(self) -> None:
        """Stops running operations. They do not end: a coordinator that their instances report them to continues."""
        tasks = []
        for operation in self.running_here():
            if task := operation.task:
                task.cancel()
                tasks.append(task)
            operation.task = None
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run_task(self, operation: Operation, work: Work) -> None:
        operation.task = asyncio.create_task(self._observe(operation, work), name=operation.name)
        self.on_change(operation)

    async def _observe(self, operation: Operation, work: Work) -> None:
        """Runs it in a span of the request's trace; log lines meanwhile carry its name."""
        name = operation.name
        with telemetry.bound(operation_id=name), telemetry.begin(f"lmkv.{operation.kind}", operation_id=name) as span:
            await self._run(operation, work)
            if operation.error:
                span.fail(operation.error.reason, str(operation.error))

    async def _run(self, operation: Operation, work: Work) -> None:
        """Runs it to its end, unless another coordinator took it over: then a node refuses, or this is cancelled."""
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
        if operation.task is not asyncio.current_task():  # taken over meanwhile
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
        operation.size_bytes = operation.measure()
        self._table.store(operation)
        self._table.make_room(operation.name, operation.reporter, operation.size_bytes)
        seconds = operation.end_time - operation.create_time
        reason = f": {operation.error}" if operation.error else ""
        logger.info("%s: %s after %.2f s%s", operation.name, operation.state, seconds, reason)

    # --- Operations of other coordinators ------------------------------------------------------------------------

    def merge(self, reported: Operation, reporter: str) -> Operation | None:
        """Adopts what an instance reports of an operation, unless this coordinator knows more; returns what is known.

        None if the operation was forgotten, or if there is no room for it.
        """
        if self._table.is_forgotten(reported.name) or not _NAME.fullmatch(reported.name):
            return None
        known = self._table.find(reported.name)
        if known is None and self._table.is_full:
            return None
        if known is None or reported.rank > known.rank:
            reported.reporter = reporter if known is None else known.reporter
            if known is not None and known.request is not None:
                reported.size_bytes += known.request.ByteSize()
            if not self._table.make_room(reported.name, reported.reporter, reported.size_bytes):
                _log.warning("no room for the record of %s that instance %s reports", reported.name, reporter)
                return known
            known = self._replace(known or reported, reported)
        if reported.cancelled.is_set():
            known.cancelled.set()
        return known

    def _replace(self, known: Operation, reported: Operation) -> Operation:
        """Gives an operation the reported state; if it runs here, this coordinator stops running it."""
        if known.task:
            known.task.cancel()
            known.task = None
        known.attempt, known.progress = reported.attempt, reported.progress
        known.result, known.error, known.end_time = reported.result, reported.error, reported.end_time
        known.size_bytes = reported.size_bytes
        known.is_lost = False
        if known.done:
            known.ended.set()
        else:
            known.ended.clear()
        self._table.store(known)
        return known

    def _may_be_reported(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None or self._table.is_forgotten(name):
            return False
        seconds = time.time() - int(match["begun"], 16) / 1e9
        if abs(seconds) < self._report_delay:
            return True
        return self._is_partial() and 0 < seconds < self.ttl_seconds + LONGEST_SECONDS + SILENT_SECONDS

    def _expire(self) -> None:
        """Forgets operations that ended too long ago, and fails those of other coordinators that are lost."""
        now = time.time()
        for operation in self._table.running():
            is_overdue = now > operation.expire_time + SILENT_SECONDS
            if not operation.runs_here and (is_overdue or self._have_restarted(operation.reporters)):
                operation.is_lost = not is_overdue  # after the deadline a report changes nothing
                lost = Unreachable(f"no instance reports {operation.name} any more; look up where its chunks are")
                self._end(operation, None, lost)
        self._table.expire()

    def _have_restarted(self, reporters: Mapping[str, int]) -> bool:
        """Whether every instance that reported the operation restarted more than `SILENT_SECONDS` ago."""
        seconds = (self._restarted_seconds(instance_id, epoch) for instance_id, epoch in reporters.items())
        return bool(reporters) and min(seconds) > SILENT_SECONDS
