"""Rates and counts, by a clock that the test turns."""

from __future__ import annotations

import pytest

from lmkv.auth.token_bucket import TokenBucket
from lmkv.errors import TooManyRequests


def test_requests_are_admitted_at_their_rate_after_a_burst() -> None:
    allowance = TokenBucket(8, 0, 100.0)
    for _ in range(8):
        allowance.acquire(100.0)
    with pytest.raises(TooManyRequests, match="8 requests per second") as refusal:
        allowance.acquire(100.0)
    assert refusal.value.metadata["retry_seconds"] == "0.125"
    allowance.acquire(100.125)
    with pytest.raises(TooManyRequests):
        allowance.acquire(100.125)
    for _ in range(8):  # a long pause saves up no more than a burst
        allowance.acquire(200.0)
    with pytest.raises(TooManyRequests):
        allowance.acquire(200.0)


def test_requests_in_flight_are_limited() -> None:
    allowance = TokenBucket(0, 2, 0.0)
    allowance.acquire(0.0)
    allowance.acquire(0.0)
    with pytest.raises(TooManyRequests, match="max_concurrent_requests"):
        allowance.acquire(0.0)
    allowance.release()
    allowance.acquire(0.0)
    assert allowance.in_flight_count == 2


def test_each_question_of_a_request_counts_like_one() -> None:
    allowance = TokenBucket(4, 1, 0.0)
    allowance.acquire(0.0)
    for _ in range(3):
        allowance.take(0.0)
    with pytest.raises(TooManyRequests, match="4 requests per second"):
        allowance.take(0.0)
    allowance.take(0.25)
    assert allowance.in_flight_count == 1


def test_without_limits_everything_is_admitted() -> None:
    allowance = TokenBucket(0, 0, 0.0)
    for _ in range(100):
        allowance.acquire(0.0)
        allowance.take(0.0)


def test_who_is_refused_takes_nothing() -> None:
    allowance = TokenBucket(1, 1, 0.0)
    allowance.acquire(0.0)
    for _ in range(3):
        with pytest.raises(TooManyRequests):
            allowance.acquire(1.0)
    allowance.release()
    allowance.acquire(1.0)
