"""What is to be told over one `Report` call. Filled by who reads it, emptied by who answers."""

from __future__ import annotations

import asyncio

from lmkv.errors import LmkvError, ResyncRequired
from lmkv.v1 import registry_service_pb2 as pb

_CHANGES = frozenset(("instance_id", "epoch", "sequence", "changes"))
"""Fields of a report that says nothing but what came and went."""

MAX_WAITING_BYTES = 64 << 20
"""Size of the orders that wait for one instance to read them."""


class ReportOutbox:
    """The newest acknowledgement, and orders. One event loop owns it."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set while there may be something to take."""
        self.error: LmkvError | None = None
        """Why the stream is to end, if it is."""
        self._sequence = 0
        self._orders: list[pb.Order] = []
        self._size_bytes = 0

    def close(self, reading: asyncio.Task[None]) -> None:
        """Nothing more comes: what was read is told, and how reading ended is known."""
        if not reading.cancelled():
            reading.exception()
        self.wake.set()

    def fail(self, error: LmkvError) -> None:
        """Ends the stream, whatever is still to be told."""
        self.error = error
        self.wake.set()

    def acknowledge(self, sequence: int, report: pb.ReportRequest) -> None:
        """Every report up to this one is applied. If it says changes only, that is told with what is told next.

        Nobody waits for that answer; most reports are such, and answering costs as much as reading them.
        """
        self._sequence = sequence
        if not report.changes or any(field.name not in _CHANGES for field, _ in report.ListFields()):
            self.wake.set()

    def tell(self, order: pb.Order) -> None:
        """Sends an order. The stream ends if the instance does not read what waits for it."""
        self._size_bytes += order.ByteSize()
        if self._size_bytes > MAX_WAITING_BYTES:
            self._orders.clear()
            self.fail(ResyncRequired(f"more than {MAX_WAITING_BYTES} bytes of orders wait to be read; register again"))
            return
        self._orders.append(order)
        self.wake.set()

    def take(self, revision: int) -> pb.ReportResponse | None:
        """The next response; None if there is nothing to tell. PendingOrders come one by one: each may be large."""
        if not self._sequence and not self._orders:
            self.wake.clear()
            return None
        response = pb.ReportResponse(acked_sequence=self._sequence, revision=revision, orders=self._orders[:1])
        self._size_bytes -= sum(order.ByteSize() for order in self._orders[:1])
        del self._orders[:1]
        self._sequence = 0
        return response
