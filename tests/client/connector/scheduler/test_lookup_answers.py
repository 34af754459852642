"""The scheduler side while answers of the node are late or never come."""

from __future__ import annotations

from lmkv_client.connector.scheduler.lookups import HOLD_SECONDS, SUSPECT_SECONDS, TIMEOUTS_UNTIL_SUSPECT
from tests.client.connector.scheduler.serving import COLD, FOREVER, HIT, PROMPT, MakeEngine, filled, until
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
