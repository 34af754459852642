"""Requests that are cancelled or fail at any of their awaits count nowhere afterwards, and leave no handoff behind."""

from __future__ import annotations

import asyncio

import pytest

from lmkv.runtime import turns
from lmkv.runtime.memory_budget import MemoryBudget
from lmkv_server.proxy import admission
from lmkv_server.proxy.admission import Admission
from lmkv_server.proxy.pd.handler import RequestHandler
from lmkv_server.proxy.routing.health import EngineFailover
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import MakeEngine, MakeProxy
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS, PLAIN, completion
from tests.server.proxy.scripted_engine import Json
from tests.support.interruptions import Interrupter

PATIENCE_SECONDS = 1.0
"""Time after which the client disconnects."""


def id_of(handoff: Json) -> str:
    return str(handoff["handoff_id"])


def handoffs(bodies: list[Json]) -> set[str]:
    """The handoffs that requests name."""
    return {id_of(handoff) for body in bodies if (handoff := (body.get("kv_transfer_params") or {}).get("lmkv"))}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "method",
    [(RequestHandler, "serve"), (EngineFailover, "run")],
    ids=lambda method: f"{method[0].__name__}.{method[1]}",
)
async def test_a_request_is_counted_no_longer_and_leaves_no_handoff(
    monkeypatch: pytest.MonkeyPatch,
    make_engine: MakeEngine,
    make_proxy: MakeProxy,
    method: tuple[type, str],
    stream: bool,
) -> None:
    interrupter = Interrupter(monkeypatch, method)
    prefiller, decoder = await make_engine("p-1"), await make_engine("d-1")
    front = await make_proxy([prefiller], [decoder], max_concurrent_requests=1, health_interval=3600.0)
    body = completion(PLAIN, max_tokens=3, ignore_eos=True, stream=stream)
    for interruption in interrupter.every_await():
        prefiller.asked.clear()
        decoder.asked.clear()
        decoder.ended.clear()
        asking = asyncio.ensure_future(front.ask(COMPLETIONS, body))
        await asyncio.wait([asking], timeout=PATIENCE_SECONDS)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not any(engine.in_flight_count for engine in front.proxy.pools.engines))
        interruption.end()
        await until(lambda: handoffs(prefiller.bodies()) <= handoffs(decoder.bodies()) | set(map(id_of, decoder.ended)))
        for engine in front.proxy.pools.engines:
            engine.mark_healthy()
        assert (await front.ask(COMPLETIONS, body)).status_code == 200, "it is still counted as admitted"


async def test_a_large_body_holds_no_memory_and_no_turn_of_others_afterwards(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    budget, shared = MemoryBudget(1 << 30), turns.of_loop()
    monkeypatch.setattr(admission, "of_process", lambda: budget)
    interrupter = Interrupter(monkeypatch, (Admission, "_run"))
    engine = await make_engine("e-1")
    front = await make_proxy(engines=[engine], health_interval=3600.0)
    body = completion(PLAIN, max_tokens=1) | {"padding": "x" * 4 * turns.LARGE_BYTES}
    for interruption in interrupter.every_await():
        asking = asyncio.ensure_future(front.ask(COMPLETIONS, body))
        await asyncio.wait([asking], timeout=PATIENCE_SECONDS)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: budget.held_bytes == budget.waiting_count == shared.waiting_count == 0)
        interruption.end()
        for one in front.proxy.pools.engines:
            one.mark_healthy()
        assert (await front.ask(COMPLETIONS, body)).status_code == 200
    await until(lambda: budget.held_bytes == 0)
