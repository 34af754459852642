"""Whether a node that does not answer is asked."""

from __future__ import annotations

from lmkv.runtime.patience import SUSPECT_SECONDS, TIMEOUTS_UNTIL_SUSPECT, Suspicion

TIMEOUT = 0.1


def after_timeouts(count: int) -> tuple[Suspicion, float]:
    """A suspicion after timeouts in a row from 100.0 on, and when the last of them was."""
    suspicion = Suspicion()
    for number in range(count):
        asked_at = 100.0 + number * TIMEOUT
        suspicion.timed_out(asked_at, asked_at + TIMEOUT)
    return suspicion, 100.0 + count * TIMEOUT


def test_few_timeouts_are_no_reason() -> None:
    suspicion, now = after_timeouts(TIMEOUTS_UNTIL_SUSPECT - 1)
    assert not suspicion.concerns(0.0, now)


def test_a_silent_node_is_not_asked_for_a_while() -> None:
    suspicion, now = after_timeouts(TIMEOUTS_UNTIL_SUSPECT)
    assert suspicion.concerns(0.0, now)
    assert not suspicion.concerns(0.0, now + SUSPECT_SECONDS), "one lookup is sent, to see whether it answers"


def test_it_is_asked_for_what_is_worth_more_than_its_silence() -> None:
    suspicion, now = after_timeouts(TIMEOUTS_UNTIL_SUSPECT)
    silence = TIMEOUTS_UNTIL_SUSPECT * TIMEOUT
    assert suspicion.concerns(0.9 * silence, now)
    assert not suspicion.concerns(1.1 * silence, now)
    assert suspicion.concerns(1.1 * silence, now + silence), "it is silent for longer meanwhile"


def test_one_answer_ends_it() -> None:
    suspicion, now = after_timeouts(TIMEOUTS_UNTIL_SUSPECT)
    suspicion.end()
    assert not suspicion.concerns(0.0, now)
    suspicion.timed_out(now, now + TIMEOUT)
    assert not suspicion.concerns(0.0, now + TIMEOUT)
