"""The operations that a coordinator knows, running and ended, within bounds of number, size and age."""

from __future__ import annotations

import time
from collections import OrderedDict

from lmkv.errors import BadMessage, BadSelection
from lmkv.operation_records import MAX_RECORD_BYTES
from lmkv_server.coordinator.core.budget import Budget
from lmkv_server.coordinator.operations.operation import Operation, Request

MAX_ENDED = 10_000
"""Ended operations that are kept; the oldest are evicted. As many may be running."""
MAX_BYTES = 64 << 20
"""Size of all operations of a tenant; ended ones are evicted, the oldest first."""
MAX_REQUEST_ID_BYTES = 256
LATE_SECONDS = 660.0
"""How much longer than `ttl_seconds` an instance may report an operation that was evicted or deleted here."""


class OperationTable:
    """Operations by name and by request id.

    Ended ones are kept for `ttl_seconds` by the monotonic clock: a jump of the wall clock loses none.
    """

    def __init__(self, ttl_seconds: float) -> None:
        self.ttl_seconds = ttl_seconds
        self._running: dict[str, Operation] = {}
        self._ended: OrderedDict[str, Operation] = OrderedDict()  # in the order in which they were stored
        self._ended_since: dict[str, float] = {}  # when this coordinator learned of the end, by the monotonic clock
        self._forgotten: OrderedDict[str, float] = OrderedDict()  # since when, by the monotonic clock
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self._budget = Budget(owner_bytes=MAX_RECORD_BYTES, total_bytes=MAX_BYTES)

    @property
    def used_bytes(self) -> int:
        """Approximate size of all operations."""
        return self._budget.used_bytes

    @property
    def is_full(self) -> bool:
        """Whether there are too many operations to add one that another coordinator runs."""
        return len(self._running) + len(self._ended) > 2 * MAX_ENDED

    def running(self) -> list[Operation]:
        """The operations that have not ended, oldest first."""
        return list(self._running.values())

    def all(self) -> list[Operation]:
        """All operations."""
        return [*self._running.values(), *self._ended.values()]

    def find(self, name: str) -> Operation | None:
        """The operation of this name."""
        return self._running.get(name) or self._ended.get(name)

    def is_forgotten(self, name: str) -> bool:
        """Whether the operation was known, and was evicted or deleted, so long as instances may still report it."""
        return name in self._forgotten

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
        self._budget.set(operation.reporter, operation.name, operation.size_bytes)
        request = operation.request
        if request and request.request_id:
            self._by_request_id[request.DESCRIPTOR.name, request.request_id] = operation

    def make_room(self, name: str, reporter: str, size_bytes: int) -> bool:
        """Evicts ended operations until one of this size fits, the reporter's or the oldest first; whether it does."""
        while not self._budget.fits(reporter, name, size_bytes):
            exceeds_own = not self._budget.owner_fits(reporter, name, size_bytes)
            candidates = self._budget.items(reporter) if exceeds_own else iter(self._ended)
            first = next((self._ended[one] for one in candidates if one != name and one in self._ended), None)
            if first is None:
                return False
            self.forget(first)
        return True

    def forget(self, operation: Operation) -> None:
        """Removes an operation that has ended; one that runs stays."""
        if self._ended.pop(operation.name, None):
            del self._ended_since[operation.name]
            self._budget.drop(operation.reporter, operation.name)
            self._forgotten[operation.name] = time.monotonic()
            if len(self._forgotten) > MAX_ENDED:
                self._forgotten.popitem(last=False)
            if request := operation.request:
                self._by_request_id.pop((request.DESCRIPTOR.name, request.request_id), None)

    def expire(self) -> None:
        """Removes operations that ended too long ago, the oldest of too many, and names that no instance reports."""
        oldest_name = time.monotonic() - self.ttl_seconds - LATE_SECONDS
        while self._forgotten and next(iter(self._forgotten.values())) < oldest_name:
            self._forgotten.popitem(last=False)
        oldest = time.monotonic() - self.ttl_seconds
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and self._ended_since[first.name] >= oldest:
                return
            self.forget(first)
