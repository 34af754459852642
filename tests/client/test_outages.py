"""The SDK where the coordinator stumbles: watches that resync, waits and lookups that survive a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError, ModelNotFound, OperationNotFound, RevisionCompacted, Unreachable, WatcherTooSlow
from lmkv.v1.cache_service_pb2 import (
    LayoutChange,
    LookupResponse,
    LookupResult,
    LookupStreamResponse,
    WatchRequest,
    WatchResponse,
)
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server
from lmkv_client import Coordinator, LayoutUpdate
from lmkv_server.coordinator import coordinator as server
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance, until
from tests.support.specs import LLAMA

LOST = Unreachable("lost")


class Stumbling(CacheServiceServicer):
    """Each watch gets the next list of answers; an error among them ends it, and so does the list's end."""

    def __init__(self) -> None:
        self.watches: list[list[WatchResponse | LmkvError]] = []
        self.asked: list[int] = []
        self.lookups_until_end = 0
        self.questions: list[int] = []
        self.address = ""

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:  # noqa: N802
        self.asked.append(request.start_revision)
        for answer in self.watches.pop(0) if self.watches else [ModelNotFound("the script is over")]:
            if isinstance(answer, LmkvError):
                raise answer
            yield answer

    async def LookupStream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[LookupStreamResponse]:  # noqa: N802
        async for message in requests:
            self.questions.append(len(message.requests))
            for _ in message.requests:
                if not self.lookups_until_end:
                    return
                self.lookups_until_end -= 1
                result = LookupResult(response=LookupResponse(revision=self.lookups_until_end))
                yield LookupStreamResponse(results=[result])


@pytest.fixture
async def stumbling() -> AsyncIterator[Stumbling]:
    servicer = Stumbling()  # type: ignore[abstract]  # two RPCs are enough here
    serving = await rpc.make_server(["lmkv.v1.CacheService"])
    add_CacheServiceServicer_to_server(servicer, serving)
    servicer.address = f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}"
    await serving.start()
    yield servicer
    await serving.stop(None)


def held(revision: int) -> WatchResponse:
    return WatchResponse(revision=revision, snapshot=True, changes=[LayoutChange(instance_id="a")])


def changed(revision: int) -> WatchResponse:
    return WatchResponse(revision=revision, changes=[LayoutChange(instance_id="a")])


async def watched(address: str, start_revision: int = 0) -> list[LayoutUpdate]:
    """Every update until the script is over."""
    updates = []
    async with Coordinator(address) as coordinator:
        try:
            async for update in coordinator.watch(start_revision):
                updates.append(update)  # noqa: PERF401 # it ends by raising
        except ModelNotFound:
            return updates
    raise AssertionError("a watch does not end by itself")


@pytest.mark.parametrize(
    ("watches", "asked", "revisions", "resets"),
    [
        pytest.param([[held(5), changed(6)], [changed(7)]], [0, 6, 7], [5, 6, 7], [5], id="it resumes after an end"),
        pytest.param([[held(5), changed(6), LOST], [changed(7)]], [0, 6, 7], [5, 6, 7], [5], id="and after a loss"),
        pytest.param([[held(5), LOST], [held(6), changed(7)]], [0, 0, 7], [5, 6, 7], [5, 6], id="half a snapshot"),
        pytest.param(
            [[held(5), changed(6), WatcherTooSlow("slow")], [held(9), changed(9)]],
            [0, 0, 9],
            [5, 6, 9, 9],
            [5, 9],
            id="a slow watcher restarts",
        ),
        pytest.param(
            [[held(5), changed(6), LOST], [RevisionCompacted("old")], [held(9), changed(10)]],
            [0, 6, 0, 10],
            [5, 6, 9, 10],
            [5, 9],
            id="so does one that was away too long",
        ),
        pytest.param([[changed(3)], [changed(4)]], [0, 3, 4], [3, 4], [3], id="an empty fleet has no snapshot"),
    ],
)
async def test_a_watch_resumes_or_restarts(
    stumbling: Stumbling, watches: Any, asked: list[int], revisions: list[int], resets: list[int]
) -> None:
    stumbling.watches = watches
    updates = await watched(stumbling.address)
    assert stumbling.asked == asked
    assert [update.revision for update in updates] == revisions
    assert [update.revision for update in updates if update.reset] == resets


async def test_a_watch_gives_up_once_its_patience_is_over() -> None:
    async with Coordinator("127.0.0.1:1") as coordinator:
        with pytest.raises(Unreachable, match=r"no coordinator responds at 127\.0\.0\.1:1"):
            await anext(coordinator.watch(retry_seconds=0))


async def test_a_stream_of_lookups_opens_again_after_its_end(stumbling: Stumbling) -> None:
    async with Coordinator(stumbling.address) as coordinator, coordinator.lookup_stream() as stream:
        with pytest.raises(Unreachable, match="ended the lookups"):
            await stream.lookup(PROMPT)
        stumbling.lookups_until_end = 3
        assert [(await stream.lookup(PROMPT)).revision for _ in range(3)] == [2, 1, 0]


async def test_lookups_that_are_asked_together_share_messages(stumbling: Stumbling) -> None:
    stumbling.lookups_until_end = 200
    async with Coordinator(stumbling.address) as coordinator, coordinator.lookup_stream() as stream:
        answers = await asyncio.gather(*(stream.lookup(PROMPT) for _ in range(200)))
    assert [answer.revision for answer in answers] == list(range(199, -1, -1))
    assert sum(stumbling.questions) == 200
    assert len(stumbling.questions) < 20


async def test_lookups_that_are_too_long_together_do_not_share_messages(stumbling: Stumbling) -> None:
    stumbling.lookups_until_end = 5
    half = [100_000] * 100_000  # 300 kB
    async with Coordinator(stumbling.address) as coordinator, coordinator.lookup_stream() as stream:
        prompts = [half, half, PROMPT, PROMPT, half]
        answers = await asyncio.gather(*(stream.lookup(prompt) for prompt in prompts))
    assert [answer.revision for answer in answers] == [4, 3, 2, 1, 0]
    assert stumbling.questions == [1, 3, 1]


@asynccontextmanager
async def stuck_fleet(port: int, fleet: dict[str, ScriptedInstance]) -> AsyncIterator[ScriptedInstance]:
    """A coordinator, `a` with the prompt's chunks, and `b`, which takes orders and carries none out."""
    async with (
        server.Coordinator(CoordinatorConfig(port=port, http_port=OFF, cluster_secret="hush")) as serving,
        rpc.open_channel(serving.address) as channel,
        ScriptedInstance(channel, fleet, "a", LLAMA, CHUNKS),
        ScriptedInstance(channel, fleet, "b", LLAMA) as b,
    ):
        b.going.clear()
        yield b


async def test_waiting_and_watching_outlast_a_restart_of_the_coordinator(free_port: Callable[[], int]) -> None:
    port = free_port()
    fleet: dict[str, ScriptedInstance] = {}
    async with Coordinator(f"127.0.0.1:{port}") as coordinator:
        async with stuck_fleet(port, fleet) as b:
            move = await coordinator.move(PROMPT, source="a", destination="b")
            name = move.name
            await until(lambda: bool(b.orders))
            updates = coordinator.watch()
            assert (await anext(updates)).changes[0].instance_id == "a"
            assert not (await anext(updates)).snapshot
            waiting = asyncio.ensure_future(move.wait(60))
            watching = asyncio.ensure_future(anext(updates))
            await asyncio.sleep(0)
        async with (
            server.Coordinator(CoordinatorConfig(port=port, http_port=OFF, cluster_secret="hush")) as serving,
            rpc.open_channel(serving.address) as channel,
        ):
            while not (update := await watching).reset:  # the instances left before the coordinator did
                watching = asyncio.ensure_future(anext(updates))
            assert update.changes == ()
            await updates.aclose()
            fleet.clear()
            async with (
                ScriptedInstance(channel, fleet, "a", LLAMA, KEYS[1:]),
                ScriptedInstance(channel, fleet, "b", LLAMA, KEYS[:1]),
            ):
                result = await asyncio.wait_for(waiting, 60)  # the request was repeated once both were known
            assert (result.chunk_count, result.dropped_chunk_count) == (len(KEYS), len(KEYS) - 1)
            assert (move.name == name, move.is_repeated, move.state) == (False, True, "done")


async def test_an_operation_of_another_client_is_not_repeated(free_port: Callable[[], int]) -> None:
    port = free_port()
    fleet: dict[str, ScriptedInstance] = {}
    async with Coordinator(f"127.0.0.1:{port}") as coordinator:
        async with stuck_fleet(port, fleet):
            await coordinator.move(PROMPT, source="a", destination="b")
            (found,) = await coordinator.operations()
        async with server.Coordinator(CoordinatorConfig(port=port, http_port=OFF, cluster_secret="hush")):
            with pytest.raises(OperationNotFound, match="repeat the call with the same request_id"):
                await asyncio.wait_for(found.wait(60), 60)
