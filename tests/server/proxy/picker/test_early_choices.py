"""Choices by lookups that were made while a prompt arrived: the same as by a lookup of the whole prompt."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.proxy.picker import selection
from lmkv_server.proxy.routing.prompt import ArrivingPrompt
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import Front, MakePicker, host_port
from tests.server.proxy.picker.published import HttpExchange, endpoint_of, split
from tests.server.proxy.picker.test_picks import looking_up, some
from tests.server.proxy.routing.test_route import SPEC
from tests.server.proxy.scripted_engine import MODEL

TOKENS = list(range(100_000, 120_000))
KEYS = keys_of(TOKENS, SPEC)
BODY = json.dumps({"model": MODEL, "prompt": TOKENS, "max_tokens": 1}).encode()
PARTS = split(BODY, 12)
SHORT_END = [*split(BODY[:-1000], 12), BODY[-1000:]]


@asynccontextmanager
async def arriving(
    front: Front, body: Sequence[bytes] = PARTS
) -> AsyncIterator[tuple[HttpExchange, Callable[[], Any]]]:
    """A request of which the last part is missing, and whose lookups have been answered; and what sends that part."""
    async with front.gateway.exchange() as exchange:
        await exchange.send_headers()
        reader, held_bytes = ArrivingPrompt(), 0
        for part in body[:-1]:
            await exchange.send(request_body={"body": part})
            held_bytes += len(part) + reader.add(part).nbytes
        await until(lambda: front.metric("lmkv_picker_held_bytes") == held_bytes)
        await asyncio.sleep(0)  # a lookup that is due begins
        await until(lambda: not front.client.in_flight_count)

        async def end() -> str:
            await exchange.send(request_body={"body": body[-1], "end_of_stream": True})
            return endpoint_of(await exchange.answer())

        yield exchange, end


async def test_the_engine_that_holds_the_prompt_is_picked_without_a_lookup_at_its_end(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine)
    async with make("i-0", KEYS[:9], SPEC), make("i-1", KEYS, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with arriving(front) as (exchange, end):
            early = list(front.client.key_counts)
            assert early
            assert all(2 * first <= second for first, second in itertools.pairwise(early))
            front.client.answers.clear()
            assert await end() == host_port(engines[1])
            assert await exchange.body() == BODY
            assert front.metric("lmkv_picker_lookup_hit_tokens_total") == 0
            front.client.answers.set()
            await until(lambda: front.metric("lmkv_picker_lookup_hit_tokens_total") == len(TOKENS))
    assert front.client.key_counts == [*early, len(KEYS)]
    assert front.metric("lmkv_picker_lookups_total", outcome="hit") == 1
    assert front.metric("lmkv_picker_lookup_asked_tokens_total") == len(TOKENS)


@pytest.mark.parametrize(("held", "parts"), [(0, PARTS), (9, PARTS), (300, PARTS), (9, SHORT_END)])
async def test_a_prompt_that_ends_otherwise_than_what_is_held_is_not_looked_up_again(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_picker: MakePicker,
    held: int,
    parts: Sequence[bytes],
) -> None:
    engines = await some(make_engine)
    async with make("i-1", KEYS[:held], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with arriving(front, parts) as (_, end):
            early = list(front.client.key_counts)
            picked = await end()
    assert not held or picked == host_port(engines[1])
    assert front.client.key_counts == early
    assert early[-1] > held
    assert front.metric("lmkv_picker_lookup_hit_tokens_total") == 16 * held
    assert front.metric("lmkv_picker_lookup_asked_tokens_total") == len(TOKENS)
    assert front.metric("lmkv_picker_lookups_total", outcome="hit" if held else "miss") == 1


async def test_where_the_end_of_the_prompt_decides_it_is_looked_up(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine)
    prompts = [[first, *TOKENS[1:]] for first in range(3)]
    keys = [keys_of(prompt, SPEC) for prompt in prompts]

    def all_but(count: int) -> list[ChunkKey]:
        return [key for of_one in keys for key in of_one[: len(of_one) - count]]

    async with make("i-0", all_but(9), SPEC), make("i-1", all_but(0), SPEC), make("i-2", all_but(10), SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        for prompt in prompts:  # with equal costs the engine would be picked whose turn it is
            body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
            async with arriving(front, split(body, 12)) as (_, end):
                assert await end() == host_port(engines[1])
            assert front.client.key_counts[-1] == len(KEYS)


async def test_an_old_lookup_is_made_again(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_picker: MakePicker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "MAX_AGE_SECONDS", 0.0)
    engines = await some(make_engine, 2)
    async with make("i-1", KEYS[:1], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with arriving(front) as (_, end):
            assert await end() == host_port(engines[1])
    assert front.client.key_counts[-1] == len(KEYS)
    assert front.metric("lmkv_picker_lookup_hit_tokens_total") == 16


async def test_salt_and_model_after_the_prompt_make_what_was_looked_up_void(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    salted = keys_of(TOKENS, SPEC, cache_salt="salt")
    body = split(json.dumps({"prompt": TOKENS, "model": MODEL, "cache_salt": "salt"}).encode(), 12)
    async with make("i-0", KEYS, SPEC), make("i-1", salted, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with arriving(front, body) as (_, end):
            assert front.client.key_counts, "without a model the only spec is taken"
            assert await end() == host_port(engines[1])


async def test_lookups_that_fail_while_a_prompt_arrives_are_no_error(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", KEYS, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        front.client.error = Unreachable("it is lost")
        async with arriving(front) as (_, end):
            assert len(front.client.key_counts) == 1, "after a failure none is due"
            front.client.error = None
            assert await end() == host_port(engines[1])


async def test_a_picker_that_stops_leaves_no_lookup(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", KEYS, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        async with arriving(front) as (_, end):
            front.client.answers.clear()
            assert await end() == host_port(engines[1])
            assert front.client.in_flight_count == 1
        await front.picker.aclose()
        assert not front.client.in_flight_count


async def test_a_request_that_ends_before_its_prompt_leaves_no_lookup(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", KEYS, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        front.client.answers.clear()
        async with front.gateway.exchange() as exchange:
            await exchange.send_headers()
            await exchange.send(request_body={"body": PARTS[0]})
            await until(lambda: front.client.in_flight_count == 1)
        await until(lambda: not front.client.in_flight_count)


async def test_a_prompt_that_has_arrived_does_not_wait_for_the_lookup_of_its_beginning(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker
) -> None:
    engines = await some(make_engine, 2)
    async with make("i-1", KEYS, SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        front.client.answers.clear()
        async with front.gateway.exchange() as exchange:
            await exchange.send_headers()
            await exchange.send(request_body={"body": PARTS[0]})
            await until(lambda: front.client.in_flight_count == 1)
            await exchange.send(request_body={"body": b"".join(PARTS[1:]), "end_of_stream": True})
            await until(lambda: front.client.key_counts[-1] == len(KEYS))
            await until(lambda: front.client.in_flight_count == 1, "only that of the whole prompt is in flight")
            front.client.answers.set()
            assert endpoint_of(await exchange.answer()) == host_port(engines[1])
