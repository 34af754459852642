"""The scheduler side with chunks outside the pool, and loads that fail."""

from __future__ import annotations

import pytest

from lmkv_client.connector.vllm_api import CacheHitSource
from lmkv_client.engine.speeds import PrefillRate
from tests.client.connector.scheduler.serving import (
    COLD,
    HIT,
    PROMPT,
    SLOW,
    MakeEngine,
    filled,
    forget_pages,
    slowed,
    until,
    with_peer,
)
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

# ---- chunks that peers have


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
    assert [engine.count(f"tier_tokens:{tier}") for tier in ("disk", "peers", "remote")] == [CHUNK, 0, CHUNK]
    engine.check_nothing_is_left()


@pytest.mark.skipif(CacheHitSource is None, reason="vLLM 0.31 does not ask for sources")
def test_vllm_learns_the_source_of_loaded_tokens(make_engine: MakeEngine) -> None:
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


def test_the_node_learns_the_prefill_rate_once_it_is_known(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(refuse_slow_fetches=True))
    engine.serve("a", PROMPT)
    first, second = engine.node.lookups
    assert first.prefill_tokens_per_second == 0
    assert second.prefill_tokens_per_second > 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_release_reports_how_long_the_load_took_and_computing_would_have_taken(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous, refuse_slow_fetches=True))
    engine.serve("measured", [7] * len(PROMPT))
    engine.side._session.prefill.add(100 * CHUNK, 1000.0)  # slow enough for a load to take half a second
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    rate = engine.side._session.prefill.tokens_per_second
    engine.clock.now += 0.5
    engine.node.deliver()
    engine.run("a")
    (release,) = [one for one in engine.node.releases if one.HasField("avoided_prefill_duration")]
    assert release.lookup_id == engine.node.lookups[-1].lookup_id
    assert release.avoided_prefill_duration.ToNanoseconds() / 1e9 == pytest.approx(3 * CHUNK / rate, rel=0.2)
    assert 0.5 <= release.load_duration.ToNanoseconds() / 1e9 < 1.5
    assert engine.count("avoided_prefill_seconds") == pytest.approx(3 * CHUNK / rate, rel=0.2)


def test_an_engine_that_has_computed_nothing_reports_no_savings(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.side._session.prefill = PrefillRate(CHUNK)  # as after a restart beside a filled node
    engine.serve("a", PROMPT)
    assert engine.count("loaded_tokens") == 3 * CHUNK
    assert not any(release.HasField("avoided_prefill_duration") for release in engine.node.releases)


def test_a_node_that_rejects_nothing_gets_no_order(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.serve("a", PROMPT)
    assert [lookup.prefill_tokens_per_second for lookup in engine.node.lookups] == [0, 0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_computed_faster_than_loaded_is_computed_until_loads_are_tried_again(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = slowed(filled(make_engine(enable_async_loading=asynchronous, refuse_slow_fetches=True)))
    assert engine.serve("a", PROMPT) == COLD
    assert (engine.count("refused_fetch_tokens"), engine.count("loaded_tokens")) == (3 * CHUNK, 0)
    assert len(engine.node.commits) == 3, "what is held is not stored again"
    for number in range(300):
        forget_pages(engine)
        if engine.serve(str(number), PROMPT) == HIT:
            break
    assert engine.count("loaded_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_computed_faster_than_fetched_is_computed_behind_what_is_here(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = make_engine(enable_async_loading=asynchronous, refuse_slow_fetches=True)
    engine = slowed(with_peer(engine, own_chunks=1), fetches_only=True)
    assert engine.serve("a", PROMPT) == 2 * CHUNK + HIT
    assert (engine.count("loaded_tokens"), engine.count("peer_bytes")) == (CHUNK, 0)
    engine.check_nothing_is_left()


def test_loads_beside_other_requests_are_not_measured(make_engine: MakeEngine) -> None:
    engine = filled(make_engine())
    engine.add("other", [7] * 20, output=50)
    engine.serve("a", PROMPT)
    own = engine.side._loads.costs.own
    engine.run()
    for name in ("connects", "measured"):
        assert own.seconds(CHUNK) == 0
        forget_pages(engine)
        engine.serve(name, PROMPT)
    assert own.seconds(CHUNK) > 0
    engine.check_nothing_is_left()


def test_a_load_beside_other_requests_counts_if_it_was_faster_than_expected(make_engine: MakeEngine) -> None:
    """Else, while no request is alone, loads that were abandoned would judge all others."""
    engine = with_peer(make_engine())
    fetched = engine.side._loads.costs.fetched
    for _ in range(3):
        fetched.add(3 * CHUNK, SLOW)
    engine.add("other", [7] * 20, output=50)
    assert engine.serve("a", PROMPT) == HIT
    assert fetched.seconds(3 * CHUNK) < 0.7 * SLOW
    engine.run()
    engine.check_nothing_is_left()


def test_what_the_node_does_not_offer_is_computed_and_stored_and_counted(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.refuses_fetches = True
    assert engine.serve("a", PROMPT) == COLD
    assert len(engine.node.chunks) == 3
    assert engine.count("refused_fetch_tokens") == 3 * CHUNK
    assert engine.count("tier_tokens:peers") == 0
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
    assert engine.count("tier_tokens:peers") == 3 * CHUNK
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
    engine.clock.now += engine.side._lookups._config.load_timeout
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
    engine.clock.now += engine.side._lookups._config.load_timeout
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
    engine.during_step = engine.node.evict  # damages all chunks that are not held
    assert engine.serve("a", PROMPT) == HIT
    engine.check_nothing_is_left()


# ---- loads that come too late


def computing_slowly(engine: SimulatedEngine) -> SimulatedEngine:
    """The engine, for which three chunks take a fifth of a second."""
    engine.side._session.prefill.add(1500 * CHUNK, 100.0)
    return engine


def waiting(engine: SimulatedEngine) -> SimulatedEngine:
    """The engine, while a request waits for a fetch."""
    computing_slowly(engine).node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    return engine


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_fetch_that_is_silent_for_as_long_as_computing_takes_is_abandoned_and_judges_the_next_one(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous, refuse_slow_fetches=True))
    engine.serve("connects", PROMPT)
    forget_pages(engine)
    engine.node.move_to_peer()
    waiting(engine)
    computing = engine.side._session.computing_seconds("a", 3 * CHUNK, engine.clock.now)
    assert 0 < computing < engine.side._lookups._config.load_timeout / 4
    engine.clock.now += 0.9 * computing
    engine.step()
    assert engine.count("abandoned_tokens") == 0
    engine.clock.now += 0.2 * computing
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD
    assert (engine.count("abandoned_tokens"), engine.count("load_failures")) == (3 * CHUNK, 0)
    assert engine.count("miss_tokens:slower") == 3 * CHUNK
    engine.node.fetches_at_once = True
    if asynchronous:
        forget_pages(engine)
        engine.node.move_to_peer()
        assert engine.serve("b", PROMPT) == COLD, "the next one is expected to be as slow"
        assert engine.count("refused_fetch_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


def test_after_the_first_fetch_of_an_engine_which_connects_was_late_the_next_one_is_made(
    make_engine: MakeEngine,
) -> None:
    engine = waiting(with_peer(make_engine(refuse_slow_fetches=True)))
    engine.clock.now += 1.1 * engine.side._session.computing_seconds("a", 3 * CHUNK, engine.clock.now)
    engine.run("a")
    assert engine.scheduled_tokens["a"] == COLD
    engine.node.fetches_at_once = True
    forget_pages(engine)
    engine.node.move_to_peer()
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_what_was_in_the_own_pool_says_nothing_of_the_pace_of_a_fetch(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(refuse_slow_fetches=True), list(range(3, 3 + 8 * CHUNK + 8))
    engine.serve("first", prompt)
    forget_pages(engine)
    engine.node.move_to_peer()
    engine.node.peer_chunks, elsewhere = {}, engine.node.peer_chunks
    engine.serve("own", prompt[: 7 * CHUNK])
    forget_pages(engine)
    engine.node.peer_chunks = elsewhere
    computing_slowly(engine).node.fetches_at_once = False
    engine.add("a", prompt)
    until(engine, lambda: bool(engine.node.fetches))
    engine.clock.now += 1.1 * engine.side._session.computing_seconds("a", CHUNK, engine.clock.now)
    engine.step()
    assert engine.count("abandoned_tokens") == CHUNK, "silent for as long as computing takes"
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def test_of_a_load_that_becomes_slow_what_has_arrived_is_used(make_engine: MakeEngine) -> None:
    engine = waiting(with_peer(make_engine(refuse_slow_fetches=True)))
    engine.node.deliver(1, done=False)
    engine.step()
    engine.clock.now += 3 * engine.side._session.computing_seconds("a", 3 * CHUNK, engine.clock.now)
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD - CHUNK
    assert engine.count("abandoned_tokens") == 2 * CHUNK
    assert engine.count("tier_tokens:peers") == CHUNK
    engine.check_nothing_is_left()


def test_a_load_that_turns_out_much_slower_than_computing_is_not_waited_for_as_long(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(refuse_slow_fetches=True), list(range(3, 3 + 8 * CHUNK + 8))
    engine.serve("first", prompt)
    forget_pages(engine)
    engine.node.move_to_peer()
    computing_slowly(engine).node.fetches_at_once = False
    engine.add("a", prompt)
    until(engine, lambda: bool(engine.node.fetches))
    engine.node.deliver(1, done=False)
    engine.step()
    rest_seconds = engine.side._session.computing_seconds("a", 6 * CHUNK, engine.clock.now)
    engine.clock.now += rest_seconds / 2  # for one chunk
    engine.node.deliver(1, done=False)
    engine.step()
    assert engine.count("abandoned_tokens") == 6 * CHUNK
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("tier_tokens:peers") == 2 * CHUNK
    engine.check_nothing_is_left()


def test_a_load_waits_while_the_engine_would_compute_other_prompts_first(make_engine: MakeEngine) -> None:
    engine = waiting(with_peer(make_engine(refuse_slow_fetches=True)))
    engine.clock.now += 1.5 * engine.side._session.computing_seconds("a", 3 * CHUNK, engine.clock.now)
    queue = engine.side._session.queue
    own = queue._tokens.pop("a")
    queue.add("before", 100 * CHUNK, engine.clock.now)
    queue.add("a", own, engine.clock.now)
    engine.step()
    assert engine.count("abandoned_tokens") == 0
    queue.remove("before")
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("abandoned_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


def test_a_load_that_is_a_little_slower_than_computing_waits_while_others_wait_for_the_engine(
    make_engine: MakeEngine,
) -> None:
    engine = waiting(with_peer(make_engine(refuse_slow_fetches=True)))
    queue = engine.side._session.queue
    for number in range(3):
        queue.add(f"behind-{number}", CHUNK, engine.clock.now)
    alone = 3 * CHUNK / engine.side._session.prefill.tokens_per_second
    engine.clock.now += 2 * alone
    engine.step()
    assert engine.count("abandoned_tokens") == 0
    for number in range(3):
        queue.remove(f"behind-{number}")
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("abandoned_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


def test_the_node_learns_that_prompts_wait_for_others(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(refuse_slow_fetches=True))
    engine.serve("alone", PROMPT)
    alone = engine.node.lookups[-1].prefill_tokens_per_second
    engine.add("first", [7] * len(PROMPT))
    engine.add("second", [8] * len(PROMPT))
    first, second = engine.node.lookups[-2:]
    assert first.prefill_tokens_per_second == pytest.approx(alone, rel=0.3)
    assert second.prefill_tokens_per_second == pytest.approx(first.prefill_tokens_per_second / 2, rel=0.1)
    engine.run()
    engine.add("third", [9] * len(PROMPT))
    assert engine.node.lookups[-1].prefill_tokens_per_second >= first.prefill_tokens_per_second / 1.3
    engine.run()
    assert len(engine.side._session.queue) == 0
    engine.check_nothing_is_left()


def test_the_error_of_what_loads_were_expected_to_take_is_counted(make_engine: MakeEngine) -> None:
    engine = computing_slowly(with_peer(make_engine(refuse_slow_fetches=True)))
    for name in ("connects", "measured", "a"):
        assert engine.count("expected_load_seconds") == 0
        engine.serve(name, PROMPT)
        forget_pages(engine)
        engine.node.move_to_peer()
    expected, error = engine.count("expected_load_seconds"), engine.count("load_error_seconds")
    assert expected > 0
    assert error <= expected
    engine.check_nothing_is_left()
