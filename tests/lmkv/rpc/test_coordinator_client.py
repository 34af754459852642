"""The client of the coordinators: which one it calls after failures, and what callers get of lookups meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import InstanceNotFound, Unreachable
from lmkv.rpc.coordinator_client import CoordinatorClient, CoordinatorConnection, Failover
from lmkv.rpc.messages import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import LocateInstanceRequest
from lmkv_server.coordinator.coordinator import Coordinator
from tests.waiting import WAIT_SECONDS, until

REQUEST = LookupRequest(prompt=by_keys([bytes(16)]))


def test_after_a_failure_the_next_target_is_used_and_the_first_one_after_the_last() -> None:
    targets = Failover(["a", "b", "c"])
    used = []
    for _ in range(4):
        used.append(targets.current)
        targets.report_failure(targets.current)
    assert used == ["a", "b", "c", "a"]
    assert targets.in_order() == ("b", "c", "a")


def test_several_failures_of_one_target_skip_no_other() -> None:
    a, b, c = object(), object(), object()
    targets = Failover([a, b, c])
    for _ in range(5):  # all calls that were in flight fail
        targets.report_failure(a)
    assert targets.current is b
    targets.report_failure(c)
    assert targets.current is b


async def test_a_lookup_at_a_coordinator_that_is_gone_is_answered_by_the_next_one() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as live:
        client = CoordinatorClient(["127.0.0.1:1", live.address], timeout_seconds=WAIT_SECONDS)
        stream = client.lookup_stream()
        assert not (await stream.lookup(REQUEST)).holders
        assert client.current.address == live.address
        await stream.aclose()
        await client.aclose()


async def test_lookups_in_flight_at_a_coordinator_that_stops_are_answered_by_the_next_one() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as live:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = CoordinatorClient(
                [f"127.0.0.1:{silent.getsockname()[1]}", live.address], timeout_seconds=WAIT_SECONDS
            )
            stream = client.lookup_stream()
            lookups = [asyncio.create_task(stream.lookup(REQUEST)) for _ in range(3)]
            await until(lambda: stream.is_open)
        assert [list(answer.holders) for answer in await asyncio.gather(*lookups)] == [[], [], []]
        assert client.current.address == live.address
        await stream.aclose()
        await client.aclose()


async def test_a_lookup_takes_one_timeout_although_a_coordinator_is_silent_and_the_next_lookup_leaves_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts no connection
        client = CoordinatorClient([f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:1"], timeout_seconds=0.05)
        stream = client.lookup_stream()
        with pytest.raises(Unreachable, match="deadline exceeded"):
            await stream.lookup(REQUEST)
        assert client.current.address == "127.0.0.1:1"
        await stream.aclose()
        await client.aclose()


async def test_a_call_that_another_process_does_not_answer_is_repeated_at_no_other_coordinator() -> None:
    """It may have been carried out, and the coordinator has answered."""
    client = CoordinatorClient(["127.0.0.1:1", "127.0.0.1:2"], timeout_seconds=WAIT_SECONDS)
    asked = []

    async def move(connection: CoordinatorConnection) -> None:
        asked.append(connection.address)
        raise Unreachable("the instance does not respond", address="127.0.0.1:3")

    with pytest.raises(Unreachable, match="the instance does not respond"):
        await client.run(move)
    with pytest.raises(Unreachable, match="the instance does not respond"):
        await client.find(move)
    assert asked == ["127.0.0.1:1"] * 2
    await client.aclose()


async def test_a_closed_stream_takes_no_lookups_and_opens_no_other() -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as first,
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as second,
    ):
        client = CoordinatorClient([first.address, second.address], timeout_seconds=WAIT_SECONDS)
        stream = client.lookup_stream()
        await stream.lookup(REQUEST)
        await stream.aclose()
        with pytest.raises(Unreachable, match="was closed"):
            await stream.lookup(REQUEST)
        assert client.current.address == first.address
        await client.aclose()


async def test_an_error_of_a_coordinator_that_responds_is_no_failure_of_it() -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as first,
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as second,
    ):
        client = CoordinatorClient([first.address, second.address], timeout_seconds=WAIT_SECONDS)
        with pytest.raises(InstanceNotFound):
            await client.call(lambda to: to.registry.LocateInstance, LocateInstanceRequest(instance_id="a"))
        assert client.current.address == first.address
        await client.aclose()
