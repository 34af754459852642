"""The operations that a coordinator knows, running and ended, within bounds of number, size and age."""

from __future__ import annotations

import time
from collections import OrderedDict

from lmkv.errors import BadMessage, BadSelection
from lmkv_server.coordinator.operations.operation import Operation, Request

MAX_ENDED = 10_000
"""Ended operations that are kept; the oldest are evicted. As many may be running."""
MAX_BYTES = 64 << 20
"""Size of all operations of a tenant; ended ones are evicted, the oldest first."""
MAX_REQUEST_ID_BYTES = 256


class OperationTable:
    """Operations by name and by request id.

    Ended ones are kept for `ttl_seconds` by the monotonic clock: a jump of the wall clock loses none.
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
        """All operations."""
        return [*self._running.values(), *self._ended.values()]

    def find(self, name: str) -> Operation | None:
        """The operation of this name."""
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
        """Removes an operation that has ended; one that runs stays."""
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
