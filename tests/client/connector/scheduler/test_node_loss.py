"""The scheduler side when the node is lost, reset or idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.client.connector.scheduler.serving import COLD, HIT, PROMPT, MakeEngine, filled, forget_pages, until
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK

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
    engine = make_engine(attached=False)
    assert not engine.side.reset()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "vLLM passes it on to who resets"


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
