"""The past as metrics and the page show it: latencies of lookups, and samples of an hour. Pure; time is passed in."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from lmkv_server.coordinator.core.instances import Instance

PERIOD_SECONDS = 30.0
"""Time between two samples."""
MAX_SAMPLES = 120
"""Samples kept: one hour."""
MAX_INSTANCES = 1_000
"""Instances with samples of their own, about 8 KiB each. Those beyond count only for the fleet."""
MAX_TIERS = 16
"""Tiers of one sample, by id; the largest are kept."""
MAX_TIER_NAME = 64
"""Characters of a tier's id that are kept."""


class Counts(NamedTuple):
    """Counters of `ReportedStats` that are sampled: their values since a start, or what was added in one period."""

    asked_chunks: float = 0
    own_chunks: float = 0
    peer_chunks: float = 0
    load_count: float = 0
    load_seconds: float = 0
    avoided_prefill_seconds: float = 0

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(one + more for one, more in zip(self, other, strict=True)))

    def since(self, earlier: Counts) -> Counts:
        """Returns the growth since `earlier`, or all counts if a counter has started again."""
        added = Counts(*(now - then for now, then in zip(self, earlier, strict=True)))
        return self if min(added) < 0 else added


class Series:
    """The samples of the fleet or of one instance, a column for each counter and each tier."""

    def __init__(self) -> None:
        self.times = array("d")
        """When each sample was taken, in seconds since 1970. A sample covers the period before."""
        self.counts = {name: array("d") for name in Counts._fields}
        """The growth of each counter per sample, by counter."""
        self.used_bytes: dict[str, array[float]] = {}
        """The bytes that chunks used at each sample, by tier."""

    def add(self, time: float, counts: Counts, used_bytes: Mapping[str, int]) -> None:
        """Adds a sample, in place of the oldest one if there are `MAX_SAMPLES`."""
        for tier in sorted(used_bytes, key=lambda name: -used_bytes[name])[:MAX_TIERS]:
            self.used_bytes.setdefault(tier, array("d", bytes(8 * len(self.times))))
        self.times.append(time)
        for name, value in counts._asdict().items():
            self.counts[name].append(value)
        for tier, column in self.used_bytes.items():
            column.append(used_bytes.get(tier, 0))
        if len(self.times) > MAX_SAMPLES:
            for column in (self.times, *self.counts.values(), *self.used_bytes.values()):
                del column[0]
        for tier in [tier for tier, column in self.used_bytes.items() if tier not in used_bytes and not any(column)]:
            del self.used_bytes[tier]


class History:
    """Samples of all instances together, and of each while it is registered.

    What an instance counted before its first sample is left out: it may be long ago.
    """

    def __init__(self) -> None:
        self.fleet = Series()
        """The sums over the registered instances."""
        self._series: dict[str, Series] = {}
        self._last: dict[str, Counts] = {}
        self._taken_at = float("-inf")

    def series(self, instance_id: str) -> Series:
        """The samples of one instance; none if it is not registered."""
        return self._series.get(instance_id, Series())

    def take_if_due(self, instances: Iterable[Instance], time: float) -> None:
        """Takes a sample if the last one is `PERIOD_SECONDS` old, or the clock was set back."""
        if not self._taken_at <= time < self._taken_at + PERIOD_SECONDS:
            self.take(instances, time)

    def take(self, instances: Iterable[Instance], time: float) -> None:
        """Takes a sample. `time` is in seconds since 1970."""
        self._taken_at = time
        last, self._last = self._last, {}
        series, self._series = self._series, {}
        total, total_used = Counts(), dict[str, int]()
        for instance in instances:
            instance_id = instance.info.instance_id
            counts = self._last[instance_id] = Counts(*(getattr(instance.stats, name) for name in Counts._fields))
            added = counts.since(last.get(instance_id, counts))
            used = {usage.tier[:MAX_TIER_NAME]: usage.used_bytes for usage in instance.tiers[:MAX_TIERS]}
            if len(self._series) < MAX_INSTANCES:
                self._series[instance_id] = series.get(instance_id) or Series()
                self._series[instance_id].add(time, added, used)
            total = total.plus(added)
            for tier, size_bytes in used.items():
                total_used[tier] = total_used.get(tier, 0) + size_bytes
        self.fleet.add(time, total, total_used)


BOUNDS_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets; the last bucket has none."""


class LatencyHistogram:
    """Lookups since the process started, their hits and their latency. Cheap enough for every lookup."""

    def __init__(self) -> None:
        self.hits = 0
        self.seconds = 0.0
        """Total time of all events."""
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, seconds: float, hit: bool) -> None:
        """Counts an event."""
        self.hits += hit
        self.seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def cumulative(self) -> list[int]:
        """Returns the number of events up to each of `BOUNDS_SECONDS`; the last number counts all."""
        return list(accumulate(self._buckets))
