"""Mode route: engines are selected by load, by session and by cached prefix."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from functools import partial
from typing import Any

import grpc
import pytest

from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.proxy.openai import MESSAGES, RESPONSES
from lmkv_server.proxy.routing.pools import HOLD_FACTOR, REQUEST_TOKENS
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.pd.test_prefill_decode import CHAT, COMPLETIONS, alone, answer_of, chat, completion
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine, tokens_of
from tests.support.specs import make_spec

SPEC = make_spec(
    model_name=MODEL, model_id="scripted@1", kv_dtype="bfloat16", head_size=64, chunk_size=16, vocab_size=257
)
PROMPT = "a prompt of which one node holds four chunks already, and more"


def counts(engines: list[ScriptedEngine]) -> list[int]:
    return [len(engine.asked) for engine in engines]


async def three(make_engine: MakeEngine, **settings: Any) -> list[ScriptedEngine]:
    return [await make_engine(f"i-{number}", **settings) for number in range(3)]


@pytest.mark.parametrize("body", [completion(PROMPT, max_tokens=9), completion(PROMPT, max_tokens=9, stream=True)])
async def test_an_answer_is_passed_on_as_it_is(
    make_engine: MakeEngine, make_proxy: MakeProxy, body: dict[str, Any]
) -> None:
    engine = await make_engine()
    front = await make_proxy(engines=[engine])
    assert answer_of(await front.ask(COMPLETIONS, body)) == await alone(engine, COMPLETIONS, body)
    assert engine.bodies() == [body]


async def test_engines_take_turns(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="round-robin")
    for _ in range(6):
        await front.ask(COMPLETIONS, completion(PROMPT))
    assert counts(engines) == [2, 2, 2]


async def test_the_least_loaded_engine_takes_a_request(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="least_loaded")
    for engine in engines[:2]:
        engine.going.clear()
    busy = [asyncio.create_task(front.ask(COMPLETIONS, completion(PROMPT))) for _ in range(2)]
    await until(lambda: sum(counts(engines)) == 2)
    free = next(engine for engine in engines if not engine.asked)
    free.going.set()
    for _ in range(3):
        await front.ask(COMPLETIONS, completion(PROMPT))
    assert len(free.asked) >= 3
    for engine in engines:
        engine.going.set()
    await asyncio.gather(*busy)


@pytest.mark.parametrize("by", ["header", "user"])
async def test_a_session_stays_with_its_engine(make_engine: MakeEngine, make_proxy: MakeProxy, by: str) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="round_robin", health_interval=0.05)

    async def ask(session: str) -> None:
        if by == "header":
            await front.ask(COMPLETIONS, completion(PROMPT), **{"X-Session-Id": session})
        else:
            await front.ask(COMPLETIONS, completion(PROMPT, user=session))

    for _ in range(4):
        await ask("one")
    assert sorted(counts(engines)) == [0, 0, 4]
    home = next(engine for engine in engines if engine.asked)
    home.health = 500
    await until(lambda: sum(engine.is_healthy for engine in front.proxy.pools.engines) == 2)
    for _ in range(3):
        await ask("one")
    assert sorted(counts(engines)) == [0, 3, 4], "it has moved, and stays where it is now"


@pytest.fixture
async def holders(coordinator: Coordinator, make: Make) -> Any:
    """Instances i-0 and i-2, which hold one chunk of the prompt, and three."""
    keys = keys_of(tokens_of({"prompt": PROMPT}), SPEC)
    async with make("i-0", keys[:1], SPEC), make("i-2", keys[:3], SPEC):
        yield coordinator.address


async def test_the_engine_with_the_longest_cached_prefix_is_selected(
    holders: str, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="kv_aware", coordinator_address=holders, lookup_timeout=20)
    for body in (completion(PROMPT), completion(tokens_of({"prompt": PROMPT})), completion([PROMPT])):
        await front.ask(COMPLETIONS, body)
    assert counts(engines) == [0, 0, 3]
    assert sum(engine.tokenize_count for engine in engines) == 2, "tokens need none"
    await front.counts("lmkv_proxy_lookups_total", 3, outcome="hit")
    await front.counts("lmkv_proxy_lookup_hit_tokens_total", 3 * 48)
    await front.counts("lmkv_proxy_lookup_asked_tokens_total", 3 * len(PROMPT))


def _have_all(engines: list[ScriptedEngine], requests: list[asyncio.Task[Any]]) -> bool:
    return any(request.done() for request in requests) or engines[2].waiting_count == len(requests)


async def test_load_outweighs_cached_tokens(holders: str, make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="kv_aware", coordinator_address=holders, lookup_timeout=20)
    engines[2].going.clear()
    most = 2 + (HOLD_FACTOR + 1) * len(PROMPT) // REQUEST_TOKENS
    waiting = []
    for _ in range(most):
        waiting.append(asyncio.create_task(front.ask(COMPLETIONS, completion(PROMPT))))
        await until(partial(_have_all, engines, waiting))
        if counts(engines)[2] + engines[2].waiting_count < len(waiting):
            break
    assert 1 < engines[2].waiting_count < most, "48 tokens outweigh some requests"
    engines[2].going.set()
    await asyncio.gather(*waiting)


async def test_chats_are_looked_up_as_the_engine_renders_them(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = await three(make_engine)
    body = chat(PROMPT)
    async with make("i-1", keys_of(tokens_of(body), SPEC), SPEC):
        front = await make_proxy(
            engines=engines, policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
        )
        await front.ask(CHAT, body)
        assert counts(engines) == [0, 1, 0]


ASKED = [{"role": "user", "content": PROMPT}]
CUT = {"truncate_prompt_tokens": 50}
TOKENIZED: list[tuple[str, dict[str, Any], list[int]]] = [
    (path, body, tokens_of(body))
    for path, body in (
        (CHAT, chat(PROMPT, reasoning_effort="low")),
        (CHAT, chat(PROMPT, **CUT)),
        (CHAT, chat(PROMPT, prompt=[1, 2, 3])),
        (COMPLETIONS, completion(PROMPT, **CUT)),
        (COMPLETIONS, completion(PROMPT, **CUT, truncation_side="right")),
        (COMPLETIONS, completion(list(PROMPT.encode()), **CUT)),
        (COMPLETIONS, completion([list(PROMPT.encode())], **CUT)),
    )
]
TOKENIZED += [
    (RESPONSES, {"model": MODEL, "input": PROMPT, "stream": True}, tokens_of({"messages": ASKED})),
    (RESPONSES, {"model": MODEL, "input": ASKED, "reasoning": {"effort": "low"}},
     tokens_of({"messages": ASKED, "reasoning_effort": "low"})),
    (MESSAGES, {"model": MODEL, "messages": ASKED, "max_tokens": 9, "output_config": {"effort": "low"}},
     tokens_of({"messages": ASKED, "reasoning_effort": "low"})),
]  # fmt: skip
"""Requests whose tokens depend on more than a prompt or messages, with their tokens."""


@pytest.mark.parametrize(("path", "body", "tokens"), TOKENIZED)
async def test_the_tokens_that_are_looked_up_are_those_that_the_engine_computes(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_proxy: MakeProxy,
    path: str,
    body: dict[str, Any],
    tokens: list[int],
) -> None:
    engines = await three(make_engine, other_paths=(RESPONSES, MESSAGES))
    whole = len(tokens) // SPEC.chunk_size
    async with make("i-1", keys_of(tokens, SPEC)[:whole], SPEC):
        front = await make_proxy(
            engines=engines, policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
        )
        assert (await front.ask(path, body)).status_code == 200
        assert counts(engines) == [0, 1, 0]
        await front.counts("lmkv_proxy_lookup_asked_tokens_total", len(tokens))
        await front.counts("lmkv_proxy_lookup_hit_tokens_total", whole * SPEC.chunk_size)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"model": MODEL, "input": PROMPT, "previous_response_id": "resp_1"}),
        (RESPONSES, {"model": MODEL, "input": 7}),
        (MESSAGES, {"model": MODEL, "messages": [*ASKED, {"role": "system", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_a_prompt_whose_tokens_are_unknown_is_routed_by_load_without_a_warning(
    holders: str,
    make_engine: MakeEngine,
    make_proxy: MakeProxy,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
) -> None:
    engines = await three(make_engine, other_paths=(RESPONSES, MESSAGES))
    front = await make_proxy(engines=engines, policy="kv_aware", coordinator_address=holders, lookup_timeout=20)
    for _ in range(6):
        assert (await front.ask(path, body)).status_code == 200
    assert counts(engines) == [2, 2, 2]
    await front.counts("lmkv_proxy_lookups_total", 6, outcome="skipped")
    assert sum(engine.tokenize_count for engine in engines) == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_prefix_decides_between_decode_engines_for_paths_that_are_passed_on(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    prefiller, *decoders = await three(make_engine, other_paths=(RESPONSES, MESSAGES))
    tokens = tokens_of({"messages": ASKED})
    async with make("i-0", keys_of(tokens, SPEC), SPEC), make("i-2", keys_of(tokens[:32], SPEC), SPEC):
        front = await make_proxy(
            [prefiller], decoders, policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
        )
        for _ in range(2):
            assert (await front.ask(RESPONSES, {"model": MODEL, "input": PROMPT})).status_code == 200
        assert counts([prefiller, *decoders]) == [0, 0, 2]


async def test_adapters_and_salts_are_looked_up_apart(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = await three(make_engine)
    tokens = tokens_of({"prompt": PROMPT})
    served = {"tuned": "tuned@1", "nickname": ""}
    async with (
        make("i-0", keys_of(tokens, SPEC, lora="tuned@1"), SPEC, served),
        make("i-1", keys_of(tokens, SPEC, cache_salt="salt"), SPEC, served),
        make("i-2", keys_of(tokens, SPEC), SPEC, served),
    ):
        front = await make_proxy(
            engines=engines, policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
        )
        cases: tuple[tuple[dict[str, str], int], ...] = (
            ({"model": "tuned"}, 0),
            ({"cache_salt": "salt"}, 1),
            ({}, 2),
            ({"model": "nickname"}, 2),
        )
        for more, number in cases:
            before = len(engines[number].asked)
            await front.ask(COMPLETIONS, completion(PROMPT) | more)
            assert len(engines[number].asked) == before + 1
        await front.counts("lmkv_proxy_lookups_total", 4, outcome="hit")


async def test_an_adapter_that_was_never_used_is_a_miss(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engine = await make_engine("i-0")
    async with make("i-0", keys_of(tokens_of({"prompt": PROMPT}), SPEC), SPEC):
        front = await make_proxy(
            engines=[engine], policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
        )
        assert (await front.ask(COMPLETIONS, completion(PROMPT) | {"model": "tuned"})).status_code == 200
        await front.counts("lmkv_proxy_lookups_total", 1, outcome="miss")


async def test_prefill_engines_are_chosen_by_what_they_hold(
    holders: str, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    prefillers = await three(make_engine)
    decoder = await make_engine("d")
    front = await make_proxy(prefillers, [decoder], policy="kv_aware", coordinator_address=holders, lookup_timeout=20)
    body = completion(PROMPT, max_tokens=9)
    assert answer_of(await front.ask(COMPLETIONS, body)) == await alone(decoder, COMPLETIONS, body)
    assert counts(prefillers) == [0, 0, 1]


async def test_without_a_coordinator_requests_are_routed_all_the_same(
    make_engine: MakeEngine, make_proxy: MakeProxy, free_port: Any
) -> None:
    engines = await three(make_engine)
    front = await make_proxy(engines=engines, policy="kv_aware", coordinator_address=f"127.0.0.1:{free_port()}")
    for _ in range(3):
        assert (await front.ask(COMPLETIONS, completion(PROMPT))).status_code == 200
    assert counts(engines) == [1, 1, 1]
    await front.counts("lmkv_proxy_lookups_total", 3, outcome="failed")


async def test_a_lookup_at_a_coordinator_that_is_gone_is_repeated_at_the_next_one(
    holders: str, make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engines = await three(make_engine)
    coordinators = ("127.0.0.1:1", holders)
    front = await make_proxy(engines=engines, policy="kv_aware", coordinator_address=coordinators, lookup_timeout=20)
    await front.ask(COMPLETIONS, completion(PROMPT))
    assert counts(engines) == [0, 0, 1]
    await front.counts("lmkv_proxy_lookups_total", 1, outcome="hit")


async def test_lookups_that_all_fail_are_logged_once_and_their_success_once(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_proxy: MakeProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = await make_engine("i-0")
    front = await make_proxy(
        engines=[engine], policy="kv_aware", coordinator_address=coordinator.address, lookup_timeout=20
    )
    async with make("other", [], dataclasses.replace(SPEC, model_name="another")):
        for _ in range(2):
            await front.ask(COMPLETIONS, completion(PROMPT))
        assert "lookups failed" not in caplog.text
        for _ in range(6):
            await front.ask(COMPLETIONS, completion(PROMPT))
        assert caplog.text.count("lookups failed; requests are routed by load alone") == 1
        assert f"no engine has registered the model '{MODEL}'" in caplog.text
        async with make("i-0", keys_of(tokens_of({"prompt": PROMPT}), SPEC), SPEC):
            for _ in range(3):
                await front.ask(COMPLETIONS, completion(PROMPT))
        assert caplog.text.count("lookups succeed again, after 8 failures") == 1


async def test_a_coordinator_that_hangs_costs_no_more_than_the_lookup_timeout(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    async def swallow(_: Any, __: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    handler = grpc.method_handlers_generic_handler(
        "lmkv.v1.CacheService", {"Lookup": grpc.unary_unary_rpc_method_handler(swallow)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        engine = await make_engine("i-0")
        front = await make_proxy(
            engines=[engine], policy="kv_aware", coordinator_address=f"127.0.0.1:{port}", lookup_timeout=0.05
        )
        assert (await front.ask(COMPLETIONS, completion(PROMPT))).status_code == 200
        await front.counts("lmkv_proxy_lookups_total", 1, outcome="failed")
    finally:
        await server.stop(0)


async def test_requests_that_any_engine_can_serve_are_forwarded_to_one(
    make_engine: MakeEngine, make_proxy: MakeProxy
) -> None:
    engine = await make_engine()
    front = await make_proxy(engines=[engine])
    models = (await front.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [MODEL, "tuned"]
    tokens = await front.ask("/tokenize", {"model": MODEL, "prompt": "ab"})
    assert tokens.json()["tokens"] == [97, 98]


async def test_engines_that_ask_for_a_key(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    engine = await make_engine("i-0")
    engine.api_key = "key"
    front = await make_proxy(engines=[engine], engine_api_key="key")
    assert front.proxy.pools.engines[0].instance_id == "i-0", "the proxy has the key for its own questions"
    assert (await front.ask(COMPLETIONS, completion(PROMPT))).status_code == 401, "clients need their own"
    assert (await front.client.get("/v1/models")).status_code == 401
    allowed = await front.ask(COMPLETIONS, completion(PROMPT), authorization="Bearer key")
    assert allowed.status_code == 200


async def test_an_engine_that_does_not_let_the_proxy_ask_serves_all_the_same(
    make_engine: MakeEngine, make_proxy: MakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await make_engine()
    engine.api_key = "key"
    front: Front = await make_proxy(engines=[engine])
    assert "set engine_api_key" in caplog.text
    allowed = await front.ask(COMPLETIONS, completion(PROMPT), authorization="Bearer key")
    assert allowed.status_code == 200
