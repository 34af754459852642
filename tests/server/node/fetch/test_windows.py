"""How many chunks a holder is assigned at a time, and when another one is used beside it."""

from __future__ import annotations

from collections import deque

import pytest

from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.fetch.scheduler import (
    MAX_ACTIVE,
    MAX_WINDOW_BYTES,
    PROBE_BYTES,
    UNKNOWN_WINDOW_BYTES,
    WINDOW_CHUNKS,
    WINDOW_SECONDS,
    WORTH_PROBING,
    HolderState,
)
from tests.lmkv.transfer.test_bandwidth import known
from tests.server.node.fetch.test_scheduler import CHUNK_BYTES, GB, World, world
from tests.server.node.peer_parts import SMALL

COUNT = 200
"""More chunks than any window has, with chunks of 8 MiB."""


def holder(bandwidth: Bandwidth | None = None, count: int = COUNT) -> HolderState:
    return HolderState(indices=range(count), bandwidth=bandwidth or Bandwidth())


@pytest.mark.parametrize(
    ("rate", "size_bytes"),
    [(0.001 * GB, PROBE_BYTES), (0.1 * GB, 0.1 * GB * WINDOW_SECONDS), (1000 * GB, MAX_WINDOW_BYTES)],
)
def test_a_window_takes_half_a_second_within_bounds(rate: float, size_bytes: float) -> None:
    one = holder(known(rate))
    assert world(COUNT, one).plan.activate() == [one]
    assert [*one.pending] == [*range(int(size_bytes // CHUNK_BYTES))]


def test_a_window_has_a_bounded_number_of_chunks() -> None:
    one = holder(known(1000 * GB), 2 * WINDOW_CHUNKS)
    assert World(2 * WINDOW_CHUNKS, [one], spec=SMALL).plan.activate() == [one]
    assert len(one.pending) == WINDOW_CHUNKS


def test_the_first_window_of_the_only_holder_is_large() -> None:
    failed, one = holder(), holder()
    failed.failed = True
    assert world(COUNT, failed, one).plan.activate() == [one]
    assert len(one.pending) == UNKNOWN_WINDOW_BYTES // CHUNK_BYTES


def test_holders_of_unknown_bandwidth_share_what_is_worth_a_few_probes() -> None:
    holders = [holder(), holder()]
    assert world(WORTH_PROBING, *holders).plan.activate() == holders
    assert [[*one.pending] for one in holders] == [[0], [1]]


def test_a_bounded_number_of_holders_is_active_besides_those_that_are_late() -> None:
    holders = [holder() for _ in range(MAX_ACTIVE + 2)]
    plan = world(COUNT, *holders).plan
    assert plan.activate() == holders[:MAX_ACTIVE]
    assert plan.activate() == []
    plan.mark_late(holders[0])
    assert plan.activate() == [holders[MAX_ACTIVE]]
    assert plan.activate() == []


def test_equal_holders_share_what_one_of_them_was_assigned() -> None:
    first, second = holder(known(GB)), holder(known(GB))
    assert world(40, first, second).plan.activate() == [first, second]
    assert ([*first.pending], [*second.pending]) == ([*range(20)], [*range(20, 40)])
    assert (first.assigned, second.assigned) == ({*range(20)}, {*range(20, 40)})


def test_a_faster_holder_takes_the_larger_share() -> None:
    first, second = holder(known(GB)), holder(known(3 * GB))
    first.is_near = True
    assert world(40, first, second).plan.activate() == [first, second]
    assert len(second.pending) == 30


def test_an_answer_that_takes_long_makes_the_share_smaller() -> None:
    first, second = holder(known(GB)), holder(known(GB, answer_seconds=20 * CHUNK_BYTES / GB))
    assert world(40, first, second).plan.activate() == [first, second]
    assert len(second.pending) == 10


def test_a_holder_of_unknown_bandwidth_takes_a_probe_from_another_at_most_half() -> None:
    first, second = holder(known(1000 * GB)), holder()
    assert world(WORTH_PROBING, first, second).plan.activate() == [first, second]
    assert ([*first.pending], [*second.pending]) == ([0, 1, 2], [3])
    first, second = holder(known(1000 * GB)), holder()
    plan = world(1, first, second).plan
    assert plan.activate() == [first]
    assert not plan.assign(second), "one pending chunk is not shared"


def test_a_late_holder_takes_nothing_from_others() -> None:
    first, late = holder(known(1000 * GB)), holder(known(1000 * GB))
    late.is_late = True
    plan = world(40, first, late).plan
    assert plan.activate() == [first]
    assert not plan.assign(late)
    assert len(first.pending) == 40


def test_a_small_gain_activates_no_holder() -> None:
    first, second = holder(known(GB)), holder(known(0.1 * GB))
    assert world(40, first, second).plan.activate() == [first], "it would take one of eleven"
    second = holder(known(0.13 * GB))
    assert world(40, holder(known(GB)), second).plan.activate()[1:] == [second]


def test_reads_beside_others_measure_this_nodes_side() -> None:
    holders = [holder(known(GB)), holder(known(GB))]
    it = world(100, *holders)
    assert it.plan.activate() == holders
    for _ in range(2):  # the first one connects
        it.plan.record_read(holders[0], CHUNK_BYTES, 0.5)
    assert it.combined.rate(0.0) == pytest.approx(2 * CHUNK_BYTES / 0.5)


def test_a_read_of_the_only_active_holder_measures_the_holder() -> None:
    one = holder()
    it = world(10, one)
    assert it.plan.activate() == [one]
    for _ in range(3):
        it.plan.record_read(one, CHUNK_BYTES, 0.5)
    assert one.bandwidth.rate(0.0) == pytest.approx(CHUNK_BYTES / 0.5)
    assert it.combined.rate(0.0) is None
    it.plan.record_read(one, CHUNK_BYTES, 0.1)
    assert (one.bandwidth.rate(0.0) or 0) > CHUNK_BYTES / 0.5, "it may become faster"


def test_a_chunk_that_no_holder_has_ends_what_is_assigned_in_order() -> None:
    one = holder()
    one.unavailable.add(3)
    it = world(10, one)
    assert it.plan.unassigned() == [0, 1, 2]
    assert it.plan.activate() == [one]
    assert it.plan.unassigned() == []
    free = World(10, [holder()], in_order=False)
    free.holders[0].unavailable.add(3)
    assert free.plan.unassigned() == [0, 1, 2, *range(4, 10)]


EXACT = float(1 << 30)
"""Bytes per second without rounding errors."""


def exactly_known() -> Bandwidth:
    bandwidth = Bandwidth()
    for _ in range(2):  # the first one connects
        bandwidth.record_read(1 << 26, (1 << 26) / EXACT, 0.0)
    return bandwidth


def test_a_gain_of_one_chunk_is_enough() -> None:
    holders = [holder(exactly_known()), holder(exactly_known())]
    assert world(3, *holders).plan.activate() == holders
    assert [[*one.pending] for one in holders] == [[0, 1], [2]]
    holders = [holder(exactly_known()), holder(exactly_known())]
    assert world(1, *holders).plan.activate() == holders[:1]


def test_a_saturated_side_leaves_nothing_for_another_holder() -> None:
    holders = [holder(exactly_known()), holder(exactly_known())]
    it = world(40, *holders)
    for _ in range(2):
        it.combined.record_read(1 << 26, (1 << 26) / EXACT, 0.0)
    assert it.plan.activate() == holders[:1]


def test_an_even_share_is_not_held_against_a_holder() -> None:
    holders = [holder(exactly_known()), holder(exactly_known())]
    it = world(100, *holders)
    assert it.plan.activate() == holders
    it.plan.record_read(holders[0], CHUNK_BYTES, 2 * CHUNK_BYTES / EXACT)
    assert holders[0].bandwidth.rate(0.0) == EXACT


def test_a_read_that_ends_after_its_holder_was_deactivated_is_measured() -> None:
    one = holder(exactly_known())
    it = world(10, one)
    assert it.plan.activate() == [one]
    it.plan.deactivate(one)
    it.plan.record_read(one, CHUNK_BYTES, CHUNK_BYTES / EXACT * 4)
    assert (one.bandwidth.rate(0.0) or 0.0) < EXACT


def test_of_several_holders_the_one_that_takes_longest_is_relieved() -> None:
    slow, fast, idle = holder(known(GB)), holder(known(10 * GB)), holder(known(GB))
    plan = world(40, slow, fast, idle).plan
    slow.assigned, fast.assigned = set(range(10)), set(range(10, 30))
    slow.pending, fast.pending = deque(range(10)), deque(range(10, 30))
    plan.active[:] = [slow, fast]
    assert plan._steal(idle) == [5, 6, 7, 8, 9]
    assert len(fast.pending) == 20


def test_a_holder_whose_answer_takes_longer_than_the_work_has_no_share() -> None:
    late = holder(known(GB, answer_seconds=1000.0))
    assert world(40, late).plan._share(4, late, GB, GB) == 0.0
