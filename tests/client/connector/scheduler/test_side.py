"""The scheduler side inside vLLM's real scheduler, with a scripted node and simulated workers, one situation a test.

Every step of the simulated engine checks that what it reads from pages is the KV of its own prompt, and every commit
that a chunk holds what its key says; so a test here states what is computed and what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from lmkv_client.connector.scheduler.lookups import HOLD_SECONDS, SUSPECT_SECONDS, TIMEOUTS_UNTIL_SUSPECT
from lmkv_client.connector.scheduler.stores import MAX_FAILURES
from lmkv_client.connector.stats import tier_tokens
from tests.client.connector.simulated_engine import BLOCK, CHUNK, SimulatedEngine

MakeEngine = Callable[..., SimulatedEngine]

PROMPT = list(range(3, 203))
"""200 tokens: three chunks and 8 tokens."""
REST = len(PROMPT) % CHUNK
OUTPUT = 2
DECODED = OUTPUT - 1
"""The last token of an answer is never computed."""
COLD = len(PROMPT) + DECODED
"""Tokens computed where nothing is loaded."""
HIT = REST + DECODED
"""Tokens computed where every chunk is loaded."""
FOREVER = 10_000.0


def filled(engine: SimulatedEngine, prompt: list[int] = PROMPT) -> SimulatedEngine:
    """The engine, once it has stored the prompt and forgotten its own pages of it."""
    engine.serve("filler", prompt)
    forget_pages(engine)
    return engine


def forget_pages(engine: SimulatedEngine) -> None:
    assert engine.scheduler.reset_prefix_cache()


def until(engine: SimulatedEngine, condition: Callable[[], bool]) -> None:
    """Steps until something is so."""
    for _ in range(50):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


# ---- misses and hits


def test_a_prompt_that_nobody_has_is_computed_and_stored(make_engine: MakeEngine) -> None:
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


@pytest.mark.parametrize(("asynchronous", "computed"), [(True, 1), (False, BLOCK)])
def test_of_a_prompt_that_is_all_chunks_vllm_computes_the_end(
    make_engine: MakeEngine, asynchronous: bool, computed: int
) -> None:
    prompt = PROMPT[: 3 * CHUNK]
    engine = filled(make_engine(enable_async_loading=asynchronous), prompt)
    assert engine.serve("a", prompt) == computed + DECODED
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
    engine.serve("own", PROMPT[: own_blocks * BLOCK + 1])  # leaves so many whole blocks in vLLM's own cache
    before = engine.count("loaded_tokens")
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count("loaded_tokens") - before == 3 * CHUNK - own_blocks * BLOCK
    engine.check_nothing_is_left()


def test_when_vllm_has_all_itself_the_node_is_told_to_let_go(make_engine: MakeEngine) -> None:
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


@pytest.mark.parametrize(("asynchronous", "computed"), [(True, 1), (False, REST)])
def test_with_partial_chunks_the_same_prompt_is_loaded_to_its_end(
    make_engine: MakeEngine, asynchronous: bool, computed: int
) -> None:
    engine = filled(make_engine(save_partial_chunks=True, enable_async_loading=asynchronous))
    assert len(engine.node.chunks) == 4
    assert engine.serve("a", PROMPT) == computed + DECODED
    assert len(engine.node.commits) == 4
    engine.check_nothing_is_left()


def test_the_seeds_twelve_tokens_are_stored_and_loaded_with_partial_chunks(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(save_partial_chunks=True), PROMPT[:12])
    (chunk,) = engine.node.chunks.values()
    assert chunk.token_count == 12
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


def test_a_partial_chunk_does_not_match_a_longer_prompt(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(save_partial_chunks=True))
    assert engine.serve("a", [*PROMPT, 1]) == REST + 1 + DECODED
    engine.check_nothing_is_left()


def test_a_partial_chunk_is_stored_when_chunked_prefill_reaches_the_end(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(save_partial_chunks=True, step_tokens=96))
    assert sorted(chunk.token_count for chunk in engine.node.chunks.values()) == [REST, CHUNK, CHUNK, CHUNK]
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


def test_without_local_cpu_nothing_is_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(local_cpu=False)
    engine.serve("a", PROMPT)
    assert not engine.node.commits
    engine.check_nothing_is_left()


# ---- answers that are late or never come


def test_a_request_waits_for_its_answer_and_others_run_meanwhile(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(lookup_timeout=FOREVER))
    engine.add("running", list(range(40)), output=30)
    engine.step()
    engine.node.prompt = False
    engine.add("a", PROMPT)
    for _ in range(5):
        assert engine.step().num_scheduled_tokens == {"running": 1}
    engine.node.answer()
    engine.run("a")
    assert engine.scheduled_tokens["a"] == HIT
    engine.check_nothing_is_left()


def test_a_lookup_that_is_not_answered_in_time_is_a_miss(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.node.prompt = False
    assert engine.serve("a", PROMPT) == COLD
    assert engine.count("lookup_timeouts") == 1
    engine.check_nothing_is_left()


def test_a_late_answer_lets_go_of_what_it_holds(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.node.prompt = False
    engine.add("a", PROMPT, output=200)
    until(engine, lambda: bool(engine.said["a"]))
    engine.node.answer()
    assert engine.node.tickets
    engine.step()
    engine.node.answer()
    assert not engine.node.tickets
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def test_a_node_that_never_answers_is_left_alone_for_a_while(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    for number in range(TIMEOUTS_UNTIL_SUSPECT + 2):
        engine.serve(str(number), [number, *PROMPT])
    engine.node.answer()
    assert len(engine.node.lookups) == TIMEOUTS_UNTIL_SUSPECT
    engine.node.prompt = True
    engine.clock.now += SUSPECT_SECONDS
    engine.serve("again", PROMPT)
    assert len(engine.node.lookups) == TIMEOUTS_UNTIL_SUSPECT + 1
    engine.check_nothing_is_left()


def test_one_answer_ends_the_suspicion(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    for number in range(TIMEOUTS_UNTIL_SUSPECT):
        engine.serve(str(number), [number, *PROMPT])
    engine.node.prompt = True
    engine.node.answer()
    engine.serve("again", PROMPT)
    assert len(engine.node.lookups) == TIMEOUTS_UNTIL_SUSPECT + 1
    engine.check_nothing_is_left()


def test_a_request_that_waits_too_long_for_pages_asks_again(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(block_count=16), PROMPT[: 2 * CHUNK])
    engine.add("hog", list(range(100, 100 + 12 * BLOCK)), output=20)
    engine.step()
    engine.add("a", PROMPT)
    engine.step()
    (ticket,) = engine.node.tickets
    engine.clock.now += HOLD_SECONDS + 1
    engine.step()
    assert set(engine.node.tickets) == {str(int(ticket) + 1)}
    engine.run()
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD - 2 * CHUNK
    engine.check_nothing_is_left()


# ---- chunks that peers have


def with_peer(engine: SimulatedEngine, own_chunks: int = 0) -> SimulatedEngine:
    """The engine, after its node has moved all but the first chunks of the prompt to a peer."""
    filled(engine)
    engine.node.move_to_peer()
    if own_chunks:
        engine.node.peer_chunks, kept = {}, engine.node.peer_chunks
        engine.serve("own", PROMPT[: own_chunks * CHUNK])
        forget_pages(engine)
        engine.node.peer_chunks = kept
    return engine


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("own_chunks", [0, 1, 2])
def test_chunks_that_a_peer_has_are_fetched_and_loaded(
    make_engine: MakeEngine, asynchronous: bool, own_chunks: int
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks)
    commits = len(engine.node.commits)
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count("loaded_tokens") == 3 * CHUNK
    assert engine.count("peer_bytes") > 0
    assert len(engine.node.commits) == commits, "what was fetched is not stored again"
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_loaded_is_counted_by_where_it_was(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks=1)
    engine.node.on_disk = engine.node.in_remote = 1
    assert engine.serve("a", PROMPT) == HIT
    assert engine.count("loaded_tokens") == 3 * CHUNK
    assert [engine.count(tier_tokens(tier)) for tier in ("disk", "peers", "remote")] == [CHUNK, 0, CHUNK]
    engine.check_nothing_is_left()


def test_vllm_is_told_where_the_tokens_of_a_load_come_from(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine(), own_chunks=1)
    engine.node.on_disk = 1
    engine.node.fetches_at_once = False
    request = engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    sources = dict.fromkeys((CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.P2P), CHUNK)
    assert engine.side.hit_sources(request, 3 * CHUNK) == sources
    engine.node.deliver()
    engine.run("a")
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_too_little_to_fetch_is_computed_behind_what_is_here(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(min_fetch_tokens=CHUNK + 1, enable_async_loading=asynchronous), own_chunks=2)
    assert engine.serve("a", PROMPT) == CHUNK + HIT
    assert (engine.count("loaded_tokens"), engine.count("peer_bytes")) == (2 * CHUNK, 0)
    engine.check_nothing_is_left()


def test_the_node_is_told_how_fast_prompts_are_computed_once_that_is_known(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.serve("a", PROMPT)
    first, second = engine.node.lookups
    assert first.prefill_tokens_per_second == 0
    assert second.prefill_tokens_per_second > 0


def test_a_node_that_shall_refuse_nothing_is_not_told(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(refuse_slow_fetches=False))
    engine.serve("a", PROMPT)
    assert [lookup.prefill_tokens_per_second for lookup in engine.node.lookups] == [0, 0]


def test_what_the_node_does_not_offer_is_computed_and_stored_and_counted(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.refuses_fetches = True
    assert engine.serve("a", PROMPT) == COLD
    assert len(engine.node.chunks) == 3
    assert engine.count("refused_fetch_tokens") == 3 * CHUNK
    assert engine.count(tier_tokens("peers")) == 0
    engine.check_nothing_is_left()


def test_chunks_of_a_peer_are_loaded_as_they_arrive(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    engine.step()
    (worker,) = engine.workers
    for count in (1, 2):
        engine.node.deliver(1)
        engine.step()
        assert len(worker._loads["a"].copies) == count
    engine.node.deliver(1)
    engine.run("a")
    assert engine.scheduled_tokens["a"] == HIT
    assert engine.count(tier_tokens("peers")) == 3 * CHUNK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_where_a_peer_gives_less_than_it_said_the_rest_is_computed(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous), own_chunks=1)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.deliver(1)
    engine.step()
    engine.node.fail()
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD - 2 * CHUNK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_when_time_is_over_what_has_not_arrived_is_computed(
    make_engine: MakeEngine, asynchronous: bool, arrived: int
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous))
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    if arrived:
        engine.node.deliver(arrived)
    for _ in range(3):
        engine.step()
    engine.clock.now += engine.side._config.load_timeout
    steps = engine.steps
    engine.run("a")
    assert engine.steps - steps < 10, "no livelock"
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD - arrived * CHUNK
    assert engine.count("load_failures") == 1
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_chunks_that_arrive_after_the_end_of_their_load_do_no_harm(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous))
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT, output=20)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.prompt = False  # what the engine says about its end is still on the way
    engine.clock.now += engine.side._config.load_timeout
    until(engine, lambda: bool(engine.said["a"]))
    engine.node.deliver()
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def test_a_failed_load_is_not_offered_again_to_the_same_request(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.fetches_at_once = False
    lookups = len(engine.node.lookups)
    engine.add("a", PROMPT)
    engine.step()
    engine.node.fail()
    engine.run("a")
    assert engine.scheduled_tokens["a"] == COLD
    assert len(engine.node.lookups) == lookups + 1
    engine.check_nothing_is_left()


# ---- loads that the workers cannot make


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_copy_that_fails_is_computed_and_the_next_request_may_try_again(
    make_engine: MakeEngine, asynchronous: bool, rank_count: int
) -> None:
    engine = filled(make_engine(enable_async_loading=asynchronous, rank_count=rank_count))
    engine.workers[-1].fails_loads = True
    engine.add("a", PROMPT)
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("load_failures") == 1
    engine.workers[-1].fails_loads = False
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_a_step_that_read_unfilled_pages_stores_nothing(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(enable_async_loading=False))
    engine.workers[0].fails_loads = True
    engine.add("a", PROMPT + list(range(200)))
    engine.step()
    assert len(engine.node.commits) == 3
    engine.workers[0].fails_loads = False
    engine.run("a")  # whatever is committed now is checked
    engine.check_answer("a")
    assert len(engine.node.chunks) == 400 // CHUNK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("order", [(0, 3), (3, 0)])
def test_the_node_keeps_a_chunk_until_the_slowest_rank_has_read_it(
    make_engine: MakeEngine, order: tuple[int, int]
) -> None:
    engine = filled(make_engine(rank_count=2))
    for worker, steps in zip(engine.workers, order, strict=True):
        worker.steps_per_load = steps
    engine.during_step = engine.node.evict  # spoils whatever nobody holds
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


# ---- aborts


def test_abort_before_the_answer(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.step()
    engine.abort("a")
    engine.check_nothing_is_left()


def test_abort_after_the_answer_and_before_any_step(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.add("a", PROMPT)
    engine.abort("a")
    engine.check_nothing_is_left()


def test_abort_while_waiting_for_pages(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(block_count=16))
    engine.add("hog", list(range(100, 100 + 12 * BLOCK)), output=20)
    engine.step()
    engine.add("a", PROMPT)
    engine.step()
    assert engine.node.tickets
    engine.abort("a")
    engine.step()
    assert not engine.node.tickets
    engine.check_nothing_is_left()


def test_abort_while_the_workers_load(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.workers[0].steps_per_load = 4
    engine.add("a", PROMPT)
    engine.step()
    assert engine.requests["a"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort("a")
    assert engine.node.tickets, "the workers still read"
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("arrived", [0, 1])
def test_abort_while_chunks_are_on_their_way(make_engine: MakeEngine, asynchronous: bool, arrived: int) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous))
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    if arrived:
        engine.node.deliver(arrived)
        engine.step()
    engine.abort("a")
    engine.check_nothing_is_left()


def test_abort_while_running(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=96)
    engine.add("a", PROMPT)
    engine.step()
    engine.abort("a")
    engine.check_nothing_is_left()
    assert len(engine.node.chunks) == 1


def test_an_aborted_request_leaves_its_loads_place_to_others(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(block_count=16))
    for number in range(6):
        engine.workers[0].steps_per_load = 3
        engine.add(f"aborted{number}", PROMPT)
        engine.step()
        engine.abort(f"aborted{number}")
    engine.workers[0].steps_per_load = 0
    engine.settle()
    forget_pages(engine)
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


# ---- preemption


def preempted(engine: SimulatedEngine) -> SimulatedEngine:
    """The engine after two requests have outgrown its pages; the first will take all that the second had."""
    engine.add("first", PROMPT[:190], output=330)
    engine.add("second", [7, *PROMPT[:189]], output=140)
    for _ in range(300):
        if engine.requests["second"].num_preemptions:
            return engine
        engine.step()
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_preempted_request_gets_its_prompt_back_from_the_node(make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = preempted(make_engine(block_count=18, enable_async_loading=asynchronous))
    before = engine.scheduled_tokens["second"]
    engine.run()
    for request_id in ("first", "second"):
        engine.check_answer(request_id)
    assert engine.count("loaded_tokens") == 2 * CHUNK
    assert engine.scheduled_tokens["second"] - before == 190 + 140 - 1 - 2 * CHUNK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_preempted_request_is_computed_again_when_the_node_is_lost(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = preempted(make_engine(block_count=18, enable_async_loading=asynchronous))
    engine.node.lose()
    engine.run()
    for request_id in ("first", "second"):
        engine.check_answer(request_id)
    engine.check_nothing_is_left()


def test_a_prompt_that_was_reset_while_running_is_answered_all_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", PROMPT, output=20)
    for _ in range(5):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.node.chunks
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


# ---- write credits


def test_an_idle_engine_gives_back_the_credits_that_it_does_not_need(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    engine.settle()
    assert 0 < len(engine.node.credits_out) <= 4


def test_credits_never_exceed_what_the_node_allows(make_engine: MakeEngine) -> None:
    engine = make_engine(credit_limit=3)
    for number in range(4):
        engine.add(str(number), [number, *range(600)], output=3)
    engine.run()
    assert engine.count("stored_tokens") > 0
    engine.check_nothing_is_left()


def test_a_chunk_for_which_there_was_no_credit_is_stored_in_a_later_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.add("a", PROMPT, output=30)
    engine.step()
    engine.step()
    assert not engine.node.commits
    engine.node.generous = True
    engine.run("a")
    assert len(engine.node.commits) == 3
    assert engine.count("skipped_chunks") == 0
    engine.check_nothing_is_left()


def test_with_fewer_credits_than_chunks_all_are_stored_in_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(credit_limit=1)
    engine.serve("a", PROMPT, output=30)
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_chunks_that_never_found_a_credit_are_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.serve("a", PROMPT, output=10)
    assert engine.count("skipped_chunks") == 3
    engine.check_nothing_is_left()


# ---- pages that vLLM frees while their request runs


def test_null_pages_of_a_local_hit_are_not_stored(make_engine: MakeEngine) -> None:
    """vLLM has the window of a prompt itself, the node has dropped all of it: null pages stand for the rest."""
    engine = make_engine(window=CHUNK)
    engine.serve("a", PROMPT)
    assert len(engine.node.commits) == 3
    engine.node.evict()
    assert engine.serve("b", PROMPT) < CHUNK, "vLLM has the window itself"
    assert not engine.node.chunks
    assert (engine.count("null_page_requests"), engine.count("skipped_chunks")) == (1, 3)
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == COLD, "nothing wrong can be loaded"
    assert engine.count("null_page_requests") == 1
    engine.check_nothing_is_left()


def test_pages_that_were_freed_before_there_was_a_credit_are_not_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(window=CHUNK, step_tokens=CHUNK)
    engine.node.generous = False
    engine.add("a", PROMPT, output=10)
    until(engine, lambda: len(engine.said["a"]) > 1)
    engine.node.generous = True
    engine.run("a")
    assert not engine.node.commits
    assert engine.count("null_page_requests") == 1
    engine.check_nothing_is_left()


def test_a_starving_engine_does_not_flood_its_node(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.generous = False
    engine.add("a", PROMPT, output=30)
    engine.step()
    engine.node.prompt = False
    for _ in range(20):
        engine.step()
    assert len(engine.node.unanswered) <= 1
    engine.run("a")
    engine.check_nothing_is_left()


# ---- writes that fail


def test_a_store_that_the_workers_skipped_is_tried_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (worker,) = engine.workers
    worker.skips_stores = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    worker.skips_stores = False
    engine.run("a")
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_stores_that_keep_failing_are_given_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (worker,) = engine.workers
    worker.skips_stores = True
    engine.add("a", PROMPT, output=10)
    for _ in range(MAX_FAILURES + 2):
        engine.step()
    worker.skips_stores = False
    engine.run("a")
    assert not engine.node.commits
    assert engine.count("skipped_chunks") == 3
    engine.check_nothing_is_left()


def test_what_one_of_two_ranks_has_skipped_is_not_committed(make_engine: MakeEngine) -> None:
    engine = make_engine(rank_count=2)
    engine.workers[1].skips_stores = True
    engine.add("a", PROMPT, output=10)
    engine.step()
    assert not engine.node.commits
    engine.workers[1].skips_stores = False
    engine.run("a")
    assert len(engine.node.commits) == 3
    engine.check_nothing_is_left()


def test_a_commit_that_the_node_refuses_does_no_harm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.refuses_commits = True
    engine.serve("a", PROMPT)
    assert not engine.node.chunks
    engine.check_nothing_is_left()


# ---- the node is lost


def asked(engine: SimulatedEngine) -> None:
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.step()


def found(engine: SimulatedEngine) -> None:
    engine.add("hog", list(range(100, 100 + 12 * BLOCK)), output=20)
    engine.step()
    engine.add("a", PROMPT)
    engine.step()
    assert engine.node.tickets


def loading(engine: SimulatedEngine) -> None:
    engine.workers[0].steps_per_load = 3
    engine.add("a", PROMPT)
    engine.step()


def fetching(engine: SimulatedEngine) -> None:
    engine.node.move_to_peer()
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.deliver(1)


def storing(engine: SimulatedEngine) -> None:
    engine.add("a", [1, *PROMPT], output=10)


def starving(engine: SimulatedEngine) -> None:
    engine.node.generous = False
    engine.add("a", [1, *PROMPT], output=10)
    engine.step()


def decoding(engine: SimulatedEngine) -> None:
    engine.add("a", PROMPT, output=10)
    until(engine, lambda: bool(engine.said["a"]))


SITUATIONS = [asked, found, loading, fetching, storing, starving, decoding]


@pytest.mark.parametrize("back", ["never", "at once", "later", "same node"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_when_the_node_is_lost_the_answer_is_right_and_nothing_is_left(
    make_engine: MakeEngine, situation: Callable[[SimulatedEngine], Any], asynchronous: bool, back: str
) -> None:
    engine = filled(make_engine(block_count=16, enable_async_loading=asynchronous))
    situation(engine)
    engine.node.lose()
    if back in ("at once", "same node"):
        engine.node.attach(restarted=back == "at once")
    engine.step()
    if back == "later":
        engine.node.attach()
    engine.node.prompt = engine.node.generous = engine.node.fetches_at_once = True
    engine.run()
    engine.check_answer("a")
    assert engine.count("node_losses") == 1
    engine.check_nothing_is_left()
    if back != "never":
        forget_pages(engine)
        engine.serve("b", PROMPT)
        forget_pages(engine)
        assert engine.serve("c", PROMPT) == HIT
        engine.check_nothing_is_left()


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_found_at_a_node_that_is_lost_in_the_same_step_is_not_read_from_the_next(
    make_engine: MakeEngine, asynchronous: bool, back: bool
) -> None:
    engine = filled(make_engine(enable_async_loading=asynchronous))
    allocated = engine.side.allocated

    def lose(*args: Any) -> None:
        allocated(*args)
        engine.node.lose()
        if back:
            engine.node.attach()
        engine.side.allocated = allocated  # type: ignore[method-assign]

    engine.side.allocated = lose  # type: ignore[method-assign,assignment]
    assert engine.serve("a", PROMPT) >= COLD
    engine.check_nothing_is_left()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_report_about_a_node_that_is_lost_commits_nothing_to_the_next(
    make_engine: MakeEngine, restarted: bool
) -> None:
    engine = make_engine()

    def lose() -> None:
        engine.node.lose()
        engine.node.attach(restarted=restarted)
        engine.side.drain_events()
        engine.during_step = lambda: None

    engine.during_step = lose
    engine.serve("a", PROMPT, output=10)
    engine.check_nothing_is_left()


def test_a_node_that_comes_late_is_used_from_then_on(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    assert engine.serve("a", PROMPT) == COLD
    engine.check_nothing_is_left()
    engine.node.attach()
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == COLD
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == HIT
    engine.check_nothing_is_left()


# ---- reset


def test_reset_forgets_what_the_node_holds(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.node.chunks
    assert engine.serve("a", PROMPT) == COLD
    engine.check_nothing_is_left()


def test_reset_without_a_node_says_that_it_failed(make_engine: MakeEngine) -> None:
    assert not make_engine(attached=False).side.reset()


def test_reset_that_is_not_answered_says_so_after_a_second(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    assert not engine.side.reset()
    engine.check_nothing_is_left()


# ---- idle


def test_steps_without_work_say_nothing_to_the_node(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", PROMPT[:40], output=100)
    engine.step()
    engine.node.prompt = False
    for _ in range(50):
        engine.step()
    assert len(engine.node.unanswered) <= 1
    engine.run()
    engine.check_nothing_is_left()
