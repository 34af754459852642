"""The engine API at a real node that it starts: what is stored is loaded, from any engine of the same spec."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from lmkv.errors import BadChunkKey, BadTokens, ConfigError
from lmkv.keys import PAGE_HASH_SCHEME
from lmkv.spec import KvPart
from lmkv_client.engine import Engine, Held, Written
from tests.client.engine.engines import SPEC, Attach, all_extents, content, load, prompt, store, words
from tests.client.engine.nodes import until
from tests.waiting import WAIT_SECONDS

SMALL_POOL = "512KiB"
"""64 chunks."""


def test_chunks_that_were_stored_are_loaded_byte_by_byte(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(5))
    assert len(keys) == 5
    assert load(engine, keys) == 0
    assert store(engine, keys) == 5
    assert load(engine, keys) == 5
    counters = engine.counters
    assert (counters.lookups, counters.asked_chunks, counters.hit_chunks) == (2, 10, 5)
    assert (counters.loaded_chunks, counters.loaded_bytes) == (5, 5 * SPEC.chunk_bytes)
    assert (counters.committed_chunks, counters.committed_bytes) == (5, 5 * SPEC.chunk_bytes)


def test_a_prompt_that_begins_alike_loads_the_common_chunks(attach: Attach) -> None:
    engine = attach()
    store(engine, engine.keys(prompt(3)))
    longer = engine.keys([*prompt(3), *prompt(2, first=5)])
    with engine.lookup(longer, timeout=WAIT_SECONDS) as held:
        assert (held.hit_count, held.own_count) == (3, 3)
        assert list(held.keys) == longer[:3]
        assert len(list(held.load(2))) == 2
        assert len(list(held.load(100))) == 3
    assert load(engine, engine.keys(prompt(3, first=5))) == 0


def test_only_what_is_missing_needs_to_be_stored(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(6))
    assert engine.missing(keys, timeout=WAIT_SECONDS) == keys
    store(engine, keys[:4])
    new = engine.missing(keys, timeout=WAIT_SECONDS)
    assert new == keys[4:]
    store(engine, new, parent=keys[3])
    assert engine.missing(keys, timeout=WAIT_SECONDS) == []
    assert load(engine, keys) == 6
    assert engine.counters.lookups == 1  # those of `missing` are no hits


def test_two_engines_at_one_node_share_chunks(attach: Attach) -> None:
    one, other = attach(), attach()
    store(one, one.keys(prompt(4)))
    until(lambda: load(other, other.keys(prompt(4))) == 4)
    assert load(other, other.keys(prompt(4), salt="tenant")) == 0
    assert load(other, other.keys(prompt(4), lora="adapter@1")) == 0


def test_engines_of_other_specs_and_other_ranks_share_nothing(attach: Attach) -> None:
    one = attach(rank=0, rank_count=2)
    store(one, one.keys(prompt(2)))
    for other in (
        attach(rank=1, rank_count=2),
        attach(),
        attach(spec=replace(SPEC, kv_dtype="bfloat16"), rank=0, rank_count=2),
    ):
        keys = other.keys(prompt(2))
        assert not set(keys) & set(one.keys(prompt(2)))
        assert load(other, keys) == 0
    assert load(one, one.keys(prompt(2))) == 2


def test_pages_that_the_engine_names_by_digests_have_keys_of_their_own(attach: Attach) -> None:
    engine = attach()
    digests = [bytes([number]) * 32 for number in range(3)]
    keys = engine.foreign_keys(digests)
    assert keys == engine.foreign_keys([digest.hex() for digest in digests])
    assert not set(keys) & set(engine.foreign_keys(digests, salt="tenant"))
    store(engine, keys)
    assert load(engine, keys) == 3
    other = attach(spec=replace(SPEC, model_id="other-weights"))
    assert not set(keys) & set(other.foreign_keys(digests))
    assert load(other, other.foreign_keys(digests)) == 0


def test_pages_that_sglang_names_have_the_keys_of_their_tokens(attach: Attach) -> None:
    engine = attach(spec=replace(SPEC, hash_scheme=PAGE_HASH_SCHEME))
    tokens = prompt(3)
    digests, prior = [], b""
    for page in range(3):
        prior = sha256(prior + np.array(tokens[32 * page : 32 * (page + 1)], "<u4").tobytes()).digest()
        digests.append(prior)
    assert engine.keys([*tokens, 1], partial=True) == engine.foreign_keys(digests)
    assert not set(engine.keys(tokens, salt="tenant")) & set(engine.keys(tokens))


@pytest.mark.parametrize("digest", [b"short", "ab", "zz" * 32, b"a" * 33])
def test_a_digest_of_another_length_is_refused(attach: Attach, digest: bytes | str) -> None:
    with pytest.raises(BadChunkKey, match=r"digests\[0\]"):
        attach().foreign_keys([digest])


def test_unknown_arguments_of_a_lookup_are_refused(attach: Attach) -> None:
    for lookup in (attach().lookup, attach().begin_lookup):
        with pytest.raises(TypeError, match="unexpected argument token"):
            lookup([], token=[1])  # type: ignore[call-arg]


def test_tokens_beyond_the_vocabulary_are_refused(attach: Attach) -> None:
    with pytest.raises(BadTokens):
        attach().keys([1000])


def test_the_last_chunk_of_a_prompt_may_be_a_partial_one(attach: Attach) -> None:
    engine = attach()
    tokens = [*prompt(2), 1, 2, 3]
    keys = engine.keys(tokens, partial=True)
    assert len(keys) == 3
    assert keys[:2] == engine.keys(tokens)
    extents = engine.reserve(3, timeout=WAIT_SECONDS)
    for key, extent in zip(keys, extents, strict=True):
        words(extent)[:] = content(key)
    full = Written.chain(keys[:2], extents[:2])
    engine.commit([*full, Written(key=keys[2], extent=extents[2], token_count=3, parent=keys[1])])
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        last = list(held.load())[2]
        assert (last.token_count, last.size_bytes) == (3, SPEC.size_bytes(3))
        assert np.array_equal(words(last), content(keys[2], SPEC.size_bytes(3)))


def test_extents_are_those_that_were_reserved_and_each_is_used_once(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(3))
    store(engine, keys[:1])
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        (loaded,) = held.load()
        with pytest.raises(ValueError, match="reserved"):
            engine.commit([Written(key=keys[1], extent=loaded)])
    (extent,) = engine.reserve(1, timeout=WAIT_SECONDS)
    with pytest.raises(ValueError, match="token_count 33"):
        engine.commit([Written(key=keys[1], extent=extent, token_count=33)])
    with pytest.raises(ValueError, match="reserved"):
        engine.commit([Written(key=keys[1], extent=extent), Written(key=keys[2], extent=extent)])
    engine.commit([Written(key=keys[1], extent=extent)])
    with pytest.raises(ValueError, match="reserved"):
        engine.commit([Written(key=keys[2], extent=extent)])
    engine.put_back([extent])  # ignored
    assert engine.counters.committed_chunks == 2


def test_an_engine_gets_a_third_of_the_pool_and_waits_for_what_its_threads_return(attach: Attach) -> None:
    spec = replace(SPEC, chunk_size=1024)  # 256 KiB: 64 of them fit
    engine = attach(spec=spec)
    extents = engine.reserve(100, timeout=WAIT_SECONDS)
    count = len(extents)
    assert 10 < count <= 64 // 3
    assert engine.reserve(1, timeout=0) == []
    assert engine.counters.short_reserves == 2
    later = engine.begin_reserve(3, timeout=WAIT_SECONDS)
    assert not later.done()
    engine.put_back(extents[:2])
    assert len(later.result(WAIT_SECONDS)) == 2  # what there is, without waiting for more
    everything = [*extents[2:], *later.result()]
    engine.put_back(everything)
    engine.put_back(everything)  # ignored: no extent is granted twice
    offsets = [extent.offset for extent in engine.reserve(2 * count, timeout=WAIT_SECONDS)]
    assert len(offsets) == len(set(offsets)) == count


def test_without_a_timeout_a_reservation_is_for_later_calls(attach: Attach) -> None:
    engine = attach()
    assert engine.reserve(4, timeout=0) == []
    got: list[object] = []

    def collect() -> bool:
        got.extend(engine.reserve(4 - len(got), timeout=0))
        return len(got) == 4

    until(collect)


def test_calls_have_forms_that_do_not_block(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(3))

    async def use() -> None:
        extents = await asyncio.wrap_future(engine.begin_reserve(3, timeout=WAIT_SECONDS))
        for key, extent in zip(keys, extents, strict=True):
            words(extent)[:] = content(key)
        engine.commit(Written.chain(keys, extents))
        held = await asyncio.wrap_future(engine.begin_lookup(keys, timeout=WAIT_SECONDS))
        loaded = await asyncio.wrap_future(held.begin_load(timeout=WAIT_SECONDS))
        assert [words(extent)[0] for extent in loaded] == [content(key)[0] for key in keys]
        held.release()
        held.release()

    asyncio.run(use())
    assert engine.counters.loaded_chunks == 3


def test_a_callback_may_call_the_engine(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(2))
    store(engine, keys)
    loaded: Future[int] = Future()

    def load_found(answer: Future[Held]) -> None:
        held = answer.result()
        held.begin_load().add_done_callback(lambda done: loaded.set_result(len(done.result())))
        held.release()

    engine.begin_lookup(keys, timeout=WAIT_SECONDS).add_done_callback(load_found)
    assert loaded.result(WAIT_SECONDS) == 2


def test_futures_that_are_cancelled_keep_nothing(attach: Attach) -> None:
    engine = attach(spec=replace(SPEC, chunk_size=1024))
    count = all_extents(engine)
    keys = engine.keys(prompt(3, size=1024))
    lookups = [engine.begin_lookup(keys, timeout=WAIT_SECONDS) for _ in range(5)]
    reservations = [engine.begin_reserve(4, timeout=WAIT_SECONDS) for _ in range(5)]
    for lookup in lookups:
        if not lookup.cancel():
            lookup.result().release()
    for reservation in reservations:
        if not reservation.cancel():
            engine.put_back(reservation.result())
    until(lambda: all_extents(engine) == count)


def test_damaged_chunks_are_not_loaded_if_loads_are_verified(attach: Attach) -> None:
    engine = attach(verify_loads=True)
    keys = engine.keys(prompt(3))
    store(engine, keys)
    assert load(engine, keys) == 3
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        words(list(held.load())[1])[5] ^= np.uint64(1)
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        assert held.hit_count == 1
    assert engine.counters.damaged_chunks == 1
    assert engine.missing(keys, timeout=WAIT_SECONDS) == keys[1:]  # the node has dropped it


def test_a_closed_engine_answers_nothing(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(2))
    store(engine, keys)
    held = engine.lookup(keys, timeout=WAIT_SECONDS)
    extents = list(held.load())
    engine.close()
    engine.close()
    assert not engine.is_attached
    assert np.array_equal(words(extents[0]), content(keys[0]))  # stays mapped
    assert engine.lookup(keys).hit_count == 0
    assert engine.reserve(1) == []
    assert engine.missing(keys) == keys
    held.release()


def test_mistakes_at_attach_are_configuration_errors(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        attach(rank=2, rank_count=2)
    part = KvPart(rule=SPEC.rule, span=0, layer_count=1, kv_head_count=2, head_size=8, kv_dtype="float32")
    with pytest.raises(ConfigError, match="one part"):
        attach(spec=replace(SPEC, layers="a", more_parts=(replace(part, layers="b"),)))
    with pytest.raises(ConfigError, match="nonsense"):
        Engine.attach(SPEC, config={"nonsense": 1})
    with pytest.raises(ConfigError, match="chunk_size"):
        attach(spec=replace(SPEC, chunk_size=1 << 20))


def test_engines_that_are_idle_leave_their_credits_to_others(attach: Attach) -> None:
    idle = [attach(instance_id="shared", max_local_cpu_size=SMALL_POOL) for _ in range(3)]
    for engine in idle:
        engine.put_back(engine.reserve(1000, timeout=WAIT_SECONDS))
    another = attach(instance_id="shared", max_local_cpu_size=SMALL_POOL)
    until(lambda: all_extents(another) > 16)  # without, the others keep all but one


def test_a_reservation_ends_when_the_node_has_no_more_however_long_it_may_wait(attach: Attach) -> None:
    engines = [attach(instance_id="shared", max_local_cpu_size=SMALL_POOL) for _ in range(4)]
    taken = [engine.reserve(1000, timeout=WAIT_SECONDS) for engine in engines]
    assert len(taken[-1]) < len(taken[0]), "the node has no more, though the engine might have"
    assert engines[-1].begin_reserve(3, timeout=100 * WAIT_SECONDS).result(WAIT_SECONDS) == []
