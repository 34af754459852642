"""The node's end of one call for reports: where the coordinator ends it, and what goes along with what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmkv import rpc
from lmkv.errors import LmkvError, ResyncRequired, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.internal.v1.report_service_pb2_grpc import (
    ReportServiceServicer,
    ReportServiceStub,
    add_ReportServiceServicer_to_server,
)
from lmkv.keys import ChunkKey
from lmkv.tiers import HOST
from lmkv_server.node.fleet import report_stream
from lmkv_server.node.fleet.registration import FleetContext, InstanceLease
from lmkv_server.node.fleet.report_stream import ReportStream
from lmkv_server.node.fleet.reports import HeldChunk
from tests.server.node.fleet_parts import Shelf
from tests.server.node.ordering import until


class Coordinator(ReportServiceServicer):
    """Ends every call at once: with an error, if it has one."""

    def __init__(self, error: LmkvError | None) -> None:
        self._error = error

    async def Report(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ReportResponse]:  # noqa: N802
        if self._error:
            raise self._error
        return
        yield


class Unread:
    """A call whose first reader learns of its end after the writers, as gRPC does at times."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._read_count = 0

    async def read(self) -> object:
        self._read_count += 1
        if self._read_count == 1:
            await asyncio.Event().wait()
        return await self._call.read()

    async def write(self, report: pb.ReportRequest) -> None:
        await self._call.write(report)

    def cancel(self) -> None:
        self._call.cancel()


class LoneSession:
    """The session of a node whose registration is always accepted."""

    coordinator_address = "here"

    def __init__(self, lease: InstanceLease) -> None:
        self._lease = lease

    async def register(self) -> InstanceLease:
        return self._lease

    def response_received(self) -> None:
        pass

    def synced(self) -> None:
        pass


def stream() -> ReportStream:
    """Reports of a node that holds nothing."""
    shelf = Shelf()
    lease = InstanceLease(instance=shelf.describe(), lease_ttl=10.0)
    context = FleetContext(node=shelf, orders=shelf.orders, register_interval_seconds=60.0, max_pending_changes=100)
    return ReportStream(lease, LoneSession(lease), context)


@pytest.mark.parametrize(("error", "expected"), [(ResyncRequired("restart"), ResyncRequired), (None, Unreachable)])
async def test_a_report_on_a_call_that_is_over_fails_as_the_call_did(
    error: LmkvError | None, expected: type[LmkvError]
) -> None:
    server = await rpc.make_server([])
    coordinator = Coordinator(error)
    add_ReportServiceServicer_to_server(coordinator, server)
    port = rpc.add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = ReportServiceStub(channel)
            call = stub.Report()
            await until(call.done)
            with pytest.raises(expected):
                await stream().run(Unread(call))
    finally:
        await server.stop(None)


class Written:
    """A call that keeps what is written, and answers nothing."""

    def __init__(self) -> None:
        self.reports: list[pb.ReportRequest] = []

    async def read(self) -> object:
        return await asyncio.Event().wait()

    async def write(self, report: pb.ReportRequest) -> None:
        self.reports.append(pb.ReportRequest.FromString(report.SerializeToString()))

    def cancel(self) -> None:
        """Nothing to end."""


class Clock:
    """Stands still until it is set."""

    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize(("share", "goes_along"), [(0.4, False), (0.6, True)])
async def test_a_status_that_is_due_soon_goes_along_with_changes(
    monkeypatch: pytest.MonkeyPatch, share: float, goes_along: bool
) -> None:
    clock, call, reporting = Clock(), Written(), stream()
    monkeypatch.setattr(report_stream, "time", clock)
    running = asyncio.create_task(reporting.run(call))
    try:
        await until(lambda: any(report.HasField("stats") for report in call.reports))
        clock.seconds += share * 10.0 / 3  # of the third of a lease after which it is due
        reporting.admitted(HeldChunk(HOST, b"f" * 16, ChunkKey(b"k" * 16), 16))
        await until(lambda: bool(call.reports[-1].changes))
        assert call.reports[-1].HasField("stats") == goes_along
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
