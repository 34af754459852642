"""Which of two channels is used, by the bandwidth of reads whose times are made up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.transfer.choice import (
    FIRST_PAUSE_SECONDS,
    LAST_PAUSE_SECONDS,
    LEAST_BYTES,
    MOST_SLOWDOWN,
    SAMPLE_BYTES,
    SWITCH_FACTOR,
    ChannelChoice,
)

READ_BYTES = 8 << 20
GB = 1e9


class Reads:
    """Reads one after the other, by channels of a given bandwidth."""

    def __init__(self, **rates: float) -> None:
        self.choice = ChannelChoice("nixl", "tcp")
        self.rates = rates
        self.now = 1000.0
        self.read_bytes = {"nixl": 0, "tcp": 0}
        self.seconds = {"nixl": 0.0, "tcp": 0.0}

    def run(self, size_bytes: int) -> None:
        """Reads, and begins each trial that is due."""
        for _ in range(0, size_bytes, READ_BYTES):
            name = self.choice.current
            read = self.choice.begin(name, self.now)
            self.now += READ_BYTES / self.rates[name]
            self.choice.end(read, READ_BYTES, self.now)
            self.read_bytes[name] += READ_BYTES
            self.seconds[name] += READ_BYTES / self.rates[name]
            if self.choice.is_trial_due:
                self.choice.begin_trial()


def test_the_preferred_channel_is_used_at_first() -> None:
    choice = ChannelChoice("nixl", "tcp")
    assert choice.used == choice.current == "nixl"
    assert not choice.is_trial_due


def test_a_faster_channel_takes_over_after_one_sample_of_each() -> None:
    reads = Reads(nixl=1.3 * GB, tcp=2.8 * GB)
    reads.run(3 * SAMPLE_BYTES)
    assert reads.choice.used == reads.choice.current == "tcp"
    assert reads.choice.rate("nixl") == pytest.approx(1.3 * GB)
    assert reads.choice.rate("tcp") == pytest.approx(2.8 * GB)
    assert reads.read_bytes["nixl"] == SAMPLE_BYTES + READ_BYTES  # the first read connects


@pytest.mark.parametrize("tcp", [0.5, 1.0, SWITCH_FACTOR - 0.01])
def test_a_channel_that_is_not_clearly_faster_is_left_after_its_trial(tcp: float) -> None:
    reads = Reads(nixl=2 * GB, tcp=2 * GB * tcp)
    reads.run(20 * SAMPLE_BYTES)
    assert reads.choice.used == reads.choice.current == "nixl"
    assert 0 < reads.read_bytes["tcp"] <= SAMPLE_BYTES + READ_BYTES


def test_the_trial_of_a_slow_channel_ends_early() -> None:
    reads = Reads(nixl=10 * GB, tcp=0.1 * GB)
    reads.run(20 * SAMPLE_BYTES)
    allowed = MOST_SLOWDOWN * SAMPLE_BYTES / (10 * GB)
    assert reads.seconds["tcp"] <= allowed + 2 * READ_BYTES / (0.1 * GB)  # the first read is not counted


def test_trials_become_rarer() -> None:
    reads = Reads(nixl=2 * GB, tcp=1 * GB)
    starts = []
    while reads.now < 1000 + 10 * LAST_PAUSE_SECONDS:
        before = reads.choice.is_trial
        reads.run(READ_BYTES)
        if reads.choice.is_trial and not before:
            starts.append(reads.now)
        if not reads.choice.is_trial:
            reads.now += 1.0  # little traffic
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert pauses[0] >= FIRST_PAUSE_SECONDS
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses[:6]))
    assert max(pauses) == pytest.approx(LAST_PAUSE_SECONDS, rel=0.05)


def test_a_channel_that_has_become_slow_is_left_at_a_later_trial() -> None:
    reads = Reads(nixl=10 * GB, tcp=2 * GB)
    reads.run(5 * SAMPLE_BYTES)
    reads.rates["nixl"] = 1 * GB
    reads.run(3 * SAMPLE_BYTES)
    assert reads.choice.used == "nixl"  # not compared again yet
    reads.now += FIRST_PAUSE_SECONDS
    reads.run(4 * SAMPLE_BYTES)
    assert reads.choice.used == "tcp"
    reads.rates["nixl"] = 10 * GB
    reads.now += 2 * FIRST_PAUSE_SECONDS
    reads.run(4 * SAMPLE_BYTES)
    assert reads.choice.used == "nixl"


def test_reads_of_both_channels_at_a_time_measure_neither() -> None:
    choice = ChannelChoice("nixl", "tcp")
    for number in range(20):
        one, other = choice.begin("nixl", number), choice.begin("tcp", number)
        choice.end(one, SAMPLE_BYTES, number + 0.5)
        choice.end(other, SAMPLE_BYTES, number + 0.6)
    assert choice.rate("nixl") is choice.rate("tcp") is None
    assert not choice.is_trial_due


def test_reads_that_run_at_a_time_share_the_bandwidth_of_their_channel() -> None:
    choice = ChannelChoice("nixl", "tcp")
    choice.end(choice.begin("nixl", 0.0), SAMPLE_BYTES, 1.0)
    reads = [choice.begin("nixl", 1.0) for _ in range(4)]
    for number, read in enumerate(reads):
        choice.end(read, SAMPLE_BYTES // 4, 2.0 + number)
    assert choice.rate("nixl") == pytest.approx(SAMPLE_BYTES / 4.0)


def test_small_and_failed_reads_measure_nothing() -> None:
    choice = ChannelChoice("nixl", "tcp")
    for number in range(1000):
        choice.end(choice.begin("nixl", number), LEAST_BYTES - 1, number + 0.5)
        choice.end(choice.begin("nixl", number + 0.5), 0, number + 0.9)
    assert choice.rate("nixl") is None


def test_after_a_failed_read_the_other_channel_is_used_and_the_failed_one_is_tried_later() -> None:
    reads = Reads(nixl=10 * GB, tcp=2 * GB)
    reads.choice.fail("nixl", reads.now)
    reads.choice.fail("nixl", reads.now)  # a second read of the same time
    assert reads.choice.used == reads.choice.current == "tcp"
    reads.run(5 * SAMPLE_BYTES)
    assert reads.choice.used == "tcp"
    reads.now += FIRST_PAUSE_SECONDS
    reads.run(5 * SAMPLE_BYTES)
    assert reads.choice.used == "nixl"


def test_a_trial_that_fails_changes_nothing() -> None:
    reads = Reads(nixl=1 * GB, tcp=2 * GB)
    while not reads.choice.is_trial:
        reads.run(READ_BYTES)
    reads.choice.fail("tcp", reads.now)
    assert reads.choice.used == reads.choice.current == "nixl"
    reads.run(5 * SAMPLE_BYTES)
    assert reads.choice.used == "nixl"


@given(
    st.floats(0.05, 50),
    st.floats(0.05, 50),
    st.lists(st.tuples(st.sampled_from(["read", "fail", "wait"]), st.integers(1, 30)), max_size=60),
)
def test_whatever_happens_one_of_both_is_used_and_the_faster_one_in_the_end(
    nixl: float, tcp: float, events: list[tuple[str, int]]
) -> None:
    reads = Reads(nixl=nixl * GB, tcp=tcp * GB)
    for event, number in events:
        match event:
            case "read":
                reads.run(number * READ_BYTES)
            case "fail":
                reads.choice.fail(reads.choice.current, reads.now)
            case _:
                reads.now += number
        assert {reads.choice.used, reads.choice.other_than(reads.choice.used)} == {"nixl", "tcp"}
        assert reads.choice.is_trial == (reads.choice.current != reads.choice.used)
    for _ in range(2):  # a trial that runs, and one more
        reads.run(4 * SAMPLE_BYTES)
        reads.now += LAST_PAUSE_SECONDS
        reads.run(4 * SAMPLE_BYTES)
    slower, faster = sorted(reads.rates, key=lambda name: reads.rates[name])
    if reads.rates[faster] > 1.01 * SWITCH_FACTOR * reads.rates[slower]:
        assert reads.choice.used == faster


def test_reads_of_the_least_size_measure_and_those_without_a_duration_do_not() -> None:
    choice = ChannelChoice("nixl", "tcp")
    choice.end(choice.begin("nixl", 0.0), LEAST_BYTES, 0.0)  # connects
    choice.end(choice.begin("nixl", 0.0), SAMPLE_BYTES, 0.0)
    assert choice.rate("nixl") is None
    for number in range(SAMPLE_BYTES // LEAST_BYTES):
        assert choice.rate("nixl") is None
        choice.end(choice.begin("nixl", number), LEAST_BYTES, number + 1.0)
    assert choice.rate("nixl") == LEAST_BYTES
    assert choice.is_trial_due


def test_a_sample_begins_after_the_one_before_it() -> None:
    choice = ChannelChoice("nixl", "tcp")
    for now, seconds in ((0.0, 1.0), (1.0, 1.0), (2.0, 4.0)):
        choice.end(choice.begin("nixl", now), SAMPLE_BYTES, now + seconds)
    assert choice.rate("nixl") == SAMPLE_BYTES / 4.0


def test_a_trial_that_is_given_up_is_due_again_once_its_pause_has_passed() -> None:
    choice = ChannelChoice("nixl", "tcp")

    def is_due_after_a_sample(now: float) -> bool:
        choice.end(choice.begin("nixl", now - 1.0), SAMPLE_BYTES, now)
        return choice.is_trial_due

    assert not is_due_after_a_sample(1.0)  # connects
    assert is_due_after_a_sample(2.0)
    for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS):
        choice.end_trial(1000.0)
        assert not is_due_after_a_sample(1000.0 + pause - 0.5)
        assert is_due_after_a_sample(1000.0 + pause)
    for _ in range(10):
        choice.end_trial(1e6)
    assert not is_due_after_a_sample(1e6 + LAST_PAUSE_SECONDS - 0.5)
    assert is_due_after_a_sample(1e6 + LAST_PAUSE_SECONDS)


def test_a_failure_of_the_channel_that_is_not_in_use_changes_nothing() -> None:
    choice = ChannelChoice("nixl", "tcp")
    choice.fail("tcp", 0.0)
    assert (choice.used, choice.other_than("nixl"), choice.other_than("tcp")) == ("nixl", "tcp", "nixl")
    choice.end(choice.begin("nixl", 0.0), SAMPLE_BYTES, 1.0)
    choice.end(choice.begin("nixl", 1.0), SAMPLE_BYTES, 2.0)
    assert choice.is_trial_due, "the first trial has no pause before it"


def test_a_trial_measures_the_other_channel_again_and_its_first_read_connects() -> None:
    reads = Reads(nixl=1 * GB, tcp=1 * GB)
    reads.run(4 * SAMPLE_BYTES)
    assert reads.choice.rate("tcp") == pytest.approx(1 * GB)
    reads.rates["tcp"] = 4 * GB
    reads.now += FIRST_PAUSE_SECONDS
    while not reads.choice.is_trial:
        reads.run(READ_BYTES)
    assert reads.choice.rate("tcp") is None
    reads.run(SAMPLE_BYTES)
    assert reads.choice.is_trial, "one read less than a sample was measured"
    reads.run(READ_BYTES)
    assert reads.choice.used == "tcp"
