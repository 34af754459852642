"""Prompts for which requests wait get a second holder: a proxy before scripted engines, with real nodes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkv import cli
from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.commands import flags
from lmkv_kernels import checksum
from lmkv_server.node.node import Node
from lmkv_server.proxy.routing.replicas import HotPrefixes, PromptTokens, Relief
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import until
from tests.server.node.engine_client import absent_count
from tests.server.node.test_node_fleet import SPEC, TwoNodes
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS
from tests.server.proxy.scripted_engine import ScriptedEngine
from tests.waiting import WAIT_SECONDS, eventually

HOT = [number % 250 + 1 for number in range(3 * SPEC.chunk_size)]
COLD = [number % 250 + 2 for number in range(3 * SPEC.chunk_size)]
REPLICAS = "lmkv_proxy_replicas_total"


def keys(tokens: Sequence[int]) -> list[ChunkKey]:
    return keys_of(tokens, SPEC, secret=b"")


def held_chunks(node: Node, tokens: Sequence[int]) -> int:
    return sum(node.tier.get(key) is not None for key in keys(tokens))


class Site:
    """A proxy, and two engines with a node each; the first one's holds both prompts."""

    def __init__(self, nodes: TwoNodes, engines: list[ScriptedEngine], front: Front) -> None:
        self.nodes = nodes
        self.engines = engines
        self.front = front
        self._waiting: list[asyncio.Task[Any]] = []

    async def ask(self, tokens: Sequence[int], *, rest: int = 0) -> None:
        """Sends a request, and waits until it waits at an engine. `rest` makes its end differ from others."""
        body = {"model": SPEC.model_name, "prompt": [*tokens, rest], "max_tokens": 1, "temperature": 0}
        self._waiting.append(asyncio.create_task(self.front.ask(COMPLETIONS, body)))
        await until(lambda: sum(len(engine.asked) for engine in self.engines) >= len(self._waiting))

    async def end(self) -> None:
        """Lets the engines answer, and waits until all requests are answered."""
        for engine in self.engines:
            engine.going.set()
        await asyncio.gather(*self._waiting)


async def store(nodes: TwoNodes, tokens: Sequence[int]) -> None:
    parent = b""
    commits = []
    named = keys(tokens)
    for key, extent in zip(named, await nodes.storing.reserve(len(named)), strict=True):
        np.frombuffer(nodes.holder.pool.buffer, np.uint8, SPEC.chunk_bytes, extent.offset)[:] = key[0]
        right = checksum(nodes.holder.pool.buffer, extent.offset, SPEC.chunk_bytes)
        commits.append(nodes.storing.commit(key, extent, checksum=right, parent=parent))
        parent = key
    await nodes.storing.say(commit=commits)
    request = pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=named)

    async def known() -> int:
        return absent_count(await nodes.asking.stub.Lookup(request, timeout=WAIT_SECONDS))

    await eventually(known, len(named))


@pytest.fixture
async def site(runtime_dir: Path, make_engine: MakeEngine, make_proxy: MakeProxy) -> AsyncIterator[Site]:
    async with TwoNodes(runtime_dir) as nodes:
        for tokens in (HOT, COLD):
            await store(nodes, tokens)
        engines = [await make_engine(name) for name in ("holder", "asker")]
        for engine in engines:
            engine.model = SPEC.model_name
        front = await make_proxy(
            engines=engines, policy="kv_aware", coordinator_address=nodes.coordinator.address, lookup_timeout=20
        )
        for engine in engines:
            engine.going.clear()
        site = Site(nodes, engines, front)
        yield site
        await site.end()


async def test_a_prompt_for_which_requests_wait_gets_a_second_holder_and_another_does_not(site: Site) -> None:
    await site.ask(COLD)
    asked = 0
    while not site.front.metric(REPLICAS):
        asked += 1
        await site.ask(HOT, rest=asked)
        assert asked < 20
    assert asked > 2, "one request that waits is no reason"
    await until(lambda: held_chunks(site.nodes.asker, HOT) == 3)
    assert held_chunks(site.nodes.asker, COLD) == 0
    assert site.front.metric(REPLICAS, outcome="accepted") == 1
    table = await explained(site, "--tokens", ",".join(map(str, HOT)))
    row = next(line.split() for line in table if line.startswith(site.engines[0].url))
    assert (row[1], row[2]) == ("holder", str(len(HOT)))
    row = next(line.split() for line in table if line.startswith(site.engines[1].url))
    assert (row[1], row[2], row[-1]) == ("asker", str(len(HOT)), "yes"), "it holds it, and has less to do"
    assert "no engine has reported its rate yet: a second stands for one token" in table
    row = next(line.split() for line in table if line.startswith("asker") and "accepted" in line)
    assert row[:3] == ["asker", "holder", str(len(HOT))]
    await site.ask(HOT)
    await until(lambda: len(site.engines[1].asked) >= 1, "the copy is not used")


async def explained(site: Site, *prompt: str) -> list[str]:
    """The lines of `lmkv explain` about the routes."""
    arguments = ["explain", *prompt, "--coordinator", site.nodes.coordinator.address, "--proxy", site.front.proxy.url]
    output = io.StringIO()
    with redirect_stdout(output):
        assert await asyncio.to_thread(cli.main, arguments, {"explain": lambda: flags.explain}) == 0
    return output.getvalue().splitlines()


@pytest.mark.parametrize(
    "body", [{}, {"token_count": -1}, {"token_count": 1, "held": {"a": "b"}}, {"token_count": 1, "x": 1}]
)
async def test_a_wrong_question_about_routes_is_refused(site: Site, body: dict[str, Any]) -> None:
    assert (await site.front.ask("/engines/explain", body)).status_code == 400


async def test_nothing_is_copied_while_the_node_loads_for_requests(site: Site) -> None:
    assert site.nodes.asker.peer_side
    inflight = site.nodes.asker.peer_side.fetcher.inflight
    awaited = keys(COLD)[:1]
    inflight.begin(awaited)  # as if another fetch read it: the load waits for that
    await site.nodes.asking.lookup("cold", keys(COLD))
    loading = asyncio.create_task(site.nodes.load("cold", 0, 3, timeout_seconds=round(WAIT_SECONDS)))
    await until(lambda: site.nodes.asker._tier_stack.is_loading)
    asked = 0
    while not site.front.metric(REPLICAS):
        asked += 1
        await site.ask(HOT, rest=asked)
        assert asked < 20
    assert site.front.metric(REPLICAS, outcome="rejected") == 1
    assert held_chunks(site.nodes.asker, HOT) == 0
    inflight.end(awaited)
    await loading
    assert (held_chunks(site.nodes.asker, COLD), held_chunks(site.nodes.asker, HOT)) == (3, 0)


RELIEF = Relief(
    instance_id="other",
    source="holder",
    seconds=90.0,
    held_count=100,
    own_count=0,
    tokens_per_second=10.0,
    cost_per_token=1.0,
)


def prompt(number: int) -> PromptTokens:
    return PromptTokens(tokens=[number] * 100, model_name="m", cache_salt="")


def test_a_prefix_is_worth_a_copy_when_several_requests_have_waited_for_it() -> None:
    hot = HotPrefixes()
    assert [hot.add(prompt(1), RELIEF, 0.0)[0] for _ in range(4)] == [0, 0, 100, 0]
    assert [hot.add(prompt(2), RELIEF, 10_000.0 * time)[0] for time in range(5)] == [0] * 5, "long ago is forgotten"


def test_prompts_that_share_a_prefix_have_that_copied() -> None:
    hot = HotPrefixes()
    shared = [1] * 64
    found = [
        hot.add(PromptTokens(tokens=[*shared, *[number] * 36], model_name="m", cache_salt=""), RELIEF, 0.0)[0]
        for number in range(2, 5)
    ]
    assert found[:2] == [0, 0]
    assert 48 < found[2] <= 64
    assert HotPrefixes().add(replace(prompt(1), cache_salt="a"), RELIEF, 0.0)[0] == 0


def test_prompts_of_other_salts_and_models_do_not_count() -> None:
    hot = HotPrefixes()
    others = [replace(prompt(1), cache_salt="a"), replace(prompt(1), model_name="n"), prompt(1), prompt(1)]
    assert [hot.add(one, RELIEF, 0.0)[0] for one in others] == [0, 0, 0, 0]


def test_what_the_other_engine_holds_costs_nothing_and_is_not_copied() -> None:
    hot = HotPrefixes()
    assert [hot.add(prompt(1), replace(RELIEF, own_count=100), 0.0)[0] for _ in range(9)] == [0] * 9
    assert not len(hot)


def test_a_client_of_many_prompts_takes_no_more_memory() -> None:
    hot = HotPrefixes(limit=50)
    for number in range(200):
        hot.add(prompt(number), RELIEF, 0.0)
        assert len(hot) <= 50
