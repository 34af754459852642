"""Long-running work that can be started, waited for and cancelled: the operations behind `Move`, `Clear`
and `Drain`.

One event loop owns them. Some run at this coordinator, others at another one; nodes report those (see
`OperationReplicator`). An operation's name contains its start time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from google.protobuf.message import Message

from lmkv import telemetry
from lmkv.errors import BadMessage, Full, LmkvError, OperationNotFound, OperationTakenOver, Unreachable
from lmkv.operation_records import end_quorum
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv_server.coordinator.operations.operation import Attempt, End, Operation, Progress, Request
from lmkv_server.coordinator.operations.operation_proto import from_proposal
from lmkv_server.coordinator.operations.operation_table import MAX_BYTES, OperationTable

logger = logging.getLogger(__name__)
_log = LimitedLogger(logger)

MAX_RUNNING = 256
"""Operations that run here at a time."""
LONGEST_SECONDS = 600.0
"""Longest duration of an operation."""
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
    another epoch than the given one, which is known since the given time; 0 if it did not. `choose_holders` returns
    the instances that decide the end of an operation, with their epochs: first those that are given. `is_sole` returns
    whether they report to no other coordinator.
    """

    def __init__(
        self,
        ttl_seconds: float,
        *,
        is_partial: Callable[[], bool] = lambda: False,
        restarted_seconds: Callable[[str, int, float], float] = lambda *_: 0.0,
        report_delay: float = 0.0,
        choose_holders: Callable[[Iterable[str]], Mapping[str, int]] = lambda _: {},
        is_sole: Callable[[Collection[str]], bool] = lambda _: True,
    ) -> None:
        self.ttl_seconds = ttl_seconds
        self.coordinator_id = secrets.token_hex(8)
        """Distinguishes the attempts of this process from those of others."""
        self.on_change: Callable[[Operation], None] = lambda _: None
        """Called when an operation that runs here starts, proposes its end, or ends, or when a later attempt of another
        coordinator replaces the one of this coordinator."""
        self.ended_counts: dict[tuple[str, str], int] = {}
        """Operations that ended here since the process started, by kind and state."""
        self._is_partial = is_partial
        self._restarted_seconds = restarted_seconds
        self._report_delay = report_delay
        self._choose_holders = choose_holders
        self._is_sole = is_sole
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
        """Starts an operation that ends after `seconds` at the latest; `record_holders` are to store its record first.

        `work_bytes` is the memory that the work needs. Raises `Full` if too many operations run, or too large ones.
        """
        self._expire()
        if not self.has_capacity:
            raise Full(f"{MAX_RUNNING} operations are running; wait for one, or cancel one", retry_seconds=1)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        holders = self._choose_holders(record_holders)
        operation = Operation(
            name=f"{kind}-{self._last_ns:016x}",
            kind=kind,
            progress=progress,
            request=request,
            create_time=self._last_ns / 1e9,
            expire_time=self._last_ns / 1e9 + seconds,
            coordinator_id=self.coordinator_id,
            holders=holders,
            record_holders=set(holders),
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
        operation.coordinator_id = self.coordinator_id
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
        is_sole = self._is_sole(operation.holders)
        operation.answers = Attempt(operation.attempt, operation.holders, is_sole=is_sole)
        operation.proposal = None
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
        assert operation.answers is not None
        try:
            await operation.until_answered(lambda answers: answers.may_begin, _answer_seconds(operation))
            accepted = operation.answers.accepted_end
            operation.proposal = from_proposal(accepted) if accepted else await _work(operation, work)
            self.on_change(operation)
            await operation.until_answered(lambda answers: answers.has_ended, _answer_seconds(operation))
        except OperationTakenOver as taken:
            logger.warning("%s", taken)
            operation.task = None
            return
        except (TimeoutError, BadMessage) as failure:
            logger.warning("%s: the instances that decide its end do not agree: %r", operation.name, failure)
            if not operation.answers.is_hopeless:
                operation.task = None
                operation.expire_time = min(operation.expire_time, time.time())  # its end stays unknown here
                return
            await asyncio.sleep(SILENT_SECONDS)  # a coordinator that knows the end may report it: that ends this task
            operation.proposal = End.now(operation.progress, None, _unknown_end(operation))
        if operation.task is not asyncio.current_task():  # taken over meanwhile
            return
        self._end(operation, operation.proposal)
        outcome = (operation.kind, operation.state)
        self.ended_counts[outcome] = self.ended_counts.get(outcome, 0) + 1
        self.on_change(operation)

    def _end(self, operation: Operation, end: End) -> None:
        operation.result, operation.error, operation.progress = end.result, end.error, end.progress
        operation.end_time = end.progress.end_time.ToNanoseconds() / 1e9
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
        if known is not None and known.done and not known.is_lost:
            return known
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
        was_own = known is not reported and known.coordinator_id == self.coordinator_id
        if known.task:
            known.task.cancel()
            known.task = None
        known.attempt, known.coordinator_id, known.progress = (
            reported.attempt,
            reported.coordinator_id,
            reported.progress,
        )
        known.holders = reported.holders or known.holders
        known.proposal = None
        known.result, known.error, known.end_time = reported.result, reported.error, reported.end_time
        known.size_bytes = reported.size_bytes
        known.is_lost = known.is_unknown = False
        if known.done:
            known.ended.set()
        else:
            known.ended.clear()
        self._table.store(known)
        if was_own and not known.done:
            # Instances that the other coordinator has not reached yet report to this one, and offer it to no other one.
            self.on_change(known)
        return known

    def _may_be_reported(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None or self._table.is_forgotten(name):
            return False
        seconds = time.time() - int(match["begun"], 16) / 1e9
        if abs(seconds) < self._report_delay:
            return True
        return self._is_partial() and 0 < seconds < self.ttl_seconds + LONGEST_SECONDS + SILENT_SECONDS

    def has_restarted(self, operation: Operation, holder_id: str) -> bool:
        """Whether a holder of the operation has restarted, and so lost its record."""
        epoch = operation.holders.get(holder_id, 0)
        return self._restarted_seconds(holder_id, epoch, operation.known_since) > 0

    def _expire(self) -> None:
        """Forgets operations that ended too long ago, and fails those of other coordinators that are lost."""
        now = time.time()
        for operation in self._table.running():
            is_overdue = now > operation.expire_time + SILENT_SECONDS
            if not operation.runs_here and (is_overdue or self._have_restarted(operation)):
                operation.is_unknown = True
                operation.is_lost = not is_overdue  # after the deadline a report changes nothing
                self._end(operation, End.now(operation.progress, None, _unknown_end(operation)))
        self._table.expire()

    def _have_restarted(self, operation: Operation) -> bool:
        """Whether too few instances are left to decide its end, or to report it: the others have restarted more than
        `SILENT_SECONDS` ago."""
        holders, reporters = operation.holders, operation.reporters
        since = operation.known_since
        lost = sum(self._restarted_seconds(*holder, since) > SILENT_SECONDS for holder in holders.items())
        if lost > len(holders) - end_quorum(len(holders)):
            return True
        return bool(reporters) and all(
            self._restarted_seconds(*one, since) > SILENT_SECONDS for one in reporters.items()
        )


async def _work(operation: Operation, work: Work) -> End:
    """Does the work; how the operation would end. Raises `OperationTakenOver`."""
    result: Message | None = None
    error: LmkvError | None = None
    try:
        result = await work(operation)
    except OperationTakenOver:
        raise
    except LmkvError as failure:
        error = failure
    except Exception as failure:
        logger.exception("operation %s failed unexpectedly", operation.name)
        error = LmkvError(f"{operation.name} failed unexpectedly: {failure!r}; see the coordinator's log")
    return End.now(operation.progress, result, error)


def _unknown_end(operation: Operation) -> Unreachable:
    return Unreachable(
        f"no instance reports {operation.name} any more, so that its end is not known here; look up where its chunks "
        "are"
    )


def _answer_seconds(operation: Operation) -> float:
    """How long a coordinator waits for the holders: until `SILENT_SECONDS` after the deadline."""
    return min(max(operation.expire_time - time.time(), 0.0), LONGEST_SECONDS) + SILENT_SECONDS
