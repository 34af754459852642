"""Operations that outlive their coordinator: nodes keep their records, and tell them to every coordinator.

booked ──► kept by some of the nodes that it concerns ──► told everywhere ──► over ──► kept, told everywhere
                  └── its coordinator is gone ──► told as orphaned to one ──► taken over there, one attempt higher
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.message import Message

from lmkv import rpc
from lmkv.errors import LmkvError, Unreachable
from lmkv.operation_records import rank
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.operation import Operation
from lmkv_server.coordinator.operations.operations import LONGEST_SECONDS, Operations, Work
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.records import from_record, to_record

logger = logging.getLogger(__name__)

KEEP_SECONDS = 3.0
"""How long an instance may take to keep a record: a matter of its memory alone."""
BOOKED_SECONDS = 1.0
"""How long whoever books an operation waits for the first of them."""
MAX_REPORTERS = 16
"""Instances that are noted as keepers of one record."""
SETTLE_SECONDS = 10.0
"""How long who takes over waits until it knows what instances hold."""


class OperationReplicator:
    """Has instances keep the records of one coordinator's operations, and hears what they keep.

    `is_partial` says whether instances have yet to tell what they hold.
    """

    def __init__(self, operations: Operations, orders: PendingOrders, is_partial: Callable[[], bool]) -> None:
        self.resume: dict[str, Work] = {}
        """How to go on with an operation that another coordinator began, by its kind."""
        self._operations = operations
        self._orders = orders
        self._is_partial = is_partial
        self._tasks: set[asyncio.Task[None]] = set()
        operations.on_change = self._publish

    async def booked(self, operation: Operation) -> Operation:
        """Returns once an instance keeps its record, or, if none answers, a moment later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BOOKED_SECONDS if operation.keepers else 0):
                await operation.kept.wait()
        return operation

    async def cancel(self, name: str) -> None:
        """Has an operation stopped, wherever it runs; one that is over is no error.

        Raises `OperationNotFound`, and `Unreachable` if no instance tells who runs it.
        """
        operation = self._operations.get(name)
        operation.cancelled.set()
        if operation.driven or operation.done:
            return
        order = pb.Order(cancel=pb.CancelOrder(operation_name=name))
        told = await asyncio.gather(*(self._tell(instance_id, order) for instance_id in operation.keepers))
        if not any(told):
            raise Unreachable(f"no instance that keeps the record of {name} answers; try again", name=name)

    def hear(self, instance_id: str, record: pb.OperationRecord) -> None:
        """An instance tells of a record that it keeps. Raises `BadMessage`."""
        operation = self._operations.hear(from_record(record, LONGEST_SECONDS), instance_id)
        if operation is None:
            return
        if len(operation.keepers) < MAX_REPORTERS:
            operation.keepers.add(instance_id)
        operation.kept.set()
        if operation.rank > rank(record) or (operation.driven and record.orphaned):
            self._put(instance_id, operation)  # it missed something, if only that the operation is driven
        elif record.orphaned and not operation.done and self._operations.may_drive:
            asked_for = operation.request if operation.request is not None else operation.progress
            with audited("resume", asked_for) as act:  # the caller is who told of it: nobody has to have asked for it
                act.names["operation"] = operation.name
                self._operations.take_over(operation, self._resume)

    async def aclose(self) -> None:
        """Tells nothing more. What runs goes on at another coordinator."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _resume(self, operation: Operation) -> Message:
        if operation.request is None:
            raise Unreachable(f"who ran {operation.name} is gone, and its request was too long to be kept; repeat it")
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while self._is_partial():  # noqa: ASYNC110 # instances change that, each for itself
                    await asyncio.sleep(0.05)
        return await self.resume[operation.kind](operation)

    def _publish(self, operation: Operation) -> None:
        for instance_id in operation.keepers:
            self._put(instance_id, operation)

    def _put(self, instance_id: str, operation: Operation) -> None:
        task = asyncio.create_task(self._keep(instance_id, operation), name=f"lmkv-keep-{operation.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, instance_id: str, operation: Operation) -> None:
        record = to_record(operation, self._operations.ttl_seconds)
        if await self._tell(instance_id, pb.Order(record=pb.RecordOrder(record=record))):
            operation.kept.set()

    async def _tell(self, instance_id: str, order: pb.Order) -> bool:
        """Whether the instance has carried it out."""
        try:
            outcome = await self._orders.carry_out(instance_id, order, KEEP_SECONDS)
            if outcome.status.code:
                raise rpc.from_status(outcome.status)
        except LmkvError as error:
            logger.warning("instance %s does not keep a record: %s", instance_id, error)
            return False
        return True
