"""`lmkv drain`, against a real coordinator, and while none responds."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.rpc.endpoints import make_server
from lmkv.v1.cache_service_pb2 import DrainRequest
from lmkv.v1.cache_service_pb2_grpc import (
    CacheServiceServicer,
    CacheServiceStub,
    add_CacheServiceServicer_to_server,
)
from lmkv_client import Coordinator
from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator as RealCoordinator
from lmkv_server.coordinator.operations import drains
from tests.client.conftest import Fleet, RunCommand
from tests.server.coordinator.cases import KEYS

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has drains end without a report of the other instances: scripted ones report nothing by themselves."""
    monkeypatch.setattr(drains, "CONFIRM_SECONDS", 0.0)


@pytest.mark.usefixtures("unconfirmed")
async def test_drain_copies_and_reports_that_it_is_safe_to_stop(
    fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    assert await run_command("drain", "a") == 0
    shown = capsys.readouterr()
    assert re.fullmatch(
        r"drain-[0-9a-f]{16}: 3 chunks \(40 tokens\) copied, 2\.9 KiB transferred\n"
        r"safe to stop: all chunks of a are held elsewhere\n",
        shown.out,
    )
    assert shown.err == ""
    assert await fleet.holders() == {"a": 40, "b": 40}
    assert await run_command("ops") == 0
    assert re.search(r"^drain-\S+ +a +done +3/3 chunks ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("unconfirmed")
async def test_drain_reports_why_it_is_not_safe_to_stop(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.b.limit = 2
    assert await run_command("drain", "a", "--to", "b") == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "not safe to stop: 1 chunk is held by a only",
        "  1 chunk: no destination has room; add destinations, or allow them to evict other chunks",
    ]
    fleet.b.limit = 0
    await fleet.b.evict(KEYS)
    assert await run_command("drain", "a") == 1
    assert "nothing was copied, and 3 chunks held by 'a' only: no destination has room" in capsys.readouterr().err


@pytest.mark.usefixtures("unconfirmed")
async def test_a_drain_is_cancelled_and_waited_for_like_other_operations(
    fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    fleet.pause()
    assert await run_command("drain", "a", "--no-wait", "--timeout", "30s", "--evict") == 0
    name, _, rest = capsys.readouterr().out.partition(": ")
    assert re.fullmatch(r"running, 0/\d chunks done\n", rest)
    assert await run_command("ops", "cancel", name) == 0
    assert capsys.readouterr().out.startswith(f"{name}: cancelled after 0 chunks")
    fleet.resume()


async def test_drain_names_its_flags_in_errors(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("drain", "a", "--to", "unknown") == 1
    assert "error: --to: instance 'unknown' is not registered" in capsys.readouterr().err
    assert await run_command("drain", "unknown") == 1
    assert "error: INSTANCE: instance 'unknown' is not registered" in capsys.readouterr().err


async def test_drain_tries_again_until_a_coordinator_responds(run_command: RunCommand, capsys: Capture) -> None:
    port = free_port()
    drain = asyncio.ensure_future(run_command("drain", "a", "--coordinator", f"127.0.0.1:{port}"))
    notice = ""
    async with asyncio.timeout(20):
        while "trying again for 30 s" not in notice:
            await asyncio.sleep(0.05)
            notice += capsys.readouterr().err
    async with RealCoordinator(CoordinatorConfig(port=port, http_port=OFF, lease_ttl=30.0, cluster_secret="hush")):
        assert await drain == 1
    assert notice.startswith(f"lmkv: notice: no coordinator responds at 127.0.0.1:{port} (UNAVAILABLE: ")
    assert capsys.readouterr().err.endswith("INSTANCE: instance 'a' is not registered; registered are: none\n")


async def test_drain_stops_trying_at_its_deadline(run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("drain", "a", "--coordinator", "127.0.0.1:1", "--timeout", "500ms") == 1
    notice, error = capsys.readouterr().err.splitlines()
    assert notice.endswith("; trying again for 0.5 s")
    assert error.startswith("lmkv: error: no coordinator responds at 127.0.0.1:1; start one with `lmkv coordinator`")


class LosesFirstResponse(CacheServiceServicer):
    """Passes drains on to a coordinator, and fails after the first one."""

    def __init__(self, coordinator: grpc.aio.Channel) -> None:
        self._coordinator: Any = CacheServiceStub(coordinator)
        self.operations: list[str] = []

    async def Drain(self, request: DrainRequest, context: Any) -> Any:  # noqa: N802
        operation = await self._coordinator.Drain(request, timeout=20)
        self.operations.append(operation.name)
        if len(self.operations) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return operation


async def test_a_drain_whose_response_is_lost_is_started_once(
    fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    fleet.pause()
    server = await make_server(["lmkv.v1.CacheService"])
    async with rpc.open_channel(fleet.address) as channel:
        between = LosesFirstResponse(channel)  # type: ignore[abstract]  # one RPC is enough here
        add_CacheServiceServicer_to_server(between, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            assert await run_command("drain", "a", "--no-wait", "--coordinator", f"127.0.0.1:{port}") == 0
        finally:
            await server.stop(None)
    shown = capsys.readouterr()
    assert "(UNAVAILABLE: connection reset); trying again" in shown.err
    name = shown.out.partition(": ")[0]
    assert between.operations == [name, name]
    async with Coordinator(fleet.address) as coordinator:
        assert [operation.name for operation in await coordinator.operations()] == [name]
    fleet.resume()
