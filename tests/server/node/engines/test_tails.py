"""The tail of a hit: the longest partial chunk with the prompt's next tokens, over the node's real unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.errors import BadChunkKey, BadMessage, LmkvError
from lmkv.keys import as_tokens, join_keys, prefix_digests
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.engines.lookups import MAX_PARTIAL_RESERVES, MAX_TOKENS
from lmkv_server.node.node import Node
from tests.server.node.cases import put
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import is_clean
from tests.server.node.prompts import ROOT, SIZE, SPEC, hit_tokens, keys_of, look_up, lookup_of, prompt, store_prompt
from tests.waiting import until


@pytest.fixture
async def roomy(config: NodeConfig) -> AsyncIterator[tuple[Node, EngineClient]]:
    roomy = replace(config, max_local_cpu_size="64MB")  # type: ignore[arg-type]  # what people write
    async with Node(roomy) as node, EngineClient(node) as engine:
        yield node, engine


@pytest.mark.parametrize("before", [0, 1, 2])
async def test_a_prompt_that_continues_another_hits_to_its_last_token(
    node: Node, engine: EngineClient, before: int
) -> None:
    first = prompt(before * SIZE + 21)
    await store_prompt(engine, node.pool, first)
    longer = prompt(before * SIZE + 60, seed=1, after=first)
    found = await look_up(engine, "1", longer, reserve_count=before + 1)
    assert (found.partial_key, found.partial_token_count) == (keys_of(first)[-1], 21)
    assert [extent.token_count for extent in found.own] == [SIZE] * before + [21]
    assert await engine.hear("settled") == [before + 1]
    assert len(engine.heard["credits"]) == 1, "the chunk that begins with the tail is to be stored"
    assert [chunk.holds for chunk in node.tier] == [1] * (before + 1)
    await engine.release("1")
    assert await hit_tokens(engine, node.pool, "2", longer) == len(first)
    await until(lambda: not node.engines.session("engine").lease_count)
    node.tier.give_back(engine.heard["credits"][0].extent.offset)
    assert is_clean(node)


async def test_the_whole_prompt_is_found_as_before_and_names_no_partial_key(node: Node, engine: EngineClient) -> None:
    tokens = prompt(SIZE + 9)
    await store_prompt(engine, node.pool, tokens)
    for asked, count in ((tokens, 2), (tokens[:SIZE], 1)):
        found = await look_up(engine, str(count), asked)
        assert (len(found.own), found.partial_key, found.partial_token_count) == (count, b"", 0)


async def test_keys_of_full_chunks_alone_find_the_tail_too(node: Node, engine: EngineClient) -> None:
    tokens = prompt(SIZE + 9)
    await store_prompt(engine, node.pool, tokens)
    lookup = lookup_of("1", tokens)
    lookup.chunk_keys = join_keys(keys_of(tokens)[:1])
    await engine.say(lookup=[lookup])
    (found,) = await engine.hear("found")
    assert (len(found.own), found.partial_token_count) == (2, 9)


async def test_of_thousands_of_siblings_the_longest_match_is_found_with_bounded_work(
    roomy: tuple[Node, EngineClient],
) -> None:
    node, engine = roomy
    system = prompt(5)
    for number in range(500):
        for length in range(6, SIZE, 5):
            tokens = prompt(length, seed=number, after=system)
            key, size_bytes = keys_of(tokens)[0], SPEC.size_bytes(length)
            if node.tier.get(key) is None:
                put(node.tier, key, size_bytes, fingerprint=SPEC.fingerprint, token_count=length, parent=ROOT)
    assert node._partial_chunks.chunk_count > 2000, "some short ones are alike"
    mine = prompt(3 * SIZE, seed=17, after=system)
    assert (await look_up(engine, "1", mine)).partial_token_count == 31
    other = prompt(3 * SIZE, seed=999, after=mine[:12])
    assert (await look_up(engine, "2", other)).partial_token_count == 11
    assert (await look_up(engine, "3", prompt(3 * SIZE, seed=998))).partial_token_count == 0


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("stored", [30, SIZE])
async def test_a_longer_chunk_serves_every_shorter_prompt_that_begins_as_it_does(
    node: Node, engine: EngineClient, before: int, stored: int
) -> None:
    longer = prompt(before * SIZE + stored)
    await store_prompt(engine, node.pool, longer, with_digests=True)
    for length in (1, 12, stored - 1):
        short = longer[: before * SIZE + length]
        found = await look_up(engine, f"short {length}", short)
        assert (found.partial_key, found.partial_token_count) == (keys_of(longer)[-1], length)
        assert (len(found.own), found.own[-1].token_count, list(found.missed)) == (before + 1, stored, [])
        await engine.release(f"short {length}")
        assert await hit_tokens(engine, node.pool, f"again {length}", short) == len(short)
    fork = prompt(3 * SIZE, seed=1, after=longer[: before * SIZE + 17])
    assert await hit_tokens(engine, node.pool, "fork", fork) == before * SIZE + 17
    if stored < SIZE:
        node.tier.drop(keys_of(longer)[-1:])
        assert await hit_tokens(engine, node.pool, "gone", longer[: before * SIZE + 12]) == before * SIZE


async def test_in_a_full_pool_a_short_prompt_is_found_after_its_answer_has_superseded_it(
    node: Node, engine: EngineClient
) -> None:
    number = 1
    while node.tier.has_room(SPEC.chunk_bytes):
        number += 1
        await store_prompt(engine, node.pool, prompt(SIZE, seed=number))
    first = prompt(12)
    await store_prompt(engine, node.pool, first, with_digests=True)
    answered = prompt(30, seed=1, after=first)
    await store_prompt(engine, node.pool, answered, superseded=keys_of(first)[0], with_digests=True)
    await store_prompt(engine, node.pool, prompt(SIZE, seed=1), with_digests=True)
    await until(partial(node.tier.get, keys_of(prompt(SIZE, seed=1))[0]))
    assert node.tier.get(keys_of(first)[0]) is None
    assert await hit_tokens(engine, node.pool, "1", first) == 12


async def test_among_thousands_of_siblings_a_prompt_finds_the_chunk_that_begins_most_alike(
    roomy: tuple[Node, EngineClient],
) -> None:
    node, engine = roomy
    system = prompt(5)
    for number in range(1000):
        tokens = prompt(SIZE - 1, seed=number, after=system)
        put(
            node.tier,
            keys_of(tokens)[0],
            SPEC.size_bytes(SIZE - 1),
            fingerprint=SPEC.fingerprint,
            token_count=SIZE - 1,
            parent=ROOT,
            prefix_digests=prefix_digests(ROOT, as_tokens(tokens)),
        )
    for number, seed in enumerate((17, 5000)):
        mine = prompt(20, seed=seed, after=system)
        siblings = np.array([prompt(20, seed=one, after=system) for one in range(1000)])
        most = np.logical_and.accumulate(siblings == mine, axis=1).sum(axis=1).max()
        assert (await look_up(engine, str(number), mine)).partial_token_count == most
    node._partial_chunks.check()


@pytest.mark.parametrize("digests", [b"1234567", bytes(8 * 22), bytes(8 * 21)])
async def test_prefix_digests_that_are_not_of_the_chunk_are_refused(
    node: Node, engine: EngineClient, digests: bytes
) -> None:
    tokens = prompt(21)
    (credit,) = await engine.reserve(1)
    commit = pb.CommitChunk(
        chunk_key=keys_of(tokens)[0],
        offset=credit.offset,
        size_bytes=SPEC.size_bytes(21),
        token_count=21,
        parent_key=ROOT,
        prefix_digests=digests,
    )
    await engine.say(commit=[commit])
    (rejected,) = await engine.hear("rejected_commit")
    assert isinstance(rpc.from_status(rejected.status), BadChunkKey)
    assert not len(node.tier)


async def test_what_was_evicted_or_dropped_is_not_found(node: Node, engine: EngineClient) -> None:
    short = prompt(5)
    middle, tail = prompt(12, seed=1, after=short), prompt(20, seed=2, after=prompt(12, seed=1, after=short))
    for tokens in (short, middle, tail):
        await store_prompt(engine, node.pool, tokens)
    longer = prompt(50, seed=3, after=tail)
    assert await hit_tokens(engine, node.pool, "1", longer) == 20
    node.tier.drop([keys_of(tail)[0]])
    assert await hit_tokens(engine, node.pool, "2", longer) == 12
    await engine.say(drop_damaged=[keys_of(middle)[0]])
    assert await hit_tokens(engine, node.pool, "3", longer) == 5
    await engine.say(reset=True)
    assert await engine.hear("reset") == [1]
    assert await hit_tokens(engine, node.pool, "4", longer) == 0
    assert node._partial_chunks.chunk_count == 0
    node._partial_chunks.check()


async def test_a_superseded_partial_chunk_is_evicted_first_unless_it_is_used_again(
    node: Node, engine: EngineClient
) -> None:
    for tokens in (prompt(7, seed=5), first := prompt(20)):
        await store_prompt(engine, node.pool, tokens)
    await store_prompt(engine, node.pool, longer := prompt(30, seed=1, after=first), superseded=keys_of(first)[0])
    fork = prompt(40, seed=2, after=first)
    assert await hit_tokens(engine, node.pool, "1", fork) == 20
    await store_prompt(engine, node.pool, longer, superseded=keys_of(first)[0])
    assert await hit_tokens(engine, node.pool, "3", longer) == 30
    await until(lambda: not node.engines.session("engine").lease_count)
    while node.tier.get(keys_of(first)[0]):
        assert node.tier.reserve(engine.spec.chunk_bytes)
    assert node.tier.get(keys_of(longer)[0])
    assert node.tier.get(keys_of(prompt(7, seed=5))[0])
    assert await hit_tokens(engine, node.pool, "2", fork) == 0


async def test_a_full_chunk_is_never_superseded_by_a_chunk_of_one_part(node: Node, engine: EngineClient) -> None:
    full = prompt(SIZE)
    await store_prompt(engine, node.pool, full)
    await store_prompt(engine, node.pool, prompt(9, seed=1), superseded=keys_of(full)[0])
    assert len((await look_up(engine, "1", full)).own) == 1
    assert keys_of(full)[0] not in node.tier._queue._superseded


async def test_a_chunk_that_claims_another_parent_or_length_is_no_match(node: Node, engine: EngineClient) -> None:
    tokens = prompt(20)
    await store_prompt(engine, node.pool, tokens[:8])
    (extent,) = await engine.reserve(1)
    commit = pb.CommitChunk(
        chunk_key=keys_of(prompt(12, seed=9))[0],
        offset=extent.offset,
        size_bytes=engine.spec.size_bytes(12),
        token_count=12,
        parent_key=ROOT,
    )
    await engine.say(commit=[commit])
    assert await hit_tokens(engine, node.pool, "1", tokens) == 8


async def test_a_lookup_without_tokens_finds_no_tail(node: Node, engine: EngineClient) -> None:
    tokens = prompt(20)
    await store_prompt(engine, node.pool, tokens[:8])
    found = await engine.lookup("1", keys_of(tokens))
    assert (len(found.own), found.partial_key) == (0, b"")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": b"123"}, BadMessage),
        ({"tokens": bytes(4), "root_key": b""}, BadChunkKey),
        ({"tokens": bytes(4), "root_key": b"short"}, BadChunkKey),
    ],
)
async def test_tokens_that_cannot_be_used_end_the_stream(
    node: Node, engine: EngineClient, fields: dict[str, bytes], error: type[LmkvError]
) -> None:
    await engine.say(lookup=[pb.LookupChunks(**({"lookup_id": "1", "root_key": ROOT} | fields))])  # type: ignore[arg-type]
    assert isinstance(await engine.ending(), error)
    await until(lambda: node.engines.attached_count == 0)
    assert is_clean(node)


async def test_hostile_tokens_and_extras_cost_nothing_and_find_nothing(node: Node, engine: EngineClient) -> None:
    tokens = prompt(20)
    await store_prompt(engine, node.pool, tokens[:8])
    extras = {-1: b"x", 1 << 30: b"y" * 1000, 0: b""}
    assert (await look_up(engine, "1", tokens, chunk_extras=extras)).partial_token_count == 8
    assert (await look_up(engine, "2", tokens, chunk_extras={0: b"image"})).partial_token_count == 0
    many = as_tokens([*tokens, *[7] * (200_000 - len(tokens))])
    lookup = pb.LookupChunks(lookup_id="3", tokens=many.tobytes(), root_key=ROOT)
    await engine.say(lookup=[lookup])
    (found,) = await engine.hear("found")
    assert found.partial_token_count == 8
    assert len(many) <= MAX_TOKENS


async def test_a_tail_that_may_not_be_held_is_not_offered(node: Node, engine: EngineClient) -> None:
    tokens = prompt(20)
    await store_prompt(engine, node.pool, tokens[:8])
    node.engines.session("engine")._held_bytes = node.tier.size_bytes
    assert (await look_up(engine, "1", tokens)).partial_token_count == 0
    node.engines.session("engine")._held_bytes = 0
    assert (await look_up(engine, "2", tokens)).partial_token_count == 8


async def test_credits_for_partial_chunks_have_exactly_their_size(node: Node, engine: EngineClient) -> None:
    await engine.say(reserve=pb.ReserveCredits(partial_token_counts=[21, SIZE - 1], optional_partial_token_counts=[1]))
    assert await engine.hear("settled_partial") == [21, SIZE - 1, 1]
    small, *_ = granted = engine.heard["credits"]
    assert [credit.partial_token_count for credit in granted] == [21, SIZE - 1, 1]
    assert [credit.extent.size_bytes for credit in granted] == [align(SPEC.size_bytes(n)) for n in (21, SIZE - 1, 1)]
    tokens = prompt(21)
    (key,) = keys_of(tokens)
    commit = pb.CommitChunk(
        chunk_key=key, offset=small.extent.offset, size_bytes=SPEC.size_bytes(21), token_count=21, parent_key=ROOT
    )
    await engine.say(commit=[commit], return_credits=[credit.extent.offset for credit in granted[1:]])
    await until(lambda: not node.tier.reserved_count)
    assert node.tier.get(key)
    assert node.tier.used_bytes == align(SPEC.size_bytes(21))


async def test_in_a_full_pool_optional_credits_are_refused_and_the_others_evict(
    node: Node, engine: EngineClient
) -> None:
    number = 0
    while node.tier.has_room(SPEC.chunk_bytes):
        number += 1
        await store_prompt(engine, node.pool, prompt(SIZE, seed=number))
    await engine.say(reserve=pb.ReserveCredits(optional_partial_token_counts=[2]))
    assert await engine.hear("settled_partial") == [2]
    assert (engine.heard["credits"], node.tier.evicted_count) == ([], 0)
    while node.tier.has_room(SPEC.size_bytes(SIZE - 1)):
        assert node.tier.reserve(SPEC.size_bytes(SIZE - 1))
    await engine.say(reserve=pb.ReserveCredits(partial_token_counts=[SIZE - 1]))
    assert await engine.hear("settled_partial") == [SIZE - 1]
    assert [credit.partial_token_count for credit in engine.heard["credits"]] == [SIZE - 1]
    assert node.tier.evicted_count == 1


async def test_credits_for_partial_chunks_are_bounded(node: Node, engine: EngineClient) -> None:
    limit = node.engines.session("engine").credit_limit
    await engine.say(reserve=pb.ReserveCredits(partial_token_counts=[1] * (limit + 3)))
    assert len(await engine.hear("settled_partial")) == limit + 3
    assert len(engine.heard["credits"]) == limit


@pytest.mark.parametrize("field", ["partial_token_counts", "optional_partial_token_counts"])
@pytest.mark.parametrize(
    "sizes", [[0], [SIZE], [-1], [1] * (MAX_PARTIAL_RESERVES + 1)], ids=["none", "full", "negative", "many"]
)
async def test_other_sizes_of_partial_chunks_end_the_stream(
    node: Node, engine: EngineClient, field: str, sizes: list[int]
) -> None:
    await engine.say(reserve=pb.ReserveCredits(**{field: sizes}))
    assert isinstance(await engine.ending(), BadMessage)
    await until(lambda: node.engines.attached_count == 0)
    assert is_clean(node)
