"""Which engine is picked: by the prompt that its instance holds, by session, by model and by load."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import pytest

from lmkv.v1.registry_service_pb2 import ListInstancesRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.proxy.openai import RESPONSES
from lmkv_server.proxy.routing.key_lookup import Namespaces
from lmkv_server.proxy.routing.pools import HOLD_FACTOR, REQUEST_TOKENS
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.pd.test_prefill_decode import CHAT, chat
from tests.server.proxy.picker.conftest import Front, MakePicker, host_port
from tests.server.proxy.picker.published import endpoint_of
from tests.server.proxy.routing.test_route import PROMPT, SPEC, TOKENIZED
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine, tokens_of

TOKENS = tokens_of({"prompt": PROMPT})


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT} | fields).encode()


async def some(make_engine: MakeEngine, count: int = 3) -> list[ScriptedEngine]:
    return [await make_engine(f"i-{number}") for number in range(count)]


async def looking_up(
    make_picker: MakePicker, engines: list[ScriptedEngine], address: str, model: str = MODEL, **settings: Any
) -> Front:
    """A picker that knows the specs of a model or an adapter."""
    settings = {"coordinator_address": (address,), "cluster_secret": "hush"} | settings
    front = await make_picker(engines, **settings)
    await until(lambda: bool(Namespaces(front.client.listed).of(model)))
    return front


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": TOKENS}, {"prompt": [PROMPT]}, {"prompt": [TOKENS]}, {"model": "nickname"}],
    ids=["text", "tokens", "one text", "one list of tokens", "another name of the model"],
)
async def test_the_engine_with_the_longest_held_prefix_is_picked(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker, fields: dict[str, Any]
) -> None:
    engines = await some(make_engine)
    keys = keys_of(TOKENS, SPEC)
    async with make("i-0", keys[:1], SPEC), make("i-2", keys[:3], SPEC, {"nickname": ""}):
        front = await looking_up(make_picker, engines, coordinator.address)
        for _ in range(3):
            assert await front.gateway.pick(body(**fields)) == host_port(engines[2])
    assert front.metric("lmkv_picker_lookups_total", outcome="hit") == 3
    assert front.metric("lmkv_picker_lookup_asked_tokens_total") == 3 * len(TOKENS)
    assert front.metric("lmkv_picker_lookup_hit_tokens_total") == 3 * 48
    assert front.metric("lmkv_picker_pick_seconds_count") == 3
    assert sum(engine.tokenize_count for engine in engines) == (
        0 if isinstance(fields.get("prompt"), list) and fields["prompt"] != [PROMPT] else 3
    )


async def test_chats_adapters_and_salts(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 4)
    request = chat(PROMPT)
    served = {"tuned": "tuned@1"}
    async with (
        make("i-0", keys_of(TOKENS, SPEC, lora="tuned@1"), SPEC, served),
        make("i-1", keys_of(TOKENS, SPEC, cache_salt="salt"), SPEC, served),
        make("i-2", keys_of(TOKENS, SPEC), SPEC, served),
        make("i-3", keys_of(tokens_of(request), SPEC), SPEC, served),
    ):
        front = await looking_up(make_picker, engines, coordinator.address, "tuned")
        assert await front.gateway.pick(body(model="tuned")) == host_port(engines[0])
        assert await front.gateway.pick(body(cache_salt="salt")) == host_port(engines[1])
        assert await front.gateway.pick(body()) == host_port(engines[2])
        assert await front.gateway.pick(json.dumps(request).encode(), path=CHAT) == host_port(engines[3])


@pytest.mark.parametrize("parts", [1, 9])
@pytest.mark.parametrize(("path", "request_body", "tokens"), TOKENIZED)
async def test_the_tokens_that_are_looked_up_are_those_that_the_engine_computes(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_picker: MakePicker,
    path: str,
    request_body: dict[str, Any],
    tokens: list[int],
    parts: int,
) -> None:
    engines = await some(make_engine)
    whole = len(tokens) // SPEC.chunk_size
    async with make("i-1", keys_of(tokens, SPEC)[:whole], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        picked = await front.gateway.pick(json.dumps(request_body).encode(), path=path, parts=parts)
    assert picked == host_port(engines[1])
    assert front.metric("lmkv_picker_lookup_asked_tokens_total") == len(tokens)
    assert front.metric("lmkv_picker_lookup_hit_tokens_total") == whole * SPEC.chunk_size


@pytest.mark.parametrize("parts", [1, 7])
async def test_long_token_ids_of_which_the_engine_takes_a_part_are_looked_up_as_that_part(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker, parts: int
) -> None:
    engines = await some(make_engine)
    tokens = list(range(10_000, 30_000))
    async with make("i-1", keys_of(tokens[-1000:], SPEC), SPEC), make("i-2", keys_of(tokens, SPEC), SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        sent = json.dumps({"model": MODEL, "prompt": tokens, "truncate_prompt_tokens": 1000}).encode()
        async with front.gateway.exchange() as exchange:
            assert endpoint_of(await exchange.pick(sent, parts)) == host_port(engines[1])


async def test_a_prompt_whose_tokens_are_unknown_is_picked_by_load(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", keys_of(TOKENS, SPEC), SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        sent = json.dumps({"model": MODEL, "input": PROMPT, "previous_response_id": "resp_1"}).encode()
        picked = {await front.gateway.pick(sent, path=RESPONSES) for _ in range(2)}
    assert picked == {host_port(engine) for engine in engines}
    assert front.metric("lmkv_picker_lookups_total", outcome="skipped") == 2
    assert sum(engine.tokenize_count for engine in engines) == 0


@pytest.mark.parametrize("parts", [1, 7])
async def test_a_prompt_that_arrives_in_parts_has_the_keys_of_its_salt_and_model(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker, parts: int
) -> None:
    engines = await some(make_engine)
    tokens = list(range(10_000, 30_000))
    served = {"tuned": "tuned@1"}
    async with (
        make("i-0", keys_of(tokens, SPEC, lora="tuned@1"), SPEC, served),
        make("i-1", keys_of(tokens, SPEC, cache_salt="salt"), SPEC, served),
        make("i-2", keys_of(tokens, SPEC), SPEC, served),
    ):
        front = await looking_up(make_picker, engines, coordinator.address, "tuned")
        for fields, engine in (
            ({"model": "tuned", "prompt": tokens}, engines[0]),
            ({"prompt": tokens, "model": "tuned"}, engines[0]),
            ({"model": MODEL, "cache_salt": "salt", "prompt": [tokens]}, engines[1]),
            ({"prompt": tokens, "model": MODEL, "cache_salt": "salt"}, engines[1]),
            ({"prompt": tokens, "model": MODEL}, engines[2]),
        ):
            for _ in range(2):
                sent = json.dumps(fields).encode()
                async with front.gateway.exchange() as exchange:
                    assert endpoint_of(await exchange.pick(sent, parts)) == host_port(engine), fields
                    assert await exchange.body() == sent
    assert front.metric("lmkv_picker_lookup_hit_tokens_total") == 10 * len(tokens)
    assert front.metric("lmkv_picker_held_bytes") == 0


async def test_token_ids_that_are_not_the_prompt_are_not_looked_up(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    others = list(range(len(TOKENS)))
    async with make("i-0", keys_of(others, SPEC), SPEC), make("i-1", keys_of(TOKENS, SPEC), SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        for parts in (1, 9):
            sent = json.dumps({"model": MODEL, "x": {"prompt": others}, "prompt": PROMPT}).encode()
            async with front.gateway.exchange() as exchange:
                assert endpoint_of(await exchange.pick(sent, parts)) == host_port(engines[1])


def _has_in_flight(front: Front, engine: ScriptedEngine, count: int) -> bool:
    return front.in_flight(engine) == count


async def test_load_outweighs_held_tokens(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", keys_of(TOKENS, SPEC)[:3], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with AsyncExitStack() as stack:
            most = 2 + (HOLD_FACTOR + 1) * len(TOKENS) // REQUEST_TOKENS
            for count in range(most + 1):
                await until(partial(_has_in_flight, front, engines[1], count))
                if await front.gateway.pick(body()) == host_port(engines[0]):
                    break
                await until(partial(_has_in_flight, front, engines[1], count))
                await (await stack.enter_async_context(front.gateway.exchange())).pick(body())
        assert 1 < count <= most, "48 tokens outweigh some requests"


async def test_a_session_stays_with_its_engine(make_engine: MakeEngine, make_picker: MakePicker) -> None:
    engines = await some(make_engine)
    front = await make_picker(engines, policy="round_robin")
    by_header = {await front.gateway.pick(body(), headers={"X-Session-Id": "one"}) for _ in range(4)}
    by_user = {await front.gateway.pick(body(user="two")) for _ in range(4)}
    assert len(by_header) == len(by_user) == 1
    assert len({await front.gateway.pick(body()) for _ in range(3)}) == 3


async def test_engines_with_the_model_are_preferred(make_engine: MakeEngine, make_picker: MakePicker) -> None:
    engines = [ScriptedEngine("i-0"), ScriptedEngine("i-1")]
    engines[1].model = "special"
    try:
        for engine in engines:
            await engine.start()
        front = await make_picker(engines)
        assert {await front.gateway.pick(body(model="special")) for _ in range(3)} == {host_port(engines[1])}
        assert {await front.gateway.pick(body(model="unknown")) for _ in range(4)} == set(map(host_port, engines))
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_an_unhealthy_engine_is_not_picked(make_engine: MakeEngine, make_picker: MakePicker) -> None:
    engines = await some(make_engine, 2)
    front = await make_picker(engines)
    engines[0].health = 500
    await until(lambda: sum(engine.is_healthy for engine in front.picker.engines) == 1)
    assert {await front.gateway.pick(body()) for _ in range(4)} == {host_port(engines[1])}


async def test_a_coordinator_that_fails_is_never_an_error(
    make: Make, coordinator: Coordinator, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", keys_of(TOKENS, SPEC)[:3], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        assert await front.gateway.pick(body()) == host_port(engines[1])
        await coordinator.aclose()
        picked = [await front.gateway.pick(body()) for _ in range(8)]
    assert set(picked) == {host_port(engines[1])}, "by what was routed there before"
    others = [await front.gateway.pick(body(prompt=[number] * 40)) for number in range(8)]
    assert set(others) == set(map(host_port, engines)), "by load"
    assert front.metric("lmkv_picker_lookups_total", outcome="failed") >= 3


async def test_without_a_coordinator_requests_are_picked_by_load(
    make_engine: MakeEngine, make_picker: MakePicker, free_port: Any
) -> None:
    engines = await some(make_engine)
    front = await make_picker(engines, coordinator_address=(f"127.0.0.1:{free_port()}",))
    assert {await front.gateway.pick(body(prompt=TOKENS)) for _ in range(3)} == set(map(host_port, engines))


async def test_a_coordinator_that_hangs_costs_no_more_than_the_lookup_timeout(
    make: Make, channel: grpc.aio.Channel, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    list_instances: Any = RegistryServiceStub(channel).ListInstances

    async def forward(request: bytes, _: Any) -> bytes:
        answer: bytes = (await list_instances(ListInstancesRequest.FromString(request))).SerializeToString()
        return answer

    async def swallow(_: Any, __: Any) -> Any:
        await asyncio.get_running_loop().create_future()
        yield b""

    methods = {
        "lmkv.v1.RegistryService": {"ListInstances": grpc.unary_unary_rpc_method_handler(forward)},
        "lmkv.v1.CacheService": {"LookupStream": grpc.stream_stream_rpc_method_handler(swallow)},
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(*one) for one in methods.items()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engines = await some(make_engine, 2)
    try:
        async with make("i-1", keys_of(TOKENS, SPEC)[:3], SPEC):
            front = await looking_up(make_picker, engines, f"127.0.0.1:{port}", lookup_timeout=0.05)
            for _ in range(5):
                await front.gateway.pick(body(prompt=TOKENS))
            assert front.metric("lmkv_picker_lookups_total", outcome="failed") >= 3
            assert front.metric("lmkv_picker_lookups_total", outcome="skipped") >= 1, "further requests do not wait"
    finally:
        await server.stop(0)


async def test_lookups_in_flight_do_not_mix(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine)
    prompts = [[number] * 40 for number in range(3)]
    async with (
        make("i-0", keys_of(prompts[0], SPEC)[:2], SPEC),
        make("i-1", keys_of(prompts[1], SPEC)[:2], SPEC),
        make("i-2", keys_of(prompts[2], SPEC)[:2], SPEC),
    ):
        front = await looking_up(make_picker, engines, coordinator.address)
        picked = await asyncio.gather(*(front.gateway.pick(body(prompt=prompts[at % 3])) for at in range(30)))
    assert picked == [host_port(engines[at % 3]) for at in range(30)]


async def test_requests_that_follow_at_once_go_where_their_prompt_is_computed(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine)
    async with make("i-0", [], SPEC), make("i-1", [], SPEC), make("i-2", [], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        first = await front.gateway.pick(body())
        assert {await front.gateway.pick(body(prompt=[*TOKENS, number])) for number in range(5)} == {first}
        other = await front.gateway.pick(body(prompt=[1] * 64))
        assert other != first
