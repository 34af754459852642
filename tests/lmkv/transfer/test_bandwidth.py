"""What is known of a peer's bandwidth: nothing at first, an average then, and nothing again when it is old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.transfer.bandwidth import (
    DECAY,
    EXPIRY_SECONDS,
    LATE_FACTOR,
    LATE_LEAST_SECONDS,
    LATE_RATE,
    LEAST_BYTES,
    LEAST_MEASURED_BYTES,
    LEAST_READS,
    MAX_SHARES,
    Bandwidth,
    MovedShares,
    shortest_seconds,
)

MB = 1e6


def known(rate: float, answer_seconds: float = 0.0, now: float = 0.0) -> Bandwidth:
    bandwidth = Bandwidth()
    for _ in range(2):  # the first one connects
        bandwidth.record_read(round(100 * MB), 100 * MB / rate, now)
    bandwidth.record_response(answer_seconds, now)
    return bandwidth


def test_nothing_is_known_at_first_nor_from_the_read_that_connects() -> None:
    bandwidth = Bandwidth()
    assert bandwidth.rate(0) is bandwidth.seconds(1, 0) is None
    bandwidth.record_read(LEAST_BYTES, 10.0, 0)
    assert bandwidth.rate(0) is None
    bandwidth.record_read(LEAST_BYTES, 1.0, 0)
    assert bandwidth.rate(0) == LEAST_BYTES


def test_small_reads_say_nothing_of_how_fast_bytes_come() -> None:
    bandwidth = known(1e9)
    bandwidth.record_read(LEAST_BYTES - 1, 10.0, 0)
    assert bandwidth.rate(0) == pytest.approx(1e9)


def test_an_answer_is_late_after_several_times_what_was_measured_however_old_that_is() -> None:
    assert Bandwidth().late_after_seconds(1) is None
    slow = known(1e8, 0.05)
    assert slow.late_after_seconds(100_000_000) == pytest.approx(LATE_FACTOR * 1.05)
    assert known(1e12).late_after_seconds(1) == LATE_LEAST_SECONDS
    answered = Bandwidth()
    answered.record_response(0.5, 0.0)
    assert answered.late_after_seconds(round(LATE_RATE)) == pytest.approx(LATE_FACTOR * (0.5 * (1 - 0.0) + 1))


def test_what_a_transfer_takes_is_the_answer_and_then_its_bytes() -> None:
    assert known(1e9, 0.002).seconds(500_000_000, 1.0) == pytest.approx(0.502)


def test_few_small_reads_say_nothing_of_another_one() -> None:
    bandwidth = Bandwidth()
    bandwidth.record_read(LEAST_BYTES, 1.0, 0.0)
    for _ in range(1, LEAST_READS):
        bandwidth.record_read(LEAST_BYTES, 0.3, 0.0)  # the machine was busy
        assert bandwidth.seconds(32 * LEAST_BYTES, 0.0) is None
    bandwidth.record_read(LEAST_BYTES, 0.3, 0.0)
    assert bandwidth.seconds(32 * LEAST_BYTES, 0.0) == pytest.approx(9.6)
    bandwidth.record_read(LEAST_BYTES, 0.3, EXPIRY_SECONDS)
    assert bandwidth.seconds(32 * LEAST_BYTES, EXPIRY_SECONDS) is None, "what was measured before has expired"
    bandwidth.record_read(LEAST_MEASURED_BYTES, 4.8, EXPIRY_SECONDS)
    assert bandwidth.seconds(32 * LEAST_BYTES, EXPIRY_SECONDS) == pytest.approx(9.6), "one that is large is enough"


def test_a_measurement_that_nothing_renews_is_forgotten() -> None:
    bandwidth = known(1e9, 0.5)
    assert bandwidth.seconds(0, EXPIRY_SECONDS - 0.1) == 0.5
    assert bandwidth.rate(EXPIRY_SECONDS) is None
    assert bandwidth.latency_seconds(EXPIRY_SECONDS) == 0
    bandwidth.record_read(LEAST_BYTES, 1.0, EXPIRY_SECONDS)
    assert bandwidth.rate(EXPIRY_SECONDS) == LEAST_BYTES, "nothing of the old average is left"


@given(st.lists(st.floats(1e6, 1e11), min_size=1), st.floats(1e6, 1e11))
def test_the_average_stays_between_what_was_measured_and_follows_what_comes(rates: list[float], last: float) -> None:
    bandwidth = known(rates[0])
    for rate in rates:
        bandwidth.record_read(LEAST_BYTES, LEAST_BYTES / rate, 1.0)
    average = bandwidth.rate(1.0)
    assert average is not None
    assert min(rates) * 0.999 <= average <= max(rates) * 1.001
    for _ in range(200):
        bandwidth.record_read(LEAST_BYTES, LEAST_BYTES / last, 1.0)
    assert bandwidth.rate(1.0) == pytest.approx(last, rel=0.01)


def test_the_fastest_counts_only_if_all_bandwidths_are_known() -> None:
    slow, fast = known(1e6), known(1e9)
    assert shortest_seconds([(slow, MB), (fast, MB)], 0) == pytest.approx(0.001)
    assert shortest_seconds([(slow, MB), (Bandwidth(), MB), (fast, MB)], 0) is None
    assert shortest_seconds([], 0) is None


def test_the_share_that_moves_is_known_by_spec_and_follows_what_comes() -> None:
    shares = MovedShares()
    shares.record(b"none", 0, 0)
    assert shares.get(b"none") is None
    shares.record(b"a", 50, 100)
    shares.record(b"b", 100, 100)
    assert (shares.get(b"a"), shares.get(b"b")) == (0.5, 1.0)
    shares.record(b"a", 100, 100)
    assert shares.get(b"a") == pytest.approx((DECAY * 50 + 100) / (DECAY * 100 + 100))
    for number in range(MAX_SHARES):
        shares.record(number.to_bytes(2), 1, 4)
    assert (shares.get(b"a"), shares.get((0).to_bytes(2))) == (None, 0.25)


def test_a_latency_is_an_average_in_which_earlier_answers_lose_weight() -> None:
    bandwidth = Bandwidth()
    bandwidth.record_response(1.0, 0.0)
    assert bandwidth.latency_seconds(0.0) == 1.0, "the first answer counts alone"
    bandwidth.record_response(2.0, EXPIRY_SECONDS - 0.5)
    assert bandwidth.latency_seconds(EXPIRY_SECONDS) == pytest.approx(DECAY * 1.0 + (1 - DECAY) * 2.0)
    bandwidth.record_response(5.0, 2 * EXPIRY_SECONDS - 0.5)
    assert bandwidth.latency_seconds(2 * EXPIRY_SECONDS) == 5.0, "the earlier ones have expired"


def test_an_answer_is_late_by_the_measured_bandwidth_also_after_that_has_expired() -> None:
    bandwidth = known(1e6, now=0.0)
    assert bandwidth.late_after_seconds(round(MB)) == pytest.approx(LATE_FACTOR * 1.0)
    bandwidth.record_response(1.0, 10 * EXPIRY_SECONDS)
    assert bandwidth.rate(10 * EXPIRY_SECONDS) is None
    assert bandwidth.late_after_seconds(round(MB)) == pytest.approx(LATE_FACTOR * 2.0)


def test_a_read_without_a_duration_is_ignored_also_as_the_one_that_connects() -> None:
    bandwidth = Bandwidth()
    for seconds in (0.0, -1.0, 10.0):
        bandwidth.record_read(LEAST_BYTES, seconds, 0.0)
    assert bandwidth.rate(0.0) is None, "the last of these connected"
    bandwidth.record_read(LEAST_BYTES, 0.5, 0.0)
    assert bandwidth.rate(0.0) == 2 * LEAST_BYTES


def test_a_second_read_counts_together_with_the_earlier_one() -> None:
    bandwidth = Bandwidth()
    for seconds in (9.0, 1.0, 2.0):
        bandwidth.record_read(LEAST_BYTES, seconds, 0.0)
    assert bandwidth.rate(0.0) == pytest.approx(LEAST_BYTES * (DECAY + 1) / (DECAY * 1.0 + 2.0))


def test_a_source_that_is_to_bring_much_before_may_be_later_than_a_slow_one() -> None:
    slow, fast = known(1e8), known(1e9)
    assert shortest_seconds([(slow, 10 * MB), (fast, 310 * MB)], 0) == pytest.approx(0.1)
    assert shortest_seconds([(slow, 10 * MB), (fast, 50 * MB)], 0) == pytest.approx(0.05)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("together", [True, False])
def test_reads_that_run_at_once_are_measured_as_what_the_source_brings_in_all(count: int, together: bool) -> None:
    bandwidth, seconds = Bandwidth(), 0.1
    began = [0.0] * count if together else [-seconds * count * at / (count + 1) for at in range(count)]
    for _ in range(20):  # each reader begins again when it is done; the source brings 1 GB/s to all of them
        for at in range(count):
            now = began[at] + seconds * count
            busy = bandwidth.busy(began[at], now)
            bandwidth.record_read(round(100 * MB), busy.seconds, now, busy.share)
            began[at] = now
        began.sort()
    assert bandwidth.rate(max(began)) == pytest.approx(1e9, rel=0.25)
