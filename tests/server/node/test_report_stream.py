"""The node's end of one call for reports, where the coordinator ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmkv import rpc
from lmkv.errors import LmkvError, ResyncRequired, Unreachable
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.registry_service_pb2_grpc import (
    RegistryServiceServicer,
    RegistryServiceStub,
    add_RegistryServiceServicer_to_server,
)
from lmkv_server.node.engines import Engines
from lmkv_server.node.host_tier import HostTier
from lmkv_server.node.orders import Orders
from lmkv_server.node.registration import Membership
from lmkv_server.node.report_stream import ReportStream
from tests.server.node.ordering import until


class Coordinator(RegistryServiceServicer):
    """Ends every call at once: with an error, if it has one."""

    def __init__(self, error: LmkvError | None) -> None:
        self._error = error

    async def Report(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ReportResponse]:  # noqa: N802
        if self._error:
            raise self._error
        return
        yield


class Unread:
    """A call whose first reader has yet to learn that it is over, as gRPC tells writers before readers at times."""

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


def stream() -> ReportStream:
    """Reports of a node that holds nothing."""
    tier = HostTier(1 << 20)
    membership = Membership(instance=pb.Instance(instance_id="a", epoch=1), lease_ttl=10.0)

    async def register() -> Membership:
        return membership

    return ReportStream(
        membership,
        coordinator_address="here",
        describe=lambda: membership.instance,
        snapshot=lambda: (),
        register=register,
        orders=Orders(instance_id="a", tier=tier, engines=Engines(tier), peers=None),
        on_answer=lambda: None,
        digest_interval_seconds=60.0,
        register_interval_seconds=60.0,
        max_pending_changes=100,
    )


@pytest.mark.parametrize(("error", "expected"), [(ResyncRequired("begin anew"), ResyncRequired), (None, Unreachable)])
async def test_a_report_on_a_call_that_is_over_fails_as_the_call_did(
    error: LmkvError | None, expected: type[LmkvError]
) -> None:
    server = await rpc.make_server([])
    coordinator = Coordinator(error)  # type: ignore[abstract]  # the other methods are not called
    add_RegistryServiceServicer_to_server(coordinator, server)
    port = rpc.add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = RegistryServiceStub(channel)
            call = stub.Report()
            await until(call.done, 20)
            with pytest.raises(expected):
                await stream().run(Unread(call))
    finally:
        await server.stop(None)
