"""Loads of models of several KV-cache groups that fail: the request is computed, and nothing is left."""

from __future__ import annotations

import pytest

from lmkv.v1.engine_service_pb2 import HeldChunk
from tests.client.connector.scheduler.serving import MakeEngine, forget_pages, until
from tests.client.connector.scheduler.several_groups import (
    COLD,
    HIT,
    PROMPT,
    engine_of,
    every_model,
    filled,
    one_of_each_kind,
)
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK


@one_of_each_kind
@pytest.mark.parametrize("delivered", [0, 1])
def test_if_an_item_is_lost_the_request_is_computed(make_engine: MakeEngine, name: str, delivered: int) -> None:
    engine = fetching(engine_of(make_engine, name))
    if delivered:
        engine.node.deliver(delivered, done=False)
    if engine.node.fetches:
        engine.step()
        engine.node.fail()
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


def fetching(engine: SimulatedEngine) -> SimulatedEngine:
    """An engine whose request waits for items that are at a peer."""
    filled(engine)
    engine.node.move_to_peer()
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    return engine


@one_of_each_kind
def test_an_item_that_comes_too_late_is_not_waited_for(make_engine: MakeEngine, name: str) -> None:
    engine = fetching(engine_of(make_engine, name))
    engine.step()
    engine.clock.now += 60
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD
    assert engine.count("load_failures") == 1
    engine.node.fetches_at_once = True
    engine.check_nothing_is_left()


@every_model
@pytest.mark.parametrize("at_peer", [False, True])
def test_an_extent_of_another_size_is_not_loaded_and_not_waited_for(
    make_engine: MakeEngine, name: str, at_peer: bool
) -> None:
    engine = filled(engine_of(make_engine, name))
    if at_peer:
        engine.node.move_to_peer()
    engine.node.alters = halve
    started = engine.clock.now
    assert engine.serve("a", PROMPT) == COLD
    assert engine.clock.now - started < 0.5, "the load waited for its deadline"
    assert engine.count("load_failures") == 1
    engine.check_nothing_is_left()


def halve(chunk: HeldChunk) -> None:
    chunk.extent.size_bytes //= 2


@one_of_each_kind
def test_if_the_workers_cannot_copy_the_request_is_computed(make_engine: MakeEngine, name: str) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.workers[0].fails_loads = True
    assert engine.serve("a", PROMPT) == COLD
    assert engine.count("load_failures") == 1
    engine.workers[0].fails_loads = False
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


@one_of_each_kind
@pytest.mark.parametrize("own_tokens", [CHUNK + 1, 4 * CHUNK + 1])
def test_if_a_load_behind_a_local_hit_fails_the_request_is_computed(
    make_engine: MakeEngine, name: str, own_tokens: int
) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.serve("own", PROMPT[:own_tokens])
    engine.workers[0].fails_loads = True
    engine.serve("a", PROMPT)
    engine.workers[0].fails_loads = False
    engine.serve("b", PROMPT)
    engine.check_nothing_is_left()


@one_of_each_kind
@pytest.mark.parametrize("back", ["never", "at once", "same node"])
def test_if_the_node_is_lost_during_a_load_the_request_is_computed(
    make_engine: MakeEngine, name: str, back: str
) -> None:
    engine = fetching(engine_of(make_engine, name))
    engine.node.deliver(1, done=False)
    engine.step()
    engine.node.lose()
    if back != "never":
        engine.node.attach(restarted=back == "at once")
    engine.node.fetches_at_once = True
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()


@one_of_each_kind
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_that_is_aborted_during_its_load_leaves_nothing(
    make_engine: MakeEngine, name: str, steps: int
) -> None:
    engine = filled(engine_of(make_engine, name))
    engine.workers[0].steps_per_load = 3
    engine.add("a", PROMPT)
    for _ in range(steps + 1):
        engine.step()
    engine.abort("a")
    engine.check_nothing_is_left()
    assert engine.serve("b", PROMPT) == HIT
