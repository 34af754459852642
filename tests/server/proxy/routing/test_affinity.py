"""Which engine a session is with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.proxy.routing.affinity import SessionAffinity

STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["x", "y"]), st.floats(0.0, 5.0)), max_size=40)


def test_a_session_is_forgotten_some_time_after_its_last_request() -> None:
    sessions = SessionAffinity(10.0)
    sessions.assign("s", "x", 0.0)
    sessions.assign("s", "x", 5.0)
    assert sessions.get("s", 14.9) == "x"
    assert sessions.get("s", 15.0) is None


def test_without_a_time_nothing_is_remembered() -> None:
    sessions = SessionAffinity(0.0)
    sessions.assign("s", "x", 0.0)
    assert len(sessions) == 0


@given(STEPS)
def test_it_holds_what_was_last_said_within_its_bounds(steps: list[tuple[str, str, float]]) -> None:
    sessions, now = SessionAffinity(8.0, limit=3), 0.0
    last: dict[str, tuple[str, float]] = {}
    for session, url, pause in steps:
        now += pause
        sessions.assign(session, url, now)
        last.pop(session, None)
        last[session] = (url, now)
        assert len(sessions) <= 3
        kept = dict(list(last.items())[-3:])
        for name in "abcdef":
            expected = kept[name][0] if name in kept and now < kept[name][1] + 8.0 else None
            assert sessions.get(name, now) == expected


def test_expired_sessions_are_removed_with_the_next_request() -> None:
    sessions = SessionAffinity(0.5)
    sessions.assign("s", "x", 1.0)
    assert sessions.get("s", 1.25) == "x"
    sessions.assign("t", "x", 1.25)
    assert len(sessions) == 2
    sessions.assign("u", "x", 1.5)
    assert len(sessions) == 2, "the first one has just expired"
