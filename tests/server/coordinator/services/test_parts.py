"""Lookups of prompts whose chunks have several parts: a holder is named for what can be loaded from it, no more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from lmkv.errors import BadChunkKey, BadTokens, LmkvError
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.spec import KvSpec
from lmkv.tiers import DISK, HOST
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.registry.selection import MAX_SELECTED_KEYS
from tests.server.coordinator.cases import HYBRID, MISTRAL, keys_of
from tests.server.coordinator.parted import FULL, KEYS, PROMPT, STATE, WINDOW, item, items
from tests.server.coordinator.scripted_instance import Make
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA
from tests.waiting import eventually


def without(keys: Iterable[ChunkKey], *missing: ChunkKey) -> list[ChunkKey]:
    kept = [key for key in keys if key not in missing]
    assert len(kept) == len(list(keys)) - len(missing)
    return kept


def found(response: LookupResponse) -> dict[str, int]:
    for holder in response.holders:
        (run,) = holder.runs
        assert (run.chunk_count, run.token_count) == (holder.matched_chunk_count, holder.matched_token_count)
        assert holder.matched_token_count == 16 * holder.matched_chunk_count
    return {holder.instance_id: holder.matched_chunk_count for holder in response.holders}


async def lookup(cache: Any, keys: Sequence[ChunkKey] = (), **fields: Any) -> LookupResponse:
    if keys:
        fields["chunk_keys"] = join_keys(keys)
    else:
        fields.setdefault("tokens", PROMPT)
    response: LookupResponse = await cache.Lookup(LookupRequest(**with_prompt(**fields)), timeout=60)
    return response


async def refusal(cache: Any, keys: Sequence[ChunkKey] = (), **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await lookup(cache, keys, **fields)
    return from_rpc_error(caught.value)


async def test_tokens_and_keys_find_the_longest_hit_of_each_holder(make: Make, cache: Any) -> None:
    async with make("a", items(2), HYBRID), make("b", items(4), HYBRID), make("c", [*items(4), *items(2)], HYBRID):
        expected = {"b": 4, "c": 4, "a": 2}
        by_tokens = await lookup(cache)
        assert found(by_tokens) == expected
        assert list(found(by_tokens)) == list(expected)
        assert by_tokens.holders[0].peer_address == "127.0.0.1:7000"
        by_keys = await lookup(cache, KEYS, fingerprint=HYBRID.fingerprint)
        assert by_keys.holders == by_tokens.holders
        assert found(await lookup(cache, excluded_instance_id="b")) == {"c": 4, "a": 2}
        assert found(await lookup(cache, KEYS[:2], fingerprint=HYBRID.fingerprint)) == {"a": 2, "c": 2}


@pytest.mark.parametrize("missing", [(FULL, 0), (WINDOW, 2), (WINDOW, 3), (STATE, 3)])
async def test_a_holder_that_lacks_one_item_is_not_named(make: Make, cache: Any, missing: tuple[int, int]) -> None:
    async with make("a", without(items(4), item(*missing)), HYBRID), make("b", items(4), HYBRID):
        assert found(await lookup(cache)) == {"b": 4}
        assert found(await lookup(cache, KEYS, fingerprint=HYBRID.fingerprint)) == {"b": 4}


async def test_a_hit_ends_where_the_holder_has_a_state(make: Make, cache: Any) -> None:
    chunks = [*without(items(4), item(STATE, 3)), *items(2)]  # windows of all chunks, and a state behind the second
    async with make("a", chunks, HYBRID):
        assert found(await lookup(cache)) == {"a": 2}


async def test_an_evicted_item_shortens_the_hit_at_once(make: Make, cache: Any) -> None:
    async with make("a", [*items(4), *items(3)], HYBRID) as a:
        assert found(await lookup(cache)) == {"a": 4}
        await a.evict([item(WINDOW, 3)])

        async def found_now() -> dict[str, int]:
            return found(await lookup(cache))

        await eventually(found_now, {"a": 3})


async def test_a_model_that_slides_in_all_layers_is_found_without_its_first_chunks(make: Make, cache: Any) -> None:
    last = items(4, MISTRAL)
    assert last == keys_of(PROMPT, MISTRAL)[2:4]
    async with make("a", last, MISTRAL), make("b", last[:1], MISTRAL), make("c", keys_of(PROMPT, MISTRAL)[:2], MISTRAL):
        assert found(await lookup(cache)) == {"a": 4, "c": 2}
        keys = keys_of(PROMPT, MISTRAL)[:4]
        assert found(await lookup(cache, keys, fingerprint=MISTRAL.fingerprint)) == {"a": 4, "c": 2}


async def test_the_tier_is_the_slowest_that_a_needed_item_is_in(make: Make, cache: Any) -> None:
    async with make("a", items(4), HYBRID) as a:

        async def tier() -> str:
            return (await lookup(cache)).holders[0].runs[0].tier

        assert await tier() == HOST
        await a.store(dict.fromkeys([item(STATE, 3)], 16), tier=DISK)
        await a.evict([item(STATE, 3)])
        await eventually(tier, DISK)


@pytest.mark.parametrize(("spec", "expected"), [(HYBRID, []), (MISTRAL, [(1, 10)])])
async def test_a_prompt_shorter_than_a_chunk_has_a_hit_unless_it_would_need_a_state(
    make: Make, cache: Any, spec: KvSpec, expected: list[tuple[int, int]]
) -> None:
    async with make("a", {**dict.fromkeys(items(4, spec), 16), keys_of(PROMPT[:10], spec)[0]: 10}, spec):
        holders = (await lookup(cache, tokens=PROMPT[:10])).holders
        assert [(one.matched_chunk_count, one.matched_token_count) for one in holders] == expected


async def test_keys_of_a_spec_that_no_instance_has_registered_are_a_miss(make: Make, cache: Any) -> None:
    async with make("a", items(4), HYBRID):
        assert found(await lookup(cache, KEYS, fingerprint=MISTRAL.fingerprint)) == {}
        assert found(await lookup(cache, KEYS, fingerprint=b"no digest")) == {}


async def test_keys_without_a_fingerprint_match_part_0(make: Make, cache: Any) -> None:
    async with make("a", KEYS[:3], HYBRID):
        assert found(await lookup(cache, KEYS)) == {"a": 3}
        assert found(await lookup(cache, KEYS, fingerprint=HYBRID.fingerprint)) == {}


async def test_keys_of_a_plain_spec_may_have_its_fingerprint(make: Make, cache: Any) -> None:
    keys = keys_of(PROMPT)
    async with make("a", {**dict.fromkeys(keys[:4], 16), keys[4]: 6}):
        response = await lookup(cache, keys, fingerprint=LLAMA.fingerprint)
        assert response.holders == (await lookup(cache)).holders
        assert response.holders[0].matched_token_count == 70


async def test_a_model_with_plain_and_other_specs_is_looked_up_under_each(make: Make, cache: Any) -> None:
    plain = dataclasses.replace(LLAMA, model_name=HYBRID.model_name)
    async with make("a", items(3), HYBRID), make("b", keys_of(PROMPT, plain)[:4], plain), make("c", KEYS[:2], HYBRID):
        response = await lookup(cache, model_name=HYBRID.model_name)
        assert found(response) == {"b": 4, "a": 3}


async def test_a_stream_answers_prompts_with_and_without_parts(make: Make, cache: Any) -> None:
    async with make("a", items(4), HYBRID), make("b", keys_of(PROMPT)[:2], LLAMA):
        requests = [
            LookupRequest(prompt=by_tokens(PROMPT, model_name=one)) for one in (HYBRID.model_name, LLAMA.model_name)
        ]
        stream = cache.LookupStream(timeout=60)
        await stream.write(LookupStreamRequest(requests=requests * 2))
        answer = await stream.read()
        assert [found(result.response) for result in answer.results] == [{"a": 4}, {"b": 2}] * 2
        stream.cancel()


async def test_the_limits_of_a_request_count_the_keys_of_all_parts(make: Make, cache: Any) -> None:
    limit = MAX_SELECTED_KEYS // 3
    short = dataclasses.replace(HYBRID, model_name="short", chunk_size=4)  # a message has less than 262,144 tokens
    async with make("a", items(1), HYBRID), make("b", items(1), short):
        error = await refusal(cache, [*KEYS[:1], *[ChunkKey(bytes(16))] * limit], fingerprint=HYBRID.fingerprint)
        assert isinstance(error, BadChunkKey)
        assert f"at most {limit} are allowed" in str(error)
        error = await refusal(cache, tokens=[1] * 4 * (limit + 1), model_name="short")
        assert isinstance(error, BadTokens)
        assert f"make {3 * limit + 3} keys" in str(error)


async def test_other_tasks_run_between_the_holders_of_a_long_prompt(make: Make, coordinator: Coordinator) -> None:
    keys = keys_of([1] * 16 * 5000, HYBRID)[:5000]
    held = [*keys, *HYBRID.item_keys(HYBRID.items(99), keys)]  # no state behind the other chunks
    service = coordinator.tenants.of("").cache
    request = LookupRequest(prompt=by_keys(keys, fingerprint=HYBRID.fingerprint))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        for name in "abcdefgh":
            await stack.enter_async_context(make(name, held, HYBRID))
        counting = asyncio.create_task(count_turns())
        try:
            assert found(await service.Lookup(request, None)) == dict.fromkeys("abcdefgh", 99)
            assert turns >= 8
        finally:
            counting.cancel()
