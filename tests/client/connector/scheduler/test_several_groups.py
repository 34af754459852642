"""The scheduler side with models of several KV-cache groups: windows, local chunks and states beside full attention.

Every step checks that each page that it reads, by the rule of its group, has the KV of its own prompt; every commit,
that each group's rows are what the key says; every copy, that it names no null page.
"""

from __future__ import annotations

from collections import Counter

import pytest

from lmkv.keys import ChunkKey, part_key, split_keys
from lmkv.prompt import HeldKeys, Prompt, match
from lmkv.tiers import PEERS
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST
from tests.client.connector.scheduler.serving import DECODED, MakeEngine, forget_pages, slowed, until
from tests.client.connector.scheduler.several_groups import (
    CHUNKS,
    COLD,
    HIT,
    PROMPT,
    WITH_FULL,
    committed,
    engine_of,
    every_model,
    filled,
    hit_of,
    one_of_each_kind,
    parts_of,
    steps_at_chunks,
    stored_chunks,
)
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK, MODELS
from tests.client.connector.simulated_worker import NULL_PAGE

# ---- misses and hits


@every_model
def test_a_prompt_is_stored_part_by_part_and_loaded(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name)
    assert engine.serve("a", PROMPT) == COLD
    for index, part in enumerate(engine.kv.spec.parts):
        stored = len(stored_chunks(engine.kv.spec, index))
        assert committed(engine)[index] == (1 if part.rule == PART_RULE_END else stored)
    forget_pages(engine)
    commits = len(engine.node.commits)
    assert engine.serve("b", PROMPT) == HIT
    assert (engine.count("loaded_tokens"), engine.count("load_failures")) == (CHUNKS * CHUNK, 0)
    assert len(engine.node.commits) == commits, "what is held is not stored again"
    engine.check_nothing_is_left()


@one_of_each_kind
def test_two_ranks_store_and_load_their_shares(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name, rank_count=2))
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


@every_model
def test_prompts_that_end_around_edges_are_loaded_to_their_last_chunk(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name)
    edges = {CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK, 2 * CHUNK + BLOCK}
    edges |= {part.span for part in engine.kv.spec.parts if part.span}
    edges |= {CHUNK + part.span for part in engine.kv.spec.parts if part.span}
    lengths = sorted({edge + more for edge in edges for more in (-1, 0, 1)})
    for number, length in enumerate(lengths):
        prompt = [number, *PROMPT[: length - 1]]
        assert engine.serve(f"{length} cold", prompt) == length + DECODED
        forget_pages(engine)
        computed = engine.serve(f"{length} again", prompt)
        if name == "states with smaller blocks" and computed == length + DECODED:
            continue  # vLLM has kept the state of the last page, where no hit ends
        assert computed == length - hit_of(length) + DECODED
        forget_pages(engine)
    engine.check_nothing_is_left()


@every_model
def test_a_prompt_that_shares_a_beginning_loads_it(make_engine: MakeEngine, name: str) -> None:
    """A hit that ends where the stored prompt does not: inside of its windows, local chunks and between its states.

    Windows are not stored there before a second prompt shows that prompts part there: the third finds them.
    """
    engine = engine_of(make_engine, name, **steps_at_chunks(name))
    filled(engine)
    for shared in (CHUNK - 1, CHUNK, 2 * CHUNK + 1, 3 * CHUNK, 4 * CHUNK + BLOCK, 5 * CHUNK, len(PROMPT)):
        for number in range(1 if engine.kv.spec.window_interval == 1 else 2):
            prompt = [*PROMPT[:shared], *[400 + shared % 64 + number] * 40]
            computed = engine.serve(f"{shared} {number}", prompt)
            forget_pages(engine)
        hit = min(shared, hit_of(len(prompt))) // CHUNK * CHUNK
        assert computed == len(prompt) - hit + DECODED
    engine.check_nothing_is_left()


@pytest.mark.parametrize("name", [name for name in MODELS if "window" in name])
def test_where_a_prompt_parts_from_another_its_windows_are_stored_and_stay(make_engine: MakeEngine, name: str) -> None:
    """Two prompts have a beginning that is in the pool: only windows make the second hit shorter."""
    engine = filled(engine_of(make_engine, name))
    spec, shared = engine.kv.spec, 3
    engine.node.superseded.clear()
    engine.serve("parts", [*PROMPT[: shared * CHUNK], *[400] * (len(PROMPT) - shared * CHUNK)])
    chain = chain_of(engine)
    for index, part in enumerate(spec.parts):
        if part.rule == PART_RULE_LAST:
            stored = stored_chunks(spec, index, {shared})
            keys = {chunk: part_key(chain[chunk], index) for chunk in range(CHUNKS)}
            assert {chunk for chunk, key in keys.items() if key in engine.node.chunks} == stored
            lasting = {chain[chunk] for chunk in part.needed(shared * CHUNK, CHUNK)}
            if spec.window_interval > 1:
                assert lasting.isdisjoint(engine.node.superseded.get(key) for key in keys.values())


def test_windows_take_no_more_credits_than_are_stored(make_engine: MakeEngine) -> None:
    """Credits take memory of the pool."""
    engine = engine_of(make_engine, "gemma3: windows in two groups", step_tokens=16 * CHUNK)
    taken = Counter[int]()

    def count() -> None:
        taken.update(Counter(engine.node.credits_out.values()) - taken)

    engine.during_step = count
    engine.serve("a", (2 * PROMPT)[: 10 * CHUNK + 1])
    windows = 2 * len(engine.kv.spec.parts[1].needed(10 * CHUNK, CHUNK))  # also of the end that an answer may name
    assert taken[1] <= windows + 1 < taken[0]


@one_of_each_kind
@pytest.mark.parametrize("own_tokens", [BLOCK + 1, CHUNK + 1, 2 * CHUNK + BLOCK + 1, 4 * CHUNK + 1, len(PROMPT)])
def test_what_vllm_has_itself_and_what_the_node_has_make_one_hit(
    make_engine: MakeEngine, name: str, own_tokens: int
) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.serve("own", PROMPT[:own_tokens])
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count("load_failures") == 0
    engine.check_nothing_is_left()


@one_of_each_kind
@pytest.mark.parametrize("own_tokens", [3 * CHUNK + 1, 5 * CHUNK + 1])
def test_if_vllm_has_lost_pages_of_one_group_the_request_gets_right_pages(
    make_engine: MakeEngine, name: str, own_tokens: int
) -> None:
    for group in range(len(MODELS[name].caches)):
        engine = filled(engine_of(make_engine, name))
        lose_pages(engine, group, PROMPT[:own_tokens])
        engine.serve("a", PROMPT)
        engine.check_nothing_is_left()


def lose_pages(engine: SimulatedEngine, group: int, prompt: list[int]) -> None:
    """Serves a prompt, of which vLLM keeps all pages but those of one group."""
    manager = engine.scheduler.kv_cache_manager
    pages: set[int] = set()
    engine.during_step = lambda: pages.update(manager.get_block_ids("own")[group])
    engine.serve("own", prompt, output=1)
    engine.during_step = lambda: None
    manager.evict_blocks(pages - {NULL_PAGE})


@pytest.mark.parametrize("name", [name for name in MODELS if "window" in name])
def test_pages_that_a_load_has_filled_are_right_for_hits_that_end_earlier(make_engine: MakeEngine, name: str) -> None:
    """vLLM takes each page of a loaded window for complete, and combines it with pages that it has computed."""
    engine = filled(engine_of(make_engine, name))
    assert engine.serve("loads", PROMPT) == HIT
    engine.node.evict()
    for page in range(CHUNKS * CHUNK // BLOCK - 4, CHUNKS * CHUNK // BLOCK + 1):
        engine.serve(f"computes {page}", PROMPT[: page * BLOCK + 1])
        engine.node.evict()
        engine.serve(f"combines {page}", [*PROMPT[: (page + 1) * BLOCK], 1])
        engine.node.evict()
    engine.check_nothing_is_left()


@one_of_each_kind
def test_several_requests_load_and_store_beside_each_other(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name, step_tokens=100))
    for number in range(4):
        engine.add(f"r{number}", PROMPT[: 70 + 80 * number] + [400 + number] * (20 * number), output=5)
    engine.run()
    for number in range(4):
        engine.check_answer(f"r{number}")
    engine.check_nothing_is_left()


# ---- stores


@one_of_each_kind
@pytest.mark.parametrize("step_tokens", [CHUNK, 96, 150])
def test_prefill_in_many_steps_stores_what_hits_need(make_engine: MakeEngine, name: str, step_tokens: int) -> None:
    engine = filled(engine_of(make_engine, name, step_tokens=step_tokens))
    for index, part in enumerate(engine.kv.spec.parts):
        if part.rule != PART_RULE_END:
            assert committed(engine)[index] == len(stored_chunks(engine.kv.spec, index))
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


@one_of_each_kind
def test_chunks_that_decoding_fills_are_found_by_the_next_turn(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name)
    engine.serve("a", PROMPT, output=2 * CHUNK + 20)
    forget_pages(engine)
    turn = [*PROMPT, *engine.said["a"], *range(30)]
    assert engine.serve("b", turn) == len(turn) - 8 * CHUNK + DECODED
    engine.check_nothing_is_left()


@one_of_each_kind
def test_without_save_decode_cache_only_the_prompt_is_stored(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name, save_decode_cache=False)
    engine.serve("a", PROMPT, output=2 * CHUNK + 20)
    assert max(committed(engine).values()) <= CHUNKS
    forget_pages(engine)
    turn = [*PROMPT, *engine.said["a"], *range(30)]
    assert engine.serve("b", turn) == len(turn) - CHUNKS * CHUNK + DECODED
    engine.check_nothing_is_left()


@every_model
def test_a_part_supersedes_that_of_the_chunk_that_the_next_hit_no_longer_needs(
    make_engine: MakeEngine, name: str
) -> None:
    engine = engine_of(make_engine, name, step_tokens=CHUNK)
    engine.serve("a", PROMPT)
    chain = chain_of(engine)
    expected = {}
    for index, part in enumerate(engine.kv.spec.parts):
        stored = stored_chunks(engine.kv.spec, index)
        lasting = {
            one
            for end in range(engine.kv.spec.window_interval, CHUNKS + 1, engine.kv.spec.window_interval)
            for one in part.needed(end * CHUNK, CHUNK)
            if part.rule == PART_RULE_LAST and engine.kv.spec.window_interval > 1
        }
        for chunk in sorted(stored) if part.rule != PART_RULE_ALL else ():
            older = part.needed((chunk + 1) * CHUNK, CHUNK).start - 1
            if older >= 0 and older not in lasting:
                expected[part_key(chain[chunk], index)] = chain[older]
    assert engine.node.superseded == expected


@one_of_each_kind
def test_without_credits_for_a_part_it_is_not_stored_and_is_counted(make_engine: MakeEngine, name: str) -> None:
    for part in range(len(engine_of(make_engine, name).kv.spec.parts)):
        engine = engine_of(make_engine, name)
        engine.node.grudged_parts = {part}
        engine.serve("a", PROMPT)
        assert committed(engine)[part] == 0
        is_ever_needed = any(engine.kv.spec.parts[part].is_needed(chunk, CHUNK) for chunk in range(CHUNKS))
        assert (engine.count("skipped_chunks") > 0) == is_ever_needed
        forget_pages(engine)
        hit = longest_hit_of(engine)
        assert engine.serve("b", PROMPT) == COLD - hit
        engine.check_nothing_is_left()


@pytest.mark.parametrize("name", WITH_FULL)
def test_full_attention_that_found_no_credit_is_stored_in_a_later_step(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name)
    engine.node.grudged_parts = {0}
    engine.add("a", PROMPT, output=20)
    until(engine, lambda: len(engine.said["a"]) > 2)
    assert committed(engine)[0] == 0
    engine.node.grudged_parts = set()
    engine.run("a")
    assert committed(engine)[0] == CHUNKS
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


@one_of_each_kind
def test_null_pages_of_a_local_hit_are_not_stored(make_engine: MakeEngine, name: str) -> None:
    """vLLM has the end of a prompt itself, the node has dropped all of it: null pages stand for the rest."""
    engine = engine_of(make_engine, name)
    engine.serve("a", PROMPT)
    engine.node.evict()
    longer = [*PROMPT, *range(2 * CHUNK)]
    engine.serve("b", longer)
    assert engine.count("null_page_requests") == 0
    forget_pages(engine)
    engine.serve("c", longer)
    forget_pages(engine)
    assert engine.serve("d", longer) == len(longer) - hit_of(len(longer)) + DECODED
    engine.check_nothing_is_left()


@one_of_each_kind
def test_a_store_that_the_workers_skipped_harms_nothing(make_engine: MakeEngine, name: str) -> None:
    engine = engine_of(make_engine, name)
    (worker,) = engine.workers
    worker.skips_stores = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    worker.skips_stores = False
    engine.run("a")
    forget_pages(engine)
    engine.serve("b", PROMPT)
    engine.check_nothing_is_left()


# ---- items that the node must bring


@one_of_each_kind
def test_items_at_a_peer_are_brought_and_loaded(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.node.move_to_peer()
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count(f"tier_tokens:{PEERS}") == CHUNKS * CHUNK
    engine.check_nothing_is_left()


@one_of_each_kind
def test_one_part_at_a_peer_and_the_others_in_the_pool_are_one_hit(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    for part in parts_of(engine):
        engine.node.move_to_peer(part)
        assert engine.serve(f"part {part} at a peer", PROMPT) == HIT
        forget_pages(engine)
    engine.check_nothing_is_left()


@one_of_each_kind
def test_items_in_the_pool_behind_a_gap_are_loaded(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    items = engine.kv.spec.item_keys(engine.kv.spec.items(CHUNKS), chain_of(engine))
    for number, key in enumerate(items):
        engine.node.peer_chunks[key] = engine.node.chunks[key]
        engine.node.drop(key)
        assert engine.serve(f"item {number} at a peer", PROMPT) == HIT
        forget_pages(engine)
    engine.check_nothing_is_left()


def chain_of(engine: SimulatedEngine) -> list[ChunkKey]:
    """The keys of the prompt's chunks, as the last lookup named them."""
    return split_keys(engine.node.lookups[-1].chunk_keys)


@one_of_each_kind
def test_one_chunk_after_another_arrives_over_many_steps(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.node.move_to_peer()
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    while engine.node.fetches:
        engine.node.deliver(1)
        engine.step()
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == HIT
    engine.check_nothing_is_left()


@one_of_each_kind
def test_after_the_eviction_of_a_part_what_is_complete_is_loaded(make_engine: MakeEngine, name: str) -> None:
    for part in range(len(engine_of(make_engine, name).kv.spec.parts)):
        engine = filled(engine_of(make_engine, name))
        engine.node.evict(part)
        hit = longest_hit_of(engine)
        assert engine.serve("a", PROMPT) == COLD - hit
        engine.check_nothing_is_left()


@one_of_each_kind
def test_after_the_eviction_of_one_item_what_is_complete_is_loaded(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    for number, item in enumerate(engine.kv.spec.items(CHUNKS)):
        (key,) = engine.kv.spec.item_keys([item], chain_of(engine))
        engine.node.drop(key)
        hit = longest_hit_of(engine)
        assert engine.serve(f"without item {number}", PROMPT) == COLD - hit
        forget_pages(engine)
    engine.check_nothing_is_left()


def longest_hit_of(engine: SimulatedEngine, keys: list[ChunkKey] | None = None) -> int:
    """Tokens of the prompt with these keys, by default the last one, that the items in the pool make a hit of."""
    spec, keys = engine.kv.spec, chain_of(engine) if keys is None else keys
    prompt = Prompt(spec, keys)
    return match(prompt, HeldKeys(prompt, engine.node.chunks)).chunk_count * CHUNK


# ---- handoffs


@one_of_each_kind
@pytest.mark.parametrize("length", [3 * CHUNK, 3 * CHUNK + 1, len(PROMPT)])
def test_a_decode_loads_what_a_prefill_has_stored_of_each_part(make_engine: MakeEngine, name: str, length: int) -> None:
    prompt, chunk_count = PROMPT[:length], hit_of(length) // CHUNK
    prefill = engine_of(make_engine, name)
    prefill.add("a", prompt, output=1, transfer={"lmkv": {"handoff_id": "r", "decode_instance": "decode"}})
    prefill.run("a")
    prefill.settle()
    (handoff,) = prefill.node.handoffs
    assert (handoff.token_count, len(split_keys(handoff.chunk_keys))) == (chunk_count * CHUNK, chunk_count)
    assert set(prefill.node.ended_handoffs["r"]) >= set(prefill.node.chunks)
    prefill.check_nothing_is_left()

    decode = engine_of(make_engine, name)
    decode.node.peer_chunks = dict(prefill.node.chunks)
    to_decode = {"handoff_id": "r", "decode_instance": "node", "prompt_token_count": length}
    decode.add("b", prompt, output=5, transfer={"lmkv": to_decode})
    decode.run("b")
    decode.check_answer("b")
    assert decode.scheduled_tokens["b"] == length - longest_hit_of(prefill, split_keys(handoff.chunk_keys)) + 4
    decode.check_nothing_is_left()


@every_model
def test_a_load_that_takes_longer_than_computing_is_refused_as_a_whole(make_engine: MakeEngine, name: str) -> None:
    engine = slowed(filled(engine_of(make_engine, name, refuse_slow_fetches=True)))
    assert engine.serve("a", PROMPT) == COLD
    assert (engine.count("refused_fetch_tokens"), engine.count("loaded_tokens")) == (CHUNKS * CHUNK, 0)
    engine.check_nothing_is_left()


@pytest.mark.parametrize("name", WITH_FULL)
def test_a_load_whose_parts_arrive_in_time_is_waited_for_though_a_hit_is_of_use_only_as_a_whole(
    make_engine: MakeEngine, name: str
) -> None:
    """By its pace the rest is there long before the whole prompt could be computed."""
    engine = filled(engine_of(make_engine, name, refuse_slow_fetches=True))
    engine.node.move_to_peer()
    engine.side._session.prefill.add(1500 * CHUNK, 100.0)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    seconds = engine.side._session.computing_seconds("a", CHUNKS * CHUNK, engine.clock.now)
    count = len(engine.node.fetches[0].indexes)
    for _ in range(count - 1):
        engine.clock.now += 1.2 * seconds / count
        engine.node.deliver(1, done=False)
        engine.step()
    engine.clock.now += 1.2 * seconds / count
    engine.step()
    assert engine.count("abandoned_tokens") == 0
    engine.node.deliver(1)
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == HIT
    engine.check_nothing_is_left()


@every_model
def test_after_an_update_of_the_weights_no_page_of_before_is_stored_or_continued(
    make_engine: MakeEngine, name: str
) -> None:
    """vLLM keeps its prefix cache, and may show the connector only the whole blocks of what it has there."""
    engine = engine_of(make_engine, name, step_tokens=BLOCK)
    engine.serve("before", PROMPT)
    engine.change_weights("new")
    commits = len(engine.node.commits)
    engine.mixed_requests |= {"block", "chunk", "all"}
    for request_id, shared in (("all", len(PROMPT)), ("chunk", CHUNK), ("block", BLOCK)):
        engine.add(request_id, [*PROMPT[:shared], *[400] * 2 * CHUNK])
        engine.run(request_id)
        assert len(engine.node.commits) == commits or request_id == "block", "each commit is checked"
    engine.serve("others", [500, *PROMPT])
    assert (len(engine.node.commits) > commits) is (name != "states with smaller blocks"), "it may have hits in blocks"
    engine.check_nothing_is_left()


# ---- preemption


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if len(model.caches) > 1])
def test_preempted_requests_get_right_answers(make_engine: MakeEngine, name: str) -> None:
    """Requests that grow until there are not enough pages for all."""
    for block_count in range(56, 4, -8):
        engine = engine_of(make_engine, name, block_count=block_count, step_tokens=96)
        for number in range(4):
            engine.add(f"r{number}", PROMPT[number : number + 2 * CHUNK + 5], output=2 * CHUNK)
        engine.run()
        for number in range(4):
            engine.check_answer(f"r{number}")
        engine.check_nothing_is_left()
        if any(request.num_preemptions for request in engine.requests.values()):
            return
    raise AssertionError("no request was preempted")
