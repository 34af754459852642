"""Rates and counts, by a clock that the test turns."""

from __future__ import annotations

import pytest

from lmkv.auth.token_bucket import BURST_SECONDS, MAX_DELAYED_REFUSALS, MIN_REFUSALS_PER_SECOND, TokenBucket
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


@pytest.mark.parametrize("tries_per_second", [32, 64, 1024])
def test_a_caller_that_repeats_refused_requests_is_admitted_at_its_rate(tries_per_second: int) -> None:
    bucket, admitted = TokenBucket(16, 0, 0.0), 0
    for number in range(10 * tries_per_second):
        try:
            bucket.acquire(number / tries_per_second)
            admitted += 1
        except TooManyRequests:
            continue
    assert 16 * BURST_SECONDS + 16 * 10 - 2 <= admitted <= 16 * BURST_SECONDS + 16 * 10


@pytest.mark.parametrize(
    ("limits", "rate"), [((500, 0), 500), ((1, 0), MIN_REFUSALS_PER_SECOND), ((0, 1), MIN_REFUSALS_PER_SECOND)]
)
def test_refusals_are_sent_one_after_another_at_the_rate_of_the_limit(limits: tuple[int, int], rate: int) -> None:
    bucket = TokenBucket(*limits, 7.0)
    for _ in range(max(limits)):
        bucket.acquire(7.0)
    assert [refused(bucket, 7.0) for _ in range(4)] == pytest.approx([number / rate for number in (1, 2, 3, 4)])
    half = 7.0 + 0.5 / rate  # too early for another request
    assert refused(bucket, half) == pytest.approx(4.5 / rate), "those before it still wait"


def test_a_caller_that_paused_waits_for_no_earlier_refusal() -> None:
    bucket = TokenBucket(0, 1, 0.0)
    bucket.acquire(0.0)
    for _ in range(50):
        refused(bucket, 0.0)
    assert refused(bucket, 1000.0) == pytest.approx(1 / MIN_REFUSALS_PER_SECOND)


def test_the_number_of_delayed_refusals_is_bounded() -> None:
    bucket = TokenBucket(0, 1, 0.0)
    bucket.acquire(0.0)
    delays = [refused(bucket, 0.0) for _ in range(MAX_DELAYED_REFUSALS + 100)]
    assert sum(delay > 0 for delay in delays) == MAX_DELAYED_REFUSALS
    assert delays[MAX_DELAYED_REFUSALS:] == [0.0] * 100
    assert refused(bucket, 1.0) > 0, "some have been sent"


def test_a_bucket_is_kept_while_its_limits_are_the_same() -> None:
    bucket = TokenBucket(3, 5, 0.0)
    assert bucket.has_limits(3, 5)
    assert not bucket.has_limits(5, 3)
    assert not bucket.has_limits(3, 4)


def test_a_refusal_contains_the_limit_and_when_to_retry() -> None:
    bucket = TokenBucket(4, 1, 0.0)
    bucket.acquire(0.0)
    with pytest.raises(TooManyRequests, match=r"^1 requests of this token are in flight") as refusal:
        bucket.acquire(0.0)
    assert refusal.value.metadata == {"limit": "1", "retry_seconds": str(BURST_SECONDS)}
    for _ in range(3):
        bucket.take(0.0)
    with pytest.raises(TooManyRequests, match=r"^this token may make 4 requests per second") as refusal:
        bucket.take(0.125)
    assert refusal.value.metadata == {"limit": "4", "retry_seconds": "0.125"}


def test_a_retry_delay_is_in_whole_milliseconds() -> None:
    bucket = TokenBucket(3, 0, 0.0)
    for _ in range(3):
        bucket.take(0.0)
    with pytest.raises(TooManyRequests) as refusal:
        bucket.take(0.0)
    assert refusal.value.metadata["retry_seconds"] == "0.333"


def refused(bucket: TokenBucket, now: float) -> float:
    """The delay of a request's refusal."""
    with pytest.raises(TooManyRequests) as refusal:
        bucket.acquire(now)
    assert "delay_seconds" not in refusal.value.metadata
    return refusal.value.delay_seconds
