"""The scheduler side inside vLLM's real scheduler: hits, misses, partial and decoded chunks.

Every step of the simulated engine checks that what it reads from pages is the KV of its own prompt, and every commit
that a chunk holds what its key says; so a test here states what is computed and what is loaded.
"""

from __future__ import annotations

import pytest

from tests.client.connector.scheduler.serving import COLD, DECODED, HIT, PROMPT, REST, MakeEngine, filled, forget_pages
from tests.client.connector.simulated_models import BLOCK, CHUNK

# ---- misses and hits


def test_an_uncached_prompt_is_computed_and_stored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.serve("a", PROMPT) == COLD
    assert len(engine.node.chunks) == 3
    assert (engine.count("lookups"), engine.count("stored_tokens")) == (1, 3 * CHUNK)
    assert engine.count("loaded_tokens") == 0
    engine.check_nothing_is_left()


def test_a_prompt_that_the_node_has_is_loaded(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    assert engine.serve("a", PROMPT) == HIT
    assert (engine.count("loaded_tokens"), engine.count("load_failures")) == (3 * CHUNK, 0)
    assert len(engine.node.commits) == 3, "what is held is not stored again"
    engine.check_nothing_is_left()


def test_a_synchronous_load_is_done_in_the_step_that_needs_it(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(enable_async_loading=False))
    engine.add("a", PROMPT)
    output = engine.step()
    assert output.has_sync_kv_loads
    assert output.num_scheduled_tokens == {"a": REST}
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_of_a_prompt_that_is_all_chunks_vllm_computes_the_last_token(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    prompt = PROMPT[: 3 * CHUNK]
    engine = filled(make_engine(enable_async_loading=asynchronous), prompt)
    assert engine.serve("a", prompt) == 1 + DECODED
    engine.check_nothing_is_left()


def test_a_longer_prompt_loads_what_it_shares_and_stores_the_rest(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    longer = PROMPT + list(range(300))
    assert engine.serve("a", longer) == len(longer) - 3 * CHUNK + DECODED
    assert len(engine.node.chunks) == len(longer) // CHUNK
    engine.check_nothing_is_left()


def test_a_prompt_that_differs_early_shares_nothing(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    other = [1, *PROMPT[1:]]
    assert engine.serve("a", other) == COLD
    assert len(engine.node.chunks) == 6
    engine.check_nothing_is_left()


def test_a_prompt_with_another_cache_salt_shares_nothing(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    assert engine.serve("a", PROMPT, salt="tenant") == COLD
    forget_pages(engine)
    assert engine.serve("b", PROMPT, salt="tenant") == HIT
    assert engine.serve("c", PROMPT) == HIT
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("own_blocks", [1, 2, 3, 5])
def test_pages_that_vllm_has_itself_are_not_loaded(
    make_engine: MakeEngine, asynchronous: bool, own_blocks: int
) -> None:
    engine = filled(make_engine(enable_async_loading=asynchronous))
    engine.serve("own", PROMPT[: own_blocks * BLOCK + 1])  # leaves this number of whole blocks in vLLM's own cache
    before = engine.count("loaded_tokens")
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count("loaded_tokens") - before == 3 * CHUNK - own_blocks * BLOCK
    engine.check_nothing_is_left()


def test_if_vllm_has_all_chunks_the_node_releases_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    assert engine.serve("b", PROMPT) == len(PROMPT) - len(PROMPT) // BLOCK * BLOCK + DECODED
    assert engine.count("loaded_tokens") == 0
    engine.check_nothing_is_left()


def test_chunked_prefill_stores_chunks_as_they_are_completed(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=96)
    engine.add("a", PROMPT)
    counts = []
    for _ in range(4):
        engine.step()
        counts.append(len(engine.node.commits))
    assert counts == [1, 3, 3, 3]
    engine.run("a")
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_several_requests_load_and_store_beside_each_other(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    prompts = {f"r{i}": PROMPT[: 70 + 30 * i] + [400 + i] * (20 * i) for i in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, output=5)
    engine.run()
    for request_id in prompts:
        engine.check_answer(request_id)
    engine.check_nothing_is_left()


def test_a_request_that_may_not_read_caches_is_neither_looked_up_nor_loaded(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    lookups = len(engine.node.lookups)
    engine.add("a", PROMPT, reads_caches=False)
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD
    assert len(engine.node.lookups) == lookups
    engine.check_nothing_is_left()


def test_a_prompt_shorter_than_a_chunk_is_not_looked_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT[: CHUNK - 1])
    assert not engine.node.lookups
    assert not engine.node.commits
    engine.check_nothing_is_left()


# ---- partial chunks and decoded chunks


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_partial_chunks_the_same_prompt_is_loaded_to_its_end(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = filled(make_engine(save_partial_chunks=True, enable_async_loading=asynchronous))
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK, CHUNK, CHUNK, REST, REST + DECODED]
    assert engine.serve("a", PROMPT) == 1 + DECODED
    engine.check_nothing_is_left()
    assert len(engine.node.chunks) == 5


def test_the_seeds_twelve_tokens_are_stored_and_loaded_with_partial_chunks(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(save_partial_chunks=True), PROMPT[:12])
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [12, 12 + DECODED]
    assert engine.serve("a", PROMPT[:12]) == 1 + DECODED
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_fewer_tokens_than_are_worth_loading_are_computed(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = filled(make_engine(min_retrieve_tokens=3 * CHUNK + 1, enable_async_loading=asynchronous))
    assert engine.serve("a", PROMPT) == COLD
    forget_pages(engine)
    assert engine.count("loaded_tokens") == 0
    assert len(engine.node.commits) == 3, "what is held is not stored again"
    engine.check_nothing_is_left()


@pytest.mark.parametrize("least", [0, 1, 3 * CHUNK])
def test_as_many_tokens_as_are_worth_it_are_loaded(make_engine: MakeEngine, least: int) -> None:
    engine = filled(make_engine(min_retrieve_tokens=least))
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_partial_chunk_serves_a_longer_prompt(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = filled(make_engine(save_partial_chunks=True, enable_async_loading=asynchronous))
    assert engine.serve("a", [*PROMPT, 1]) == 1 + DECODED
    engine.check_nothing_is_left()


def test_a_partial_chunk_is_stored_when_chunked_prefill_reaches_the_end(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(save_partial_chunks=True, step_tokens=96))
    counts = [chunk.token_count for chunk in engine.node.chunks.values()]
    assert counts == [CHUNK, CHUNK, CHUNK, REST, REST + DECODED]
    assert engine.serve("a", PROMPT) == 1 + DECODED
    engine.check_nothing_is_left()


def test_chunks_that_decoding_fills_are_stored_and_found_by_the_next_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT, output=100)
    assert len(engine.node.commits) == 4
    forget_pages(engine)
    turn = [*PROMPT, *engine.said["a"], *range(30)]
    assert engine.serve("b", turn) == len(turn) - 4 * CHUNK + DECODED
    engine.check_nothing_is_left()


def test_each_chunk_is_stored_with_the_name_of_the_one_before_it(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=100)
    first, second, third, *rest = engine.node.commits
    assert [engine.node.parents[key] for key in (first, second, third)] == [b"", first, second]
    assert len(rest) == 2, "the partial chunk, and what decoding made of it"
    assert {engine.node.parents[key] for key in rest} == {third}


def test_without_save_decode_cache_only_the_prompt_is_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(save_decode_cache=False)
    engine.serve("a", PROMPT, output=100)
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_without_local_cpu_prompts_are_stored_if_there_is_a_disk(make_engine: MakeEngine) -> None:
    engine = make_engine(local_cpu=False, local_disk=("/disk",), max_local_disk_size=1.0)
    engine.serve("a", PROMPT)
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_without_local_cpu_nothing_is_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(local_cpu=False)
    engine.serve("a", PROMPT)
    assert not engine.node.commits
    engine.check_nothing_is_left()
