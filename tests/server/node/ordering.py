"""A scripted coordinator: it registers every node, sends orders and records reports. Over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lmkv import rpc
from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.internal.v1 import report_service_pb2_grpc
from lmkv.keys import ChunkKey, split_keys
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc
from tests.waiting import until as until

_NUMBERS = itertools.count(1)


class Ordering(registry_service_pb2_grpc.RegistryServiceServicer, report_service_pb2_grpc.ReportServiceServicer):
    """A registry that gives orders over the newest stream."""

    def __init__(self) -> None:
        self.outcomes: list[report_pb.OrderOutcome] = []
        """All that came, in order, repeats among them."""
        self.pin_lists: list[report_pb.PinList] = []
        self.held: set[ChunkKey] = set()
        """What the node says to hold, without regard to tiers."""
        self.held_at_outcome: dict[str, set[ChunkKey]] = {}
        """What it said to hold when the outcome came, by order id."""
        self.report_count = 0
        self.stream_count = 0
        self.farewell_count = 0
        self.acking = True
        """Whether reports are acknowledged."""
        self.lease_seconds = 2.0
        self.map_id = ""
        self.protocol_version = PROTOCOL_VERSION
        self.version = "9.9"
        self._orders: asyncio.Queue[report_pb.Order | None] = asyncio.Queue()

    ListInstances: Any = None
    LocateInstance: Any = None

    def give(self, seconds: float = 10.0, order_id: str = "", **action: Any) -> str:
        order = report_pb.Order(order_id=order_id or f"order-{next(_NUMBERS)}", **action)
        order.expire_time.GetCurrentTime()
        order.expire_time.FromNanoseconds(order.expire_time.ToNanoseconds() + round(seconds * 1e9))
        self._orders.put_nowait(order)
        return order.order_id

    def give_again(self, order: report_pb.Order) -> None:
        self._orders.put_nowait(order)

    def break_stream(self) -> None:
        """Ends the stream from this side."""
        self._orders.put_nowait(None)

    def outcome(self, order_id: str) -> report_pb.OrderOutcome | None:
        """The first outcome of an order, if it came."""
        return next((outcome for outcome in self.outcomes if outcome.order_id == order_id), None)

    async def ended(self, order_id: str) -> report_pb.OrderOutcome:
        """Waits for the outcome of an order."""
        await until(lambda: self.outcome(order_id) is not None)
        outcome = self.outcome(order_id)
        assert outcome
        return outcome

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:  # noqa: N802
        response = pb.RegisterResponse(
            instance=request.instance,
            layout_map_id=self.map_id,
            protocol_version=self.protocol_version,
            version=self.version,
        )
        response.lease_ttl.FromMilliseconds(round(1e3 * self.lease_seconds) if self.acking else 5000)
        return response

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:  # noqa: N802
        self.farewell_count += 1
        return pb.DeregisterResponse()

    async def Report(  # noqa: N802
        self, request_iterator: AsyncIterator[report_pb.ReportRequest], context: Any
    ) -> AsyncIterator[report_pb.ReportResponse]:
        self.stream_count += 1
        self.held.clear()
        reading = asyncio.ensure_future(anext(request_iterator, None))
        giving = asyncio.ensure_future(self._orders.get())
        acked = 0
        try:
            while True:
                await asyncio.wait((reading, giving), return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    if (report := reading.result()) is None:
                        return
                    self._hear(report)
                    reading = asyncio.ensure_future(anext(request_iterator, None))
                    acked = report.sequence if self.acking else acked
                    yield report_pb.ReportResponse(acked_sequence=acked)
                if giving.done():
                    if (order := giving.result()) is None:
                        return
                    giving = asyncio.ensure_future(self._orders.get())
                    yield report_pb.ReportResponse(acked_sequence=acked, orders=[order])
        finally:
            reading.cancel()
            giving.cancel()

    def _hear(self, report: report_pb.ReportRequest) -> None:
        self.report_count += 1
        for change in report.changes:
            self.held |= set(split_keys(change.admitted_keys))
            self.held -= set(split_keys(change.evicted_keys))
        if report.HasField("pins"):
            self.pin_lists.append(report.pins)
        for outcome in report.outcomes:
            self.outcomes.append(outcome)
            self.held_at_outcome[outcome.order_id] = set(self.held)


@asynccontextmanager
async def serving(ordering: Ordering, port: int = 0) -> AsyncIterator[str]:
    """The address where it answers."""
    server = await rpc.make_server(["lmkv.v1.RegistryService"])
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(ordering, server)
    report_service_pb2_grpc.add_ReportServiceServicer_to_server(ordering, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
