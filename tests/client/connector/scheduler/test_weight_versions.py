"""Weights that change in place: no request uses or stores KV of two versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmkv.spec import PRIVATE_VERSION
from lmkv_client.connector.scheduler.weight_versions import WeightVersions
from tests.client.connector.scheduler.serving import (
    COLD,
    FOREVER,
    HIT,
    PROMPT,
    MakeEngine,
    filled,
    forget_pages,
    until,
    with_peer,
)
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK


def updated(engine: SimulatedEngine, weights: str = "new") -> None:
    """What a user does who updates weights: vLLM's pages are forgotten too."""
    engine.change_weights(weights)
    assert engine.scheduler.reset_prefix_cache()
    engine.side.pages_cleared()


@pytest.mark.parametrize("place", [filled, with_peer])
def test_nothing_that_old_weights_have_computed_is_loaded(
    make_engine: MakeEngine, place: Callable[[SimulatedEngine], SimulatedEngine]
) -> None:
    engine = place(make_engine())
    updated(engine)
    assert engine.serve("a", PROMPT) == COLD
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT, "KV of the new weights is"
    engine.check_nothing_is_left()


def test_without_versions_an_update_would_be_a_wrong_hit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(make_engine())
    monkeypatch.setattr(engine.side, "weights_changed", lambda: None)
    updated(engine)
    with pytest.raises(AssertionError, match="hold other bytes than its prompt"):
        engine.serve("a", PROMPT)


def test_weights_without_a_name_have_a_version_of_their_own_and_named_ones_are_found_again(
    make_engine: MakeEngine,
) -> None:
    engine = filled(make_engine(weight_version="1"))
    first = engine.side._session.spec
    updated(engine)
    engine.side.weights_changed()
    assert engine.serve("a", PROMPT) == COLD
    (private,) = engine.node.weight_versions
    assert private.startswith(PRIVATE_VERSION)
    engine.side.name_weights("2")
    assert engine.node.weight_versions[1:] == ["2"]
    engine.side.name_weights("2")
    assert engine.node.weight_versions[1:] == ["2"], "it is that already"
    engine.weights = ""
    engine.side.name_weights("1")
    forget_pages(engine)
    engine.side.pages_cleared()
    assert engine.side._session.spec == first
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_request_that_runs_during_an_update_stores_nothing_more(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(step_tokens=CHUNK)
    engine.add("a", PROMPT, output=CHUNK)
    for _ in range(steps):
        engine.step()
    before = len(engine.node.commits)
    engine.change_weights("new")
    engine.run("a")
    assert len(engine.node.commits) == before
    engine.check_nothing_is_left()


def test_what_is_being_written_during_an_update_is_not_committed(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def change() -> None:
        engine.change_weights("new")
        engine.side.name_weights("2")
        engine.during_step = lambda: None

    engine.add("a", PROMPT, output=3)
    engine.during_step = change
    engine.run("a")
    assert not engine.node.commits
    forget_pages(engine)
    engine.side.pages_cleared()
    assert engine.serve("b", PROMPT) == COLD
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == HIT, "what is written to the same extents later is committed"
    engine.check_nothing_is_left()


def test_pages_of_old_weights_are_neither_stored_nor_continued_by_loads(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    before = len(engine.node.commits)
    engine.change_weights("new")  # vLLM's own prefix cache is not reset
    engine.mixed_requests |= {"b"}
    engine.add("b", PROMPT)
    engine.run("b")
    assert len(engine.node.commits) == before
    forget_pages(engine)
    engine.side.pages_cleared()
    assert engine.serve("c", PROMPT) == COLD
    assert len(engine.node.commits) > before
    engine.check_nothing_is_left()


def test_a_request_that_waits_during_an_update_is_looked_up_again(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.step()
    updated(engine)
    engine.node.prompt = True
    engine.node.answer()
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT, "it was stored under the new version"
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_load_that_waits_for_its_chunks_during_an_update_fails_as_a_whole(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = with_peer(make_engine(enable_async_loading=asynchronous, load_timeout=FOREVER), own_chunks=1)
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    until(engine, lambda: bool(engine.node.fetches))
    engine.change_weights("new")
    engine.side.pages_cleared()  # no request has computed anything
    engine.run("a")
    engine.check_answer("a")
    assert engine.scheduled_tokens["a"] == COLD
    engine.check_nothing_is_left()


def test_a_preempted_request_begins_again_under_the_new_weights(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", PROMPT, output=4)
    for _ in range(2):
        engine.step()
    engine.change_weights("new")
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.side.pages_cleared()
    engine.mixed_requests.clear()
    engine.run("a")
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_a_node_that_was_attached_under_old_weights_is_updated(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    engine.node.hello_version = ""
    engine.change_weights("new")
    engine.side.name_weights("2")
    engine.node.attach()
    assert engine.serve("a", PROMPT) == COLD
    assert engine.node.weight_versions == ["2"]
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    engine.check_nothing_is_left()


def test_a_reset_changes_the_version_unless_that_has_a_name(make_engine: MakeEngine) -> None:
    engine = with_peer(make_engine())
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.serve("a", PROMPT) == COLD, "a peer has what was to be forgotten"
    named = with_peer(make_engine(weight_version="1"))
    assert named.scheduler.reset_prefix_cache(reset_connector=True)
    assert named.serve("a", PROMPT) == HIT
    for one in (engine, named):
        one.check_nothing_is_left()


def test_many_changes_without_a_step_between_make_one_version() -> None:
    weights = WeightVersions()
    for _ in range(100):
        weights.changed()
    assert weights.take_change()
    version = weights.current
    assert not weights.take_change()
    assert weights.current == version


def test_pages_are_stale_only_if_something_was_computed_since_they_were_cleared() -> None:
    weights = WeightVersions("1")
    weights.computed()
    weights.pages_cleared()
    assert weights.name("2")
    assert not weights.pages_are_stale
    weights.computed()
    assert weights.name("3")
    assert weights.pages_are_stale
    weights.pages_cleared()
    assert not weights.pages_are_stale


def test_a_name_may_be_of_any_length() -> None:
    weights = WeightVersions("1")
    assert weights.name("x" * 1000)
    assert len(weights.current) == 64
    assert not weights.name("x" * 1000)
    assert not weights.name("")
    assert weights.take_change()
    assert weights.current.startswith(PRIVATE_VERSION)


def test_an_update_under_the_same_name_is_another_version_until_it_is_named() -> None:
    weights = WeightVersions("1")
    weights.changed()
    assert weights.take_change()
    assert weights.current != "1"
    assert weights.name("1")
    weights.reset()
    assert not weights.take_change()


def test_weights_that_changed_and_are_named_as_before_have_that_name_and_no_pages_of_before() -> None:
    weights = WeightVersions("1")
    weights.computed()
    weights.changed()
    assert weights.name("1")
    assert weights.pages_are_stale
    assert not weights.take_change()
    assert weights.current == "1"
