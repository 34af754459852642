"""The simulated fleet: what its caches, its view of the layout map and its placements do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from benchmarks.replay.files import read_trace
from benchmarks.replay.fleet import (
    ORACLE,
    OTHER,
    PICKER,
    PLACEMENTS,
    PREFILL_RATE,
    REPORT_SECONDS,
    ROUND_ROBIN,
    SESSIONS,
    Cache,
    Fleet,
    LayoutView,
    Outcome,
    Pace,
    sessions_of,
)
from benchmarks.replay.traces import Request, Trace
from benchmarks.routing import EXCERPT, SCENES, TWO_SPEEDS
from lmkv.keys import ChunkKey


def keys(*numbers: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(16, "big")) for number in numbers]


def request(seconds: float, *numbers: int) -> Request:
    """A prompt of chunks of 100 tokens, answered at once."""
    prompt = keys(*numbers)
    return Request(keys=prompt, token_count=100 * len(prompt), stored=prompt, arrival_seconds=seconds)


class Recorder:
    """A router that sends all requests to one engine, and writes down what it receives."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.received: list[object] = []

    def choose(self, name: str, keys: Sequence[ChunkKey]) -> str:
        self.received.append(("asked", name, list(keys)))
        return self.instance

    def computed(self, name: str) -> None:
        self.received.append(("computed", name))

    def answered(self, name: str) -> None:
        self.received.append(("answered", name))

    def change(self, instance: str, new: Sequence[ChunkKey], evicted: Sequence[ChunkKey]) -> None:
        self.received.append(("changed", instance, list(new), list(evicted)))


def replay(placement: str, requests: Sequence[Request], engine_count: int = 2, engine_tokens: int = 10_000) -> Outcome:
    trace = Trace(requests=requests, chunk_tokens=100)
    fleet = Fleet(trace, placement, engine_count, engine_tokens, policy="lru")
    return fleet.replay(sessions_of(trace), speed=1.0)


def test_a_cache_evicts_beyond_its_capacity_and_reports_it() -> None:
    cache = Cache(3, "lru")
    assert cache.store(keys(1, 2, 3)) == (keys(1, 2, 3), [])
    assert cache.use(keys(1, 2, 9)) == 2
    new, evicted = cache.store(keys(7))
    assert (new, evicted) == (keys(7), keys(3))
    new, evicted = cache.store(keys(20, 21, 22, 23))  # more than it has room for
    assert len(new) == 3
    assert sorted(evicted) == keys(1, 2, 7)


def test_the_view_knows_the_longest_prefix_of_each_instance() -> None:
    view = LayoutView()
    view.change("a", keys(1, 2, 3), [])
    view.change("b", keys(1, 2), [])
    view.change("c", keys(2), [])
    assert view.matches(keys(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert view.matches(keys(2)) == {"a": 1, "b": 1, "c": 1}
    view.change("a", [], keys(3))
    assert view.matches(keys(1, 2, 3)) == {"a": 2, "b": 2}
    assert view.matches([]) == view.matches(keys(9)) == {}


def test_requests_of_a_session_have_one_name() -> None:
    prompts = [request(0, 0, number) for number in range(100, 500)]  # all begin with chunk 0
    prompts += [request(1, 0, 100, 1000), request(2, 0, 100, 1000, 1001), request(3, 0, 2000)]
    sessions = sessions_of(Trace(requests=prompts, chunk_tokens=100))
    assert sessions[0] == sessions[400] == sessions[401]
    assert len(set(sessions)) == 401


@pytest.mark.parametrize(
    ("placement", "hit_tokens"), [(PICKER, 400), (ROUND_ROBIN, 200), (SESSIONS, 400), (ORACLE, 400)]
)
def test_two_sessions_that_alternate(placement: str, hit_tokens: int) -> None:
    first, second = (1, 11, 12), (2, 21, 22)
    requests = [
        request(0, *first[:1]),
        request(10, *second[:1]),
        request(20, *second[:2]),
        request(30, *first[:2]),
        request(40, 3),
        request(50, *first),
    ]
    # A chunk of more than one percent of the requests would count as shared by sessions: others keep it below.
    others = [request(100 + at, 1000 + at) for at in range(700)]
    assert replay(placement, [*requests, *others]).hit_tokens == hit_tokens


def test_a_request_that_follows_at_once_waits_for_its_prompt_and_hits() -> None:
    prompt = range(1, 9)
    outcome = replay(PICKER, [request(0, *prompt), request(0.001, *prompt, 9)])
    assert outcome.hit_tokens == 800
    assert list(outcome.counts.values()) == [2]
    assert outcome.waits == pytest.approx([800 / PREFILL_RATE, 900 / PREFILL_RATE - 0.001])


def test_no_placement_finds_more_than_the_oracle_where_nothing_is_evicted() -> None:
    trace = read_trace(EXCERPT)
    trace = Trace(requests=trace.requests[:600], chunk_tokens=trace.chunk_tokens)
    sessions = sessions_of(trace)
    rates = {}
    for placement in PLACEMENTS:
        outcome = Fleet(trace, placement, 8, 1_000_000, policy="lru").replay(sessions, speed=1.0)
        assert outcome.asked_tokens == sum(one.token_count for one in trace.requests)
        assert outcome.counts.total() == 600
        rates[placement] = outcome.hit_rate
    assert max(rates, key=lambda placement: rates[placement]) == ORACLE
    assert rates[PICKER] > 0.9 * rates[ORACLE] > 2 * rates[ROUND_ROBIN]


def test_an_engine_that_stalls_computes_nothing_meanwhile() -> None:
    pace = Pace(tokens_per_second=100, stalls_at=10, stall_seconds=5)
    ends = [pace.end(begin, 100) for begin in (0.0, 9.0, 9.5, 10.0, 14.0, 15.0)]
    assert ends == [1.0, 10.0, 15.5, 16.0, 16.0, 16.0]


def test_engines_of_two_speeds_keep_their_hits_and_wait_less_than_by_hits_alone() -> None:
    trace = read_trace(EXCERPT)
    trace = Trace(requests=trace.requests[:1200], chunk_tokens=trace.chunk_tokens)
    sessions, paces = sessions_of(trace), SCENES[TWO_SPEEDS](8)
    outcomes = {
        placement: Fleet(trace, placement, 8, 1_000_000, policy="lru", paces=paces).replay(sessions, speed=1.0)
        for placement in (PICKER, SESSIONS, ORACLE)
    }
    waits = {placement: statistics.mean(outcome.waits) for placement, outcome in outcomes.items()}
    assert outcomes[PICKER].hit_rate > 0.95 * outcomes[ORACLE].hit_rate
    assert waits[PICKER] < min(waits[SESSIONS], waits[ORACLE])


def test_another_router_receives_what_the_picker_knows() -> None:
    seconds = 200 / PREFILL_RATE
    assert seconds < REPORT_SECONDS
    recorder = Recorder("1")
    trace = Trace(requests=[request(0, 1, 2), request(1, 1, 2, 3)], chunk_tokens=100)
    fleet = Fleet(trace, OTHER, 2, 10_000, policy="lru", other=recorder)
    outcome = fleet.replay(["", ""], speed=1.0)
    assert outcome.counts == {"http://1": 2}
    assert outcome.hit_tokens == 200
    first = [("asked", "0", keys(1, 2)), ("computed", "0"), ("answered", "0"), ("changed", "1", keys(1, 2), [])]
    second = [("asked", "1", keys(1, 2, 3)), ("computed", "1"), ("answered", "1")]
    assert recorder.received[:7] == first + second
    assert recorder.received[7:] == [("changed", "1", keys(3), [])]
