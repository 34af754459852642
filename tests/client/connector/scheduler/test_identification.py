"""An engine that serves before its weights are identified: nothing is looked up or stored until they are."""

from __future__ import annotations

import pytest

from lmkv_client.engine.node.client import Identified
from tests.client.connector.scheduler.serving import COLD, HIT, PROMPT, MakeEngine, forget_pages
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

OTHER = [token + 200 for token in PROMPT]


def identify(engine: SimulatedEngine) -> None:
    """The digest of the weights is known, and the engine attaches."""
    engine.node.inbox.append(Identified(model_id="known"))
    engine.node.attach()


def test_prompts_are_stored_and_found_under_the_identity_once_it_is_known(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    assert engine.serve("a", PROMPT) == COLD
    identify(engine)
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == COLD
    assert engine.side._session.spec.model_id == "known"
    assert len(engine.node.commits) == len(PROMPT) // CHUNK
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == HIT
    engine.check_nothing_is_left()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_that_runs_meanwhile_stores_nothing(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(attached=False, step_tokens=CHUNK)
    engine.add("a", PROMPT, output=CHUNK)
    for _ in range(steps):
        engine.step()
    identify(engine)
    engine.run("a")
    assert not engine.node.commits
    engine.check_nothing_is_left()


def test_a_request_that_waits_meanwhile_has_the_keys_of_the_identity(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    engine.add("a", PROMPT)
    identify(engine)
    engine.run("a")
    assert len(engine.node.commits) == len(PROMPT) // CHUNK, "and the node is to see no others"
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == HIT
    assert engine.serve("c", OTHER) == COLD
    engine.check_nothing_is_left()


def test_weights_may_change_and_be_named_before_they_are_identified(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    assert engine.serve("a", PROMPT) == COLD
    engine.change_weights("new")
    engine.side.name_weights("2")
    engine.side.pages_cleared()
    identify(engine)
    forget_pages(engine)
    assert engine.serve("b", PROMPT) == COLD
    assert (engine.side._session.spec.model_id, engine.side._session.spec.weight_version) == ("known", "2")
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == HIT
    engine.check_nothing_is_left()
