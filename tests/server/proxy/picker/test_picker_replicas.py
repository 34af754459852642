"""A picker has a prompt copied for which requests wait, as a proxy does."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from lmkv_server.proxy.routing.key_lookup import Namespaces
from tests.server.coordinator.scripted_instance import until
from tests.server.node.test_node_fleet import SPEC, TwoNodes
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import MakePicker
from tests.server.proxy.routing.test_replicas import HOT, held_chunks, store

REPLICAS = "lmkv_picker_replicas_total"


async def test_a_prompt_for_which_requests_wait_gets_a_second_holder(
    runtime_dir: Path, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    async with TwoNodes(runtime_dir) as nodes, AsyncExitStack() as streams:
        await store(nodes, HOT)
        engines = [await make_engine(name) for name in ("holder", "asker")]
        front = await make_picker(engines, coordinator_address=(nodes.coordinator.address,))
        await until(lambda: bool(Namespaces(front.client.listed).of(SPEC.model_name)))
        asked = 0
        while not front.metric(REPLICAS):
            asked += 1
            assert asked < 20
            body = json.dumps({"model": SPEC.model_name, "prompt": [*HOT, asked]}).encode()
            exchange = await streams.enter_async_context(front.gateway.exchange())
            await exchange.pick(body)
        assert asked > 2, "one request that waits is no reason"
        await until(lambda: held_chunks(nodes.asker, HOT) == 3)
        assert front.metric(REPLICAS, outcome="accepted") == 1
        held = {"holder": len(HOT), "asker": len(HOT)}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url = f"http://127.0.0.1:{front.picker.metrics_port}/engines/explain"
            answer = (await client.post(url, json={"token_count": len(HOT), "held": held})).json()
        chosen = [engine["instance_id"] for engine in answer["engines"] if engine["is_chosen"]]
        assert chosen == ["asker"]
        (copy,) = answer["copies"]
        assert (copy["source"], copy["instance_id"], copy["outcome"]) == ("holder", "asker", "accepted")
