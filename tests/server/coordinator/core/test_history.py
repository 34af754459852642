"""Samples of the fleet and of its instances."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lmkv_server.coordinator.core.history import (
    BOUNDS_SECONDS,
    MAX_INSTANCES,
    MAX_SAMPLES,
    MAX_TIER_NAME,
    MAX_TIERS,
    PERIOD_SECONDS,
    Counts,
    History,
    LatencyHistogram,
    Series,
)
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.models import InstanceInfo, ReportedStats, ReportedTier


def instance(instance_id: str = "a", used: Mapping[str, int] | None = None, epoch: int = 1, **stats: float) -> Instance:
    info = InstanceInfo(instance_id=instance_id, epoch=epoch, peer_address="", specs=(), version="", size_bytes=0)
    made = Instance(info, 0.0, 1.0)
    made.tiers = [ReportedTier(tier=name, used_bytes=size) for name, size in (used or {}).items()]
    made.stats = ReportedStats(**stats)  # type: ignore[arg-type]
    return made


def test_a_sample_has_what_was_added_since_the_one_before() -> None:
    history = History()
    history.take([instance(asked_chunks=100, own_chunks=50)], 10.0)
    history.take([instance(asked_chunks=130, own_chunks=60, peer_chunks=5)], 40.0)
    assert list(history.fleet.times) == [10.0, 40.0]
    assert list(history.fleet.counts["asked_chunks"]) == [0, 30], "what came before the first sample may be long ago"
    assert list(history.fleet.counts["own_chunks"]) == [0, 10]
    assert list(history.fleet.counts["peer_chunks"]) == [0, 5]


def test_a_restarted_instance_counts_from_zero() -> None:
    history = History()
    for epoch, asked in ((1, 100), (2, 7), (2, 9)):
        history.take([instance(epoch=epoch, asked_chunks=asked)], float(epoch))
    assert list(history.fleet.counts["asked_chunks"]) == [0, 7, 2]


def test_durations_are_in_seconds() -> None:
    history = History()
    history.take([instance()], 0.0)
    history.take([instance(load_count=2, load_seconds=0.25, avoided_prefill_seconds=3.0)], 30.0)
    columns = [list(history.fleet.counts[name])[-1] for name in ("load_count", "load_seconds")]
    assert columns == [2, 0.25]
    assert list(history.fleet.counts["avoided_prefill_seconds"]) == [0, 3]


def test_the_fleet_is_the_sum_of_its_instances() -> None:
    history = History()
    history.take([instance("a", {"host": 5}), instance("b", {"host": 7, "disk": 1})], 0.0)
    history.take([instance("a", {"host": 6}, asked_chunks=1), instance("b", {"host": 7}, asked_chunks=2)], 30.0)
    assert {tier: list(column) for tier, column in history.fleet.used_bytes.items()} == {
        "host": [12, 13],
        "disk": [1, 0],
    }
    assert list(history.fleet.counts["asked_chunks"]) == [0, 3]
    assert list(history.series("b").counts["asked_chunks"]) == [0, 2]
    assert list(history.series("b").used_bytes["disk"]) == [1, 0]


def test_an_instance_that_left_has_no_samples() -> None:
    history = History()
    history.take([instance("a"), instance("b")], 0.0)
    history.take([instance("a")], 30.0)
    assert (len(history.series("a").times), len(history.series("b").times)) == (2, 0)
    history.take([instance("a"), instance("b", asked_chunks=9)], 60.0)
    assert list(history.series("b").counts["asked_chunks"]) == [0]


def test_samples_are_taken_periodically() -> None:
    history = History()
    for time in (0.0, 1.0, PERIOD_SECONDS - 0.1, PERIOD_SECONDS, PERIOD_SECONDS + 1, 5.0):
        history.take_if_due([instance()], time)
    assert list(history.fleet.times) == [0.0, PERIOD_SECONDS, 5.0], "a clock that was set back stops nothing"


def test_memory_is_bounded() -> None:
    history = History()
    many = [instance(f"i{number}", {f"{number}": number + 1}) for number in range(MAX_INSTANCES + 1)]
    for time in range(MAX_SAMPLES + 3):
        history.take(many if time == 1 else many[-1:], float(time))
    history.take(many, 1e6)
    assert len(history.fleet.times) == len(history.fleet.counts["load_count"]) == MAX_SAMPLES
    assert {len(column) for column in history.fleet.used_bytes.values()} == {MAX_SAMPLES}
    assert len(history.fleet.used_bytes) <= 3 * MAX_TIERS
    assert len(history.series(f"i{MAX_INSTANCES}").times) == 0
    for time in range(MAX_SAMPLES):
        history.take(many[:1], 2e6 + time)
    assert list(history.fleet.used_bytes) == ["0"], "a tier without bytes in the last hour is forgotten"


def test_a_tier_that_appears_later_was_empty_before() -> None:
    history = History()
    history.take([instance(used={"host": 5})], 0.0)
    history.take([instance(used={"host": 5})], 30.0)
    history.take([instance(used={"host": 5, "disk": 3})], 60.0)
    assert list(history.series("a").used_bytes["disk"]) == [0, 0, 3]
    history.take([instance(used={"host": 5})], 90.0)
    assert list(history.series("a").used_bytes["disk"]) == [0, 0, 3, 0]


def test_of_many_new_tiers_the_fullest_are_kept() -> None:
    series = Series()
    series.add(0.0, Counts(), {f"t{number}": 100 + number for number in range(MAX_TIERS + 1)})
    assert series.used_bytes.keys() == {f"t{number}" for number in range(1, MAX_TIERS + 1)}


def test_an_instance_counts_with_a_bounded_number_of_tiers_and_of_their_letters() -> None:
    history = History()
    used = {f"{number:02}{'x' * MAX_TIER_NAME}": number + 1 for number in range(MAX_TIERS + 1)}
    history.take([instance(used=used)], 0.0)
    expected = {f"{number:02}{'x' * (MAX_TIER_NAME - 2)}" for number in range(MAX_TIERS)}
    assert history.fleet.used_bytes.keys() == history.series("a").used_bytes.keys() == expected


def test_one_counter_that_begins_again_restarts_all_of_them() -> None:
    earlier = Counts(asked_chunks=5, own_chunks=5)
    assert Counts(asked_chunks=7, own_chunks=5).since(earlier) == Counts(asked_chunks=2)
    assert Counts(asked_chunks=7, own_chunks=4).since(earlier) == Counts(asked_chunks=7, own_chunks=4)
    assert earlier.since(earlier) == Counts() == Counts(0, 0, 0, 0, 0, 0)


def test_the_last_of_the_instances_with_samples_has_them() -> None:
    history = History()
    history.take([instance(f"i{number}", asked_chunks=number) for number in range(MAX_INSTANCES + 1)], 0.0)
    assert len(history.series(f"i{MAX_INSTANCES - 1}").times) == 1
    assert len(history.series(f"i{MAX_INSTANCES}").times) == 0
    history.take([instance(f"i{number}", asked_chunks=number + 1) for number in range(MAX_INSTANCES + 1)], 30.0)
    assert list(history.fleet.counts["asked_chunks"]) == [0, MAX_INSTANCES + 1], "the fleet has all of them"


def test_a_first_sample_is_due_at_once() -> None:
    history = History()
    history.take_if_due([], -5.0)
    history.take_if_due([], -5.0)
    assert list(history.fleet.times) == [-5.0]


def test_an_event_counts_in_each_bucket_from_its_own_on() -> None:
    histogram = LatencyHistogram()
    assert histogram.cumulative() == [0] * (len(BOUNDS_SECONDS) + 1)
    histogram.add(BOUNDS_SECONDS[2], hit=True)  # a bound belongs to its bucket
    histogram.add(BOUNDS_SECONDS[2] * 1.01, hit=False)
    histogram.add(BOUNDS_SECONDS[-1] + 1, hit=True)
    assert histogram.cumulative() == [0, 0, 1] + [2] * (len(BOUNDS_SECONDS) - 3) + [3]
    assert histogram.hits == 2
    assert histogram.seconds == pytest.approx(BOUNDS_SECONDS[2] * 2.01 + BOUNDS_SECONDS[-1] + 1)


def test_the_bounds_ascend() -> None:
    assert list(BOUNDS_SECONDS) == sorted(set(BOUNDS_SECONDS))
    assert BOUNDS_SECONDS[0] > 0
