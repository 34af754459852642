"""Loads that are part of the step that computes the rest of a prompt, where others run beside it."""

from __future__ import annotations

import pytest

from lmkv_client.connector.scheduler.hit_choice import StepLoads
from tests.client.connector.scheduler.serving import (
    COLD,
    DECODED,
    HIT,
    PROMPT,
    REST,
    MakeEngine,
    filled,
    forget_pages,
    with_peer,
)
from tests.client.connector.simulated_models import BLOCK, CHUNK

MUCH = 100 * CHUNK


def test_a_request_that_is_alone_loads_in_the_step_that_computes_the_rest(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(3 * CHUNK, 0)))
    engine.add("a", PROMPT)
    output = engine.step()
    assert output.has_sync_kv_loads
    assert output.num_scheduled_tokens == {"a": REST}
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("loaded_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


def test_of_a_prompt_that_is_all_in_the_pool_the_step_computes_the_last_token(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(MUCH, 0)), PROMPT[: 3 * CHUNK])
    engine.add("a", PROMPT[: 3 * CHUNK])
    assert engine.step().num_scheduled_tokens == {"a": 1}
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def test_pages_that_vllm_has_take_no_room(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(3 * CHUNK - BLOCK, 0)))
    engine.serve("own", PROMPT[: BLOCK + 1])
    engine.add("a", PROMPT)
    assert engine.step().has_sync_kv_loads
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def test_a_load_that_would_make_the_step_long_runs_beside_it(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(3 * CHUNK - BLOCK, 0)))
    engine.add("a", PROMPT)
    output = engine.step()
    assert not output.has_sync_kv_loads
    assert not output.num_scheduled_tokens
    engine.run("a")
    assert engine.scheduled_tokens["a"] == HIT
    engine.check_nothing_is_left()


def test_beside_others_small_loads_share_the_room_of_a_step(make_engine: MakeEngine) -> None:
    engine = make_engine(step_load_tokens=(MUCH, 2 * CHUNK))
    for name in "abc":
        engine.serve(f"filler {name}", [ord(name), *PROMPT[:CHUNK]])
    forget_pages(engine)
    for name in "abc":
        engine.add(name, [ord(name), *PROMPT[:CHUNK]])
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}, "the load of the third runs beside the step"
    engine.run()
    for name in "abc":
        engine.check_answer(name)
    assert engine.count("loaded_tokens") == 3 * CHUNK
    engine.check_nothing_is_left()


def test_what_a_peer_has_is_fetched_beside_the_steps(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine(step_load_tokens=(MUCH, MUCH)), own_chunks=1)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    assert not engine.step().num_scheduled_tokens
    engine.node.deliver()
    engine.run("a")
    assert engine.scheduled_tokens["a"] == HIT
    engine.check_nothing_is_left()


def test_until_the_workers_have_copied_something_loads_wait_for_the_pool(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(MUCH, MUCH)))
    engine.node.lose()
    engine.step()
    engine.node.attach(restarted=False)
    steps = []
    for name in "ab":
        forget_pages(engine)
        engine.add(name, PROMPT)
        steps.append(engine.step().has_sync_kv_loads)
        engine.run(name)
        assert engine.scheduled_tokens[name] == HIT
    assert steps == [False, True]
    engine.check_nothing_is_left()


@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_load_in_a_step_that_fails_is_computed(make_engine: MakeEngine, rank_count: int) -> None:
    engine = filled(make_engine(step_load_tokens=(MUCH, MUCH), rank_count=rank_count))
    engine.workers[-1].fails_loads = True
    assert engine.serve("a", PROMPT) == REST + COLD
    assert engine.count("load_failures") == 1
    engine.workers[-1].fails_loads = False
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_a_load_in_a_step_ends_as_computing_if_the_node_is_lost_before_it(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(MUCH, MUCH)))
    allocated = engine.side.allocated

    def lose(*args: object) -> None:
        engine.node.lose()
        engine.side.drain_events()
        allocated(*args)  # type: ignore[arg-type]

    engine.side.allocated = lose  # type: ignore[method-assign, assignment]
    engine.add("a", PROMPT)
    assert engine.step().has_sync_kv_loads
    engine.side.allocated = allocated  # type: ignore[method-assign]
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == REST + COLD
    engine.check_nothing_is_left()


def test_a_load_of_several_steps_of_tokens_is_in_the_first(make_engine: MakeEngine) -> None:
    engine = filled(make_engine(step_load_tokens=(MUCH, MUCH), step_tokens=32))
    longer = PROMPT + list(range(100))
    engine.add("a", longer)
    assert engine.step().num_scheduled_tokens == {"a": 32}
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == len(longer) - 3 * CHUNK + DECODED
    engine.check_nothing_is_left()


def test_room_is_counted_by_step() -> None:
    loads = StepLoads(alone_bytes=100, shared_bytes=10)
    loads.workers_copy()
    assert loads.have_room(100, is_alone=True)
    assert not loads.have_room(11, is_alone=False)
    loads.take(6)
    assert not loads.have_room(5, is_alone=False)
    loads.end_step()
    assert loads.have_room(10, is_alone=False)


def test_nothing_is_part_of_a_step_before_workers_have_copied() -> None:
    loads = StepLoads(alone_bytes=100, shared_bytes=10)
    assert not loads.have_room(1, is_alone=True)
    loads.workers_copy()
    assert loads.have_room(1, is_alone=True)
    loads.node_lost()
    assert not loads.have_room(1, is_alone=True)
