"""Lets operations outlive their coordinator: nodes store their records, and report them to every coordinator.

started ──► stored by some nodes ──► reported to all coordinators ──► end accepted by them ──► stored and reported again
                 └── its coordinator is gone ──► reported as orphaned to one ──► taken over there, attempt + 1

`lmkv.v1.OperationRecord` says which nodes decide the end, and how.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from google.protobuf.message import Message

from lmkv import rpc
from lmkv.errors import BadMessage, InstanceNotFound, LmkvError, Unreachable
from lmkv.operation_records import rank
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.operation import Operation
from lmkv_server.coordinator.operations.operation_proto import from_record, to_record
from lmkv_server.coordinator.operations.operations import LONGEST_SECONDS, Operations, Work
from lmkv_server.coordinator.operations.orders import PendingOrders

logger = logging.getLogger(__name__)

STORE_SECONDS = 3.0
"""Timeout for an instance to store a record, which only needs its memory."""
STORE_TRIES = 60
"""How often an instance is asked to store one state of an operation."""
STORE_RETRY_SECONDS = 1.0
"""Time between two tries."""
REPLICATION_SECONDS = 1.0
"""How long a client that starts an operation waits until the first instance stores its record."""
MAX_REPORTERS = 16
"""Instances that are remembered as holders of one record."""
SETTLE_SECONDS = 10.0
"""How long a take-over waits for the layout map to be complete."""


class OperationReplicator:
    """Stores the records of one coordinator's operations on instances, and merges the records that these report.

    `is_partial` returns whether instances have yet to report what they hold.
    """

    def __init__(
        self,
        operations: Operations,
        orders: PendingOrders,
        is_partial: Callable[[], bool],
        resume: Mapping[str, Work],
        epoch_of: Callable[[str], int],
    ) -> None:
        """`resume`, by kind of operation, continues one that another coordinator started. `epoch_of` returns the epoch
        of a registered instance, 0 of others."""
        self._works = resume
        self._operations = operations
        self._orders = orders
        self._is_partial = is_partial
        self._epoch_of = epoch_of
        self._tasks: set[asyncio.Task[None]] = set()
        operations.on_change = self._replicate_all

    async def wait_replicated(self, operation: Operation) -> Operation:
        """Returns the operation once an instance stores its record, or after `REPLICATION_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLICATION_SECONDS if operation.record_holders else 0):
                await operation.replicated.wait()
        return operation

    async def cancel(self, name: str) -> None:
        """Cancels an operation, wherever it runs; does nothing if it has ended.

        Raises `OperationNotFound`, or `Unreachable` if no instance that stores its record answers.
        """
        operation = self._operations.get(name)
        operation.cancelled.set()
        if operation.runs_here or operation.done:
            return
        order = pb.Order(cancel=pb.CancelOrder(operation_name=name))
        answers = await asyncio.gather(*(self._send(instance_id, order) for instance_id in operation.record_holders))
        if not any(isinstance(answer, pb.OrderOutcome) for answer in answers):
            raise Unreachable(f"no instance that stores the record of {name} answers; try again", name=name)

    def handle_record(self, instance_id: str, epoch: int, record: pb.OperationRecord) -> None:
        """Merges a record that an instance reports; takes over an orphaned operation. Raises `BadMessage`."""
        operation = self._operations.merge(from_record(record, LONGEST_SECONDS), instance_id)
        if operation is None:
            return
        if len(operation.record_holders) < MAX_REPORTERS:
            operation.record_holders.add(instance_id)
            operation.reporters[instance_id] = epoch
        operation.replicated.set()
        if operation.rank > rank(record) or (operation.runs_here and record.orphaned):
            self._replicate(instance_id, operation)  # its record is out of date
        elif record.orphaned and not operation.done and self._operations.has_capacity:
            subject = operation.request if operation.request is not None else operation.progress
            with audited("resume", subject) as entry:  # the caller is the instance that reported the record
                entry.names["operation"] = operation.name
                self._operations.take_over(operation, self._resume)

    async def aclose(self) -> None:
        """Stops storing records. Running operations continue at another coordinator."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _resume(self, operation: Operation) -> Message:
        if operation.request is None:
            raise Unreachable(
                f"the coordinator of {operation.name} is gone, and the request was too large for the record; repeat it"
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while self._is_partial():  # noqa: ASYNC110 # each instance changes it
                    await asyncio.sleep(0.05)
        return await self._works[operation.kind](operation)

    def _replicate_all(self, operation: Operation) -> None:
        for instance_id in operation.record_holders:
            self._replicate(instance_id, operation)

    def _replicate(self, instance_id: str, operation: Operation) -> None:
        task = asyncio.create_task(self._store(instance_id, operation), name=f"lmkv-replicate-{operation.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _store(self, instance_id: str, operation: Operation) -> None:
        """Stores the record of the current state; tries again if an instance cannot, as long as that is the newest.

        Without the record of its end, other coordinators would show an operation as running until its deadline: an
        instance reports its records only when they change.
        """
        state = operation.rank, operation.proposal
        for number in itertools.count(1):
            record = to_record(operation, self._operations.ttl_seconds)
            is_forwarded = not operation.runs_here and not operation.done
            error, kept = await self._store_once(instance_id, record, is_forwarded=is_forwarded)
            if error is None:
                operation.replicated.set()
            if operation.answers and operation.runs_here:
                self._count(operation, instance_id, record, error, kept)
            if kept and rank(kept) > rank(record):
                self._learn(instance_id, kept)
            if not self._must_retry(operation, instance_id, error):
                return
            await asyncio.sleep(STORE_RETRY_SECONDS)
            if (operation.rank, operation.proposal) != state:
                return
            if number >= STORE_TRIES and not operation.runs_here:
                return

    def _must_retry(self, operation: Operation, instance_id: str, error: LmkvError | None) -> bool:
        """Whether an instance is asked again: also if it has stored the record, but as a holder of another epoch, while
        it is not known whether the epoch of the holder is over."""
        if error is not None:
            return operation.runs_here or isinstance(error, Unreachable | InstanceNotFound)
        epoch = operation.holders.get(instance_id)
        if epoch is None or not operation.runs_here or self._operations.has_restarted(operation, instance_id):
            return False
        return self._epoch_of(instance_id) != epoch

    async def _store_once(
        self, instance_id: str, record: pb.OperationRecord, *, is_forwarded: bool
    ) -> tuple[LmkvError | None, pb.OperationRecord | None]:
        """Why the instance did not store it, and what it keeps instead."""
        if not self._epoch_of(instance_id):
            return InstanceNotFound(f"instance {instance_id!r} is not registered", instance_id=instance_id), None
        order = pb.Order(record=pb.RecordOrder(record=record, forwarded=is_forwarded))
        outcome = await self._send(instance_id, order)
        if isinstance(outcome, LmkvError):
            return outcome, None
        return None, outcome.record if outcome.HasField("record") else None

    def _count(
        self,
        operation: Operation,
        instance_id: str,
        record: pb.OperationRecord,
        error: LmkvError | None,
        kept: pb.OperationRecord | None,
    ) -> None:
        """Passes an answer to the attempt. One of an instance that has restarted, or is about to, does not count."""
        answers, epoch = operation.answers, operation.holders.get(instance_id, 0)
        assert answers is not None
        if (record.attempt, record.coordinator_id) != (operation.attempt, operation.coordinator_id):
            return  # the answer to an earlier attempt
        if self._operations.has_restarted(operation, instance_id):
            answers.is_gone(instance_id)
        if error or self._epoch_of(instance_id) != epoch:
            answers.unanswered(instance_id, record)
        else:
            answers.answered(instance_id, record, kept)
        operation.answered.set()

    def _learn(self, instance_id: str, kept: pb.OperationRecord) -> None:
        """Merges a record for which an instance refused another one."""
        try:
            self._operations.merge(from_record(kept, LONGEST_SECONDS), instance_id)
        except BadMessage as error:
            logger.warning("instance %s: %s", instance_id, error)

    async def _send(self, instance_id: str, order: pb.Order) -> pb.OrderOutcome | LmkvError:
        """Sends an order; returns its outcome, or why the instance did not execute it."""
        try:
            outcome = await self._orders.execute(instance_id, order, STORE_SECONDS)
            if outcome.status.code:
                raise rpc.from_status(outcome.status)
        except LmkvError as error:
            logger.warning("instance %s does not store a record: %s", instance_id, error)
            return error
        return outcome
