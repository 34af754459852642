"""Engines and workers that end: everything that they were granted is returned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv.errors import (
    LmkvError,
)
from lmkv.pool.socket import attach
from lmkv_server.node.node import Node
from lmkv_server.node.sessions.session import HOLD_SHARE
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import CAPACITY, LIMIT, is_clean
from tests.waiting import until


async def granted(engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("1", chunk_keys(0, 1))
    assert len(await engine.reserve(3)) == 3


async def test_when_the_stream_is_gone_and_no_worker_is_left_everything_is_back(node: Node) -> None:
    async with EngineClient(node) as engine:
        await granted(engine)
        assert not is_clean(node)
    await until(lambda: is_clean(node))
    assert node.engines.mapped_count == 0


async def test_an_engine_that_ends_its_side_politely_is_gone_too(node: Node) -> None:
    engine = EngineClient(node)
    async with engine:
        await granted(engine)
        await engine.call.done_writing()
        assert await engine.ending() is None
        await until(lambda: is_clean(node))


WORKER = """
import sys
from lmkv.pool.socket import attach
pool = attach(sys.argv[1], sys.argv[2], 0, int(sys.argv[3]), 60.0)
print("mapped", flush=True)
sys.stdin.read()
"""


def start_worker(node: Node, engine_id: str = "engine") -> subprocess.Popen[str]:
    """A process that has the pool mapped until it is killed."""
    return start(WORKER, str(node.config.pool_socket), engine_id, str(node.epoch))


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process with pipes, started where it can import the tests."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )


async def test_nothing_is_taken_back_before_the_kernel_says_that_the_worker_is_gone(node: Node) -> None:
    async with EngineClient(node) as engine:
        await granted(engine)
        worker = start_worker(node)
        try:
            assert worker.stdout
            assert await asyncio.to_thread(worker.stdout.readline) == "mapped\n"
            await engine.aclose()
            await until(lambda: node.engines.attached_count == 0)
            await asyncio.sleep(0.2)
            assert node.engines.mapped_count == 1
            assert not is_clean(node), "the worker may still write"
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: is_clean(node))
            assert node.engines.mapped_count == 0
            assert len(node.tier) == 2, "what was committed stays"
        finally:
            worker.kill()
            worker.communicate()


ENGINE = """
import asyncio, sys
from lmkv import rpc
from lmkv.pool.socket import attach
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.engine_service_pb2_grpc import EngineServiceStub
from tests.server.node.cases import (chunk_keys)
from tests.support.specs import small_spec
from lmkv.keys import join_keys

async def main():
    async with rpc.open_channel("unix:" + sys.argv[1]) as channel:
        call = EngineServiceStub(channel).Attach()
        hello = pb.Hello(engine_id="killed", spec=small_spec().to_proto(), worker_count=1)
        lookup = pb.LookupChunks(lookup_id="1", chunk_keys=join_keys(chunk_keys(0, 1)))
        acts = [pb.Act(hello=hello), pb.Act(lookup=lookup), pb.Act(reserve=pb.ReserveCredits(counts=[3]))]
        await call.write(pb.AttachRequest(acts=acts))
        welcome = (await call.read()).events[0].welcome
        pool = attach(welcome.pool_socket, "killed", 0, welcome.epoch, 60.0)
        credits = 0
        while not credits:
            credits = sum(len(event.granted.credits) for event in (await call.read()).events)
        print("granted", credits, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_engine_that_is_killed_gives_everything_back(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("other", chunk_keys(9))
    killed = start(ENGINE, str(node.config.engine_socket))
    try:
        assert killed.stdout
        assert await asyncio.to_thread(killed.stdout.readline) == "granted 3\n"
        assert [chunk.holds for chunk in node.tier] == [1, 1]
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: is_clean(node))
        assert node.engines.mapped_count == 1
        assert len((await engine.lookup("1", chunk_keys(0, 1))).own) == 2
    finally:
        killed.kill()
        killed.communicate()


async def test_a_worker_that_comes_after_its_engine_is_turned_away(node: Node) -> None:
    with pytest.raises(LmkvError, match="not attached"):
        await asyncio.to_thread(attach, node.config.pool_socket, "unknown", 0, node.epoch, 5.0)


async def test_holds_of_one_engine_take_at_most_its_share_of_the_pool(node: Node) -> None:
    numbers = list(range(CAPACITY))
    async with EngineClient(node) as engine:
        for start in range(0, CAPACITY, LIMIT):
            await engine.store(chunk_keys(*numbers[start : start + LIMIT]))
        found = await engine.lookup("1", chunk_keys(*numbers))
        assert len(found.own) == CAPACITY // HOLD_SHARE


# ---- what waits to be said
