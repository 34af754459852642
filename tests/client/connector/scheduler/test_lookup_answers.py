"""The scheduler side while answers of the node are late or never come."""

from __future__ import annotations

import pytest

from lmkv.runtime.patience import SHARE, SUSPECT_SECONDS, TIMEOUTS_UNTIL_SUSPECT
from lmkv_client.connector.scheduler.lookups import HOLD_SECONDS
from tests.client.connector.scheduler.serving import (
    COLD,
    FOREVER,
    HIT,
    PROMPT,
    MakeEngine,
    filled,
    forget_pages,
    until,
)
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK


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


RATE = 100
"""Tokens per second of an engine that takes two seconds for the prompt."""
TIMEOUT = 0.05


def slow(engine: SimulatedEngine, tokens_per_second: float = RATE) -> SimulatedEngine:
    """The engine, once it knows that it computes this slowly."""
    for _ in range(50):
        engine.side._session.prefill.add(10**6, 10**6 / tokens_per_second)
    return engine


def waits_for(engine: SimulatedEngine, seconds: float) -> bool:
    """Whether the request `a` still waits for the answer of its lookup after this time."""
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.step()
    engine.clock.now += seconds
    engine.step()
    return not engine.scheduled_tokens["a"]


def test_a_request_waits_for_an_answer_as_long_as_that_is_worth(make_engine: MakeEngine) -> None:
    engine = slow(filled(make_engine(lookup_timeout=TIMEOUT)))
    worth = SHARE * len(PROMPT) / RATE
    assert waits_for(engine, 0.9 * worth)
    engine.node.answer()
    assert engine.node.lookups[-1].budget.ToNanoseconds() == pytest.approx(worth * 1e9, rel=0.01)
    engine.run("a")
    assert engine.scheduled_tokens["a"] == HIT
    assert engine.count("lookup_timeouts") == 0
    engine.check_nothing_is_left()


def test_a_request_waits_no_longer_than_an_answer_is_worth(make_engine: MakeEngine) -> None:
    engine = slow(filled(make_engine(lookup_timeout=TIMEOUT)))
    assert not waits_for(engine, 1.1 * SHARE * len(PROMPT) / RATE)
    assert engine.count("lookup_timeouts") == 1


def test_a_lookup_always_has_its_timeout(make_engine: MakeEngine) -> None:
    fast = slow(filled(make_engine(lookup_timeout=TIMEOUT)), 10**6)
    assert waits_for(fast, 0.8 * TIMEOUT)
    unmeasured = make_engine(lookup_timeout=TIMEOUT)
    assert waits_for(unmeasured, 0.8 * TIMEOUT)
    unmeasured.node.answer()
    assert not unmeasured.node.lookups[-1].HasField("budget")


def test_the_longest_time_of_a_lookup_holds(make_engine: MakeEngine) -> None:
    engine = slow(filled(make_engine(lookup_timeout=TIMEOUT, max_lookup_timeout=2 * TIMEOUT)))
    assert not waits_for(engine, 2.1 * TIMEOUT)


def test_what_vllm_holds_itself_is_worth_no_wait(make_engine: MakeEngine) -> None:
    engine = slow(filled(make_engine(lookup_timeout=TIMEOUT)))
    engine.serve("own", PROMPT)
    assert not waits_for(engine, 3 * TIMEOUT), "vLLM has all but the last tokens"
    engine.run("a")
    forget_pages(engine)
    slow(engine)
    engine.add("b", PROMPT)
    engine.step()
    engine.clock.now += 3 * TIMEOUT
    engine.step()
    assert not engine.scheduled_tokens["b"]


def test_a_node_that_was_silent_for_less_than_an_answer_is_worth_is_asked(make_engine: MakeEngine) -> None:
    engine = slow(make_engine(lookup_timeout=TIMEOUT, max_lookup_timeout=20.0), 10**6)
    engine.node.prompt = False
    for number in range(TIMEOUTS_UNTIL_SUSPECT):
        engine.serve(str(number), [number, *PROMPT])
    engine.serve("not asked", [100, *PROMPT])
    assert engine.count("lookups") == TIMEOUTS_UNTIL_SUSPECT
    slow(engine, RATE / 10)
    engine.node.prompt = True
    engine.serve("again", PROMPT)
    assert engine.count("lookups") == TIMEOUTS_UNTIL_SUSPECT + 1
    engine.check_nothing_is_left()


def test_another_node_is_not_suspect(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    for number in range(TIMEOUTS_UNTIL_SUSPECT):
        engine.serve(str(number), [number, *PROMPT])
    engine.node.lose()
    engine.step()
    engine.node.attach()
    engine.node.prompt = True
    engine.serve("again", PROMPT)
    assert len(engine.node.lookups) == 1
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
