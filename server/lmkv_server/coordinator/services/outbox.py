"""Responses to send over one `Report` call. The task that reads reports fills it, the one that answers empties it."""

from __future__ import annotations

import asyncio

from lmkv.errors import LmkvError, ResyncRequired
from lmkv.internal.v1 import report_service_pb2 as pb

_CHANGES = frozenset(("instance_id", "epoch", "sequence", "changes"))
"""Fields of a report that contains changes only."""

MAX_WAITING_BYTES = 64 << 20
"""Size of the orders that wait for one instance to read them."""


class ReportOutbox:
    """The newest acknowledgement, and queued orders. One event loop owns it."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set while there may be a response to take."""
        self.error: LmkvError | None = None
        """Set if the stream has to end with an error."""
        self._sequence = 0
        self._orders: list[pb.Order] = []
        self._size_bytes = 0

    def close(self, reading: asyncio.Task[None]) -> None:
        """Reading ended: wakes the answering task, and marks an exception of `reading` as retrieved."""
        if not reading.cancelled():
            reading.exception()
        self.wake.set()

    def fail(self, error: LmkvError) -> None:
        """Ends the stream with an error, without sending what is queued."""
        self.error = error
        self.wake.set()

    def acknowledge(self, sequence: int, report: pb.ReportRequest) -> None:
        """Acknowledges every report up to this one. For a report with changes only, the next response carries it.

        Instances do not wait for that acknowledgement; most reports are such, and answering costs as much as reading.
        """
        self._sequence = sequence
        if not report.changes or any(field.name not in _CHANGES for field, _ in report.ListFields()):
            self.wake.set()

    def send(self, order: pb.Order) -> None:
        """Queues an order. Ends the stream if the instance does not read its orders."""
        self._size_bytes += order.ByteSize()
        if self._size_bytes > MAX_WAITING_BYTES:
            self._orders.clear()
            self.fail(ResyncRequired(f"more than {MAX_WAITING_BYTES} bytes of orders wait to be read; register again"))
            return
        self._orders.append(order)
        self.wake.set()

    def take(self, revision: int) -> pb.ReportResponse | None:
        """The next response; None if there is none. It has at most one order, because each may be large."""
        if not self._sequence and not self._orders:
            self.wake.clear()
            return None
        response = pb.ReportResponse(acked_sequence=self._sequence, revision=revision, orders=self._orders[:1])
        self._size_bytes -= sum(order.ByteSize() for order in self._orders[:1])
        del self._orders[:1]
        self._sequence = 0
        return response
