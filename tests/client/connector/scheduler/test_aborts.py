"""The scheduler side when vLLM aborts or preempts requests."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.client.connector.scheduler.serving import HIT, PROMPT, MakeEngine, filled, forget_pages, until, with_peer
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK

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
