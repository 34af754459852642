"""The simulated engine whose hits are behind a link: what it loads, abandons and computes."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.replay.files import read_trace
from benchmarks.replay.fleet import PREFILL_RATE
from benchmarks.replay.loading import COMPUTE, DECIDED, LOAD, TOKEN_BYTES, LoadingEngine
from benchmarks.replay.traces import Request, Trace
from benchmarks.routing import EXCERPT
from lmkv.keys import ChunkKey

CHUNK = 1000
FAST, SLOW = 100 * PREFILL_RATE * TOKEN_BYTES, 0.01 * PREFILL_RATE * TOKEN_BYTES
"""Bytes per second of links that bring a hundred times, and a hundredth of, what the engine computes."""


def request(seconds: float, *numbers: int) -> Request:
    keys = [ChunkKey(number.to_bytes(16, "big")) for number in numbers]
    return Request(keys=keys, token_count=CHUNK * len(keys), stored=keys, arrival_seconds=seconds)


def replay(policy: str, bytes_per_second: float, *requests: Request) -> list[float]:
    trace = Trace(requests=requests, chunk_tokens=CHUNK)
    outcome = LoadingEngine(trace, bytes_per_second, policy).replay(requests, 1.0)
    assert outcome.asked_tokens == sum(one.token_count for one in requests)
    return outcome.waits


def test_a_hit_takes_the_time_of_its_load_and_a_miss_that_of_computing() -> None:
    asked = request(0, 1, 2, 3), request(100, 1, 2, 3, 4)
    cold, warm = 3 * CHUNK / PREFILL_RATE, 4 * CHUNK / PREFILL_RATE
    assert replay(COMPUTE, FAST, *asked) == pytest.approx([cold, warm])
    loaded = 3 * CHUNK * TOKEN_BYTES / FAST + CHUNK / PREFILL_RATE
    assert replay(LOAD, FAST, *asked) == pytest.approx([cold, loaded])
    assert replay(DECIDED, FAST, *asked) == pytest.approx([cold, loaded])


def test_loads_that_run_at_once_share_the_link_and_others_are_computed_meanwhile() -> None:
    asked = request(0, 1), request(1, 2), request(100, 1, 3), request(100, 2, 4), request(100, 5)
    waits = replay(LOAD, PREFILL_RATE * TOKEN_BYTES, *asked)
    one = CHUNK / PREFILL_RATE
    assert waits == pytest.approx([one, one, one, 3 * one, 4 * one])


def test_a_load_that_is_slow_is_abandoned_and_after_the_second_none_is_begun() -> None:
    """The first load is not measured: it may have waited for a connection."""
    asked = [request(1000 * number, 1, 2, 3, *[3 + number] * (number > 0)) for number in range(4)]
    cold, warm = 3 * CHUNK / PREFILL_RATE, 4 * CHUNK / PREFILL_RATE
    first, second, third, fourth = replay(DECIDED, SLOW, *asked)
    assert first == pytest.approx(cold)
    assert warm < second < 1.3 * warm
    assert warm < third < 1.3 * warm
    assert fourth == pytest.approx(warm)


@pytest.mark.parametrize("relative_rate", [0.1, 0.95, 3.0])
@pytest.mark.parametrize("load", [0.5, 0.95])
def test_the_estimator_is_within_five_percent_of_the_better_of_always_and_never(
    relative_rate: float, load: float
) -> None:
    trace = read_trace(EXCERPT)
    requests = trace.requests[:1000]
    rate = sum(one.token_count for one in requests) / requests[-1].arrival_seconds
    means = {
        policy: statistics.mean(
            LoadingEngine(trace, relative_rate * PREFILL_RATE * TOKEN_BYTES, policy)
            .replay(requests, load * PREFILL_RATE / rate)
            .waits
        )
        for policy in (LOAD, COMPUTE, DECIDED)
    }
    assert means[DECIDED] < 1.05 * min(means[LOAD], means[COMPUTE])
