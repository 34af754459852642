"""Calls, as their server counts them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lmkv import rpc
from lmkv.errors import BadSelection
from lmkv.telemetry.calls import BOUNDS_SECONDS, ServerCalls
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc

NAME = "rpc_server_call_duration_seconds"


class Scripted(pb_grpc.PeerServiceServicer):
    """Ends each call the way its grant id says."""

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:  # noqa: N802
        match request.grant_id:
            case "refused":
                raise BadSelection("no")
            case "broken":
                raise ZeroDivisionError
            case "aborted":
                await context.abort(grpc.StatusCode.ABORTED, "enough")
            case "late":
                await asyncio.sleep(60)
        return pb.ReleaseResponse()


async def test_calls_are_counted_by_method_and_code() -> None:
    calls = ServerCalls()
    server = await rpc.make_server(["lmkv.v1.PeerService"], calls)
    pb_grpc.add_PeerServiceServicer_to_server(Scripted(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = pb_grpc.PeerServiceStub(channel)
        for grant_id in ("fine", "fine", "refused", "broken", "aborted"):
            with suppress(grpc.RpcError):
                await stub.Release(pb.ReleaseRequest(grant_id=grant_id), timeout=60)
        with pytest.raises(grpc.RpcError):
            await stub.Release(pb.ReleaseRequest(grant_id="late"), timeout=0.1)
        with pytest.raises(grpc.RpcError):  # no handler: a name that the caller makes up is no label
            await channel.unary_unary("/made.Up/Name", bytes, bytes)(b"")
    await server.stop(1.0)
    assert counts(calls) == {"OK": 2, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "ABORTED": 1, "CANCELLED": 1}


def counts(calls: ServerCalls) -> dict[str, float]:
    """Calls by code; all are of one method."""
    (family,) = calls.collect()
    found = {}
    for sample in family.samples:
        if sample.name.endswith("_count"):
            assert sample.labels["rpc_method"] == "lmkv.v1.PeerService/Release"
            found[sample.labels["rpc_response_status_code"]] = sample.value
    return found


def test_durations_fall_into_buckets_that_prometheus_can_read() -> None:
    calls = ServerCalls()
    for seconds in (0.00005, 0.0001, 0.003, 11.0):
        calls.record("s/m", "OK", seconds)
    registry = CollectorRegistry()
    registry.register(calls)
    at = {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"{NAME}_bucket"
    }
    assert len(at) == len(BOUNDS_SECONDS) + 1
    assert (at["0.0001"], at["0.0025"], at["0.005"], at["10.0"], at["+Inf"]) == (2, 2, 3, 3, 4)
    text = generate_latest(registry).decode()
    assert f"# TYPE {NAME} histogram" in text
    assert 'rpc_method="s/m"' in text
