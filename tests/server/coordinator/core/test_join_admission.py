"""However many instances come at once, a bounded number of them joins at a time, and all of them in the end."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import Full
from lmkv.internal.v1.report_service_pb2 import ReportRequest
from lmkv_server.coordinator.core.instances import (
    GUESS_WEIGHT,
    GUESSED_PACE_SECONDS,
    MAX_JOINING,
    MAX_JOINING_OF_TENANT,
    REMEMBERED_JOINS,
    TURNS_PER_JOIN,
    Instance,
    JoinAdmission,
)
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.registry.registry import RETURN_SECONDS, Registry, ReportStream

LEASE_TTL = 3.0
LIMIT = 4


def info_of(number: int, epoch: int = 1) -> InstanceInfo:
    return InstanceInfo(instance_id=f"node-{number}", epoch=epoch, peer_address=f"host:{number + 1}")


def instance(number: int, now: float = 0.0) -> Instance:
    return Instance(info_of(number), now, now + LEASE_TTL)


def filled() -> tuple[JoinAdmission, list[Instance]]:
    admission = JoinAdmission(LIMIT)
    joining = [instance(number) for number in range(LIMIT)]
    for one in joining:
        admission.check(0.0)
        admission.admit(one)
    return admission, joining


def joined(registry: Registry, number: int) -> ReportStream:
    """A report that it holds nothing."""
    registry.register(info_of(number), 0.0)
    stream = registry.open_stream(f"node-{number}", 1, 0.0)
    stream.apply(
        ReportRequest(instance_id=f"node-{number}", epoch=1, sequence=1, snapshot=True, snapshot_end=True), 0.0
    )
    return stream


def put_off(admission: JoinAdmission, now: float) -> float:
    with pytest.raises(Full) as caught:
        admission.check(now)
    return caught.value.retry_seconds


def test_who_has_joined_makes_room_for_another() -> None:
    admission, joining = filled()
    put_off(admission, 0.0)
    joining[0].synced = True
    admission.check(0.1)
    admission.admit(instance(LIMIT))
    put_off(admission, 0.1)


def test_who_gives_up_makes_room_when_its_lease_is_over() -> None:
    admission, _ = filled()
    put_off(admission, LEASE_TTL - 0.01)
    admission.check(LEASE_TTL)


def test_turns_are_one_after_the_other() -> None:
    admission, _ = filled()
    turns = [put_off(admission, 0.0) for _ in range(10)]
    assert turns == sorted(set(turns))


def test_turns_come_twice_as_fast_as_joins() -> None:
    """Which take a quarter of a second each, whatever was guessed."""
    admission, joining = filled()
    put_off(admission, 0.0)
    now = 0.0
    for number in range(200):
        now += 0.25
        joining[number].synced = True
        joining.append(instance(LIMIT + number, now))
        admission.check(now)
        admission.admit(joining[-1])
    put_off(admission, now)
    first, second = put_off(admission, now), put_off(admission, now)
    assert second - first == pytest.approx(0.25 / TURNS_PER_JOIN, rel=0.25)


def test_what_was_long_ago_does_not_count() -> None:
    admission, joining = filled()
    turn = put_off(admission, 0.0)
    for one in joining:
        one.synced = True
    later = 1000.0
    for number in range(LIMIT):
        admission.check(later)
        admission.admit(instance(number, later))
    assert put_off(admission, later) == turn


def put_off_seconds(registry: Registry, number: int, now: float) -> float | None:
    try:
        registry.register(info_of(number), now)
    except Full as full:
        return full.retry_seconds
    return None


@given(
    count=st.integers(1, 300),
    seconds=st.floats(0.001, 0.5, allow_nan=False),
    arrivals=st.floats(0.0, 2.0, allow_nan=False),
)
def test_all_of_a_rush_join_and_never_too_many_at_once(count: int, seconds: float, arrivals: float) -> None:
    """Instances join in sequence, each for a number of seconds; rejected ones retry at the announced time."""
    registry = Registry(lease_ttl=1e6, now=0.0, admission=JoinAdmission(LIMIT).of())
    events = [(arrivals * number / count, number, "comes") for number in range(count)]
    heapq.heapify(events)
    busy_until, visits = 0.0, 0
    while events:
        now, number, event = heapq.heappop(events)
        if event == "comes":
            visits += 1
            retry_seconds = put_off_seconds(registry, number, now)
            if retry_seconds is not None:
                assert registry.is_partial(now + retry_seconds)
                heapq.heappush(events, (now + max(retry_seconds, 1e-3), number, "comes"))
                continue
            registry.open_stream(f"node-{number}", 1, now)
            busy_until = max(busy_until, now) + seconds
            heapq.heappush(events, (busy_until, number, "joined"))
        else:
            found = registry.instances.find(f"node-{number}")
            assert found is not None
            found.synced = True
        assert sum(not one.synced for one in registry.instances) <= LIMIT
    assert len(registry.instances) == count
    slowest = max(seconds, GUESSED_PACE_SECONDS)
    assert busy_until <= 3 * (arrivals + count * slowest) + 2.0, "those who wait do not wait for nothing"
    assert visits <= 30 * count


def test_an_instance_that_reports_is_not_put_off_when_it_registers_again() -> None:
    registry = Registry(lease_ttl=LEASE_TTL, now=-100.0, admission=JoinAdmission(LIMIT).of())
    for number in range(LIMIT):
        registry.register(info_of(number), 0.0)
        registry.open_stream(f"node-{number}", 1, 0.0)
    registry.register(info_of(0), 0.0)
    with pytest.raises(Full):
        registry.register(info_of(LIMIT), 0.0)
    with pytest.raises(Full):
        registry.register(info_of(0, epoch=2), 0.0)


def test_who_is_put_off_is_not_forgotten_meanwhile() -> None:
    registry = Registry(lease_ttl=0.01, now=-100.0, admission=JoinAdmission(1).of())
    stream = joined(registry, 0)
    stream.close()
    registry.register(info_of(1), 0.0)
    with pytest.raises(Full) as caught:
        registry.register(info_of(0), 0.0)
    back = caught.value.retry_seconds + RETURN_SECONDS
    assert [one.info.instance_id for one in registry.expire(back - 0.001)] == ["node-1"]
    assert [one.info.instance_id for one in registry.expire(back)] == ["node-0"]


def test_a_predecessor_is_not_kept_for_whom_came_after_it() -> None:
    registry = Registry(lease_ttl=0.01, now=-100.0, admission=JoinAdmission(1).of())
    joined(registry, 0).close()
    registry.register(info_of(1), 0.0)
    with pytest.raises(Full):
        registry.register(info_of(0, epoch=2), 0.0)
    assert [one.info.instance_id for one in registry.expire(0.01)] == ["node-0", "node-1"]


def test_answers_are_partial_until_those_put_off_have_come_back() -> None:
    registry = Registry(lease_ttl=LEASE_TTL, now=-100.0, admission=JoinAdmission(1).of())
    registry.register(info_of(0), 0.0)
    with pytest.raises(Full) as caught:
        registry.register(info_of(1), 0.0)
    registry.deregister("node-0", 1)
    back = caught.value.retry_seconds + RETURN_SECONDS
    assert registry.is_partial(back - 0.001)
    assert not registry.is_partial(back)


def test_one_bound_holds_for_the_tenants_together() -> None:
    admission = JoinAdmission(2)
    ours, theirs = (Registry(lease_ttl=LEASE_TTL, now=-100.0, admission=admission.of()) for _ in range(2))
    ours.register(info_of(0), 0.0)
    theirs.register(info_of(0), 0.0)
    for registry in (ours, theirs):
        with pytest.raises(Full):
            registry.register(info_of(1), 0.0)


def test_by_default_a_bounded_number_joins() -> None:
    admission = JoinAdmission()
    for number in range(MAX_JOINING_OF_TENANT):
        admission.check(0.0)
        admission.admit(instance(number))
    count = MAX_JOINING_OF_TENANT
    with pytest.raises(Full, match=f"^{count} instances are joining, {count} of them of this tenant; retry after the"):
        admission.check(0.0)


def test_each_tenant_finds_a_place_that_the_others_have_left() -> None:
    """However many tenants take all that they can get, and no more than the limit in all."""
    admission = JoinAdmission()
    counts = []
    for tenant in range(5):
        registry = Registry(lease_ttl=LEASE_TTL, now=-100.0, admission=admission.of(f"t-{tenant}"))
        counts.append(0)
        while put_off_seconds(registry, counts[-1], 0.0) is None:
            counts[-1] += 1
    assert counts[0] == MAX_JOINING_OF_TENANT
    assert sorted(counts, reverse=True) == counts
    assert min(counts) > 0
    assert sum(counts) <= MAX_JOINING


def test_an_instance_that_starts_again_and_again_has_one_place() -> None:
    registry = Registry(lease_ttl=LEASE_TTL, now=-100.0, admission=JoinAdmission(2).of())
    for epoch in range(1, 10):
        registry.register(info_of(0, epoch), 0.0)
    registry.register(info_of(1), 0.0)
    with pytest.raises(Full):
        registry.register(info_of(2), 0.0)
    registry.deregister("node-1", 1)
    registry.register(info_of(2), 0.0)


def test_the_first_turns_follow_the_guess() -> None:
    admission, _ = filled()
    pace = GUESSED_PACE_SECONDS / TURNS_PER_JOIN
    assert [put_off(admission, 0.0) for _ in range(3)] == [pytest.approx(pace * turn) for turn in (1, 2, 3)]
    late = put_off(admission, 1.0)
    waited = (GUESSED_PACE_SECONDS * GUESS_WEIGHT + 1.0) / GUESS_WEIGHT
    assert late == pytest.approx(waited / TURNS_PER_JOIN, abs=0.001), "turns do not lie in the past"


def test_a_retry_delay_is_in_whole_milliseconds() -> None:
    admission, _ = filled()
    put_off(admission, 0.0)
    delay = put_off(admission, 0.123456)
    assert delay == round(delay, 3)


def test_an_instance_that_joins_elsewhere_makes_room() -> None:
    admission, joining = filled()
    admission.leave(joining[0])
    admission.leave(joining[0])
    admission.check(0.0)


def test_a_rush_is_over_once_fewer_than_half_are_joining() -> None:
    admission, joining = filled()
    first = put_off(admission, 0.0)
    for one in joining[: LIMIT // 2]:
        one.synced = True
    now = 100.0
    joining[2].expire_time = joining[3].expire_time = now + LEASE_TTL
    for number in range(LIMIT // 2):
        admission.check(now)
        admission.admit(instance(LIMIT + number, now))
    assert put_off(admission, now) > first, "half of them are still joining: it continues"
    later = now + 2 * LEASE_TTL
    for number in range(LIMIT):
        admission.check(later)
        admission.admit(instance(10 * LIMIT + number, later))
    assert put_off(admission, later) == first


def test_a_rush_is_over_while_a_few_are_still_joining() -> None:
    admission, joining = filled()
    first = put_off(admission, 0.0)
    for one in joining[1:]:
        one.synced = True
    for number in range(LIMIT - 1):
        admission.check(1.0)
        admission.admit(instance(LIMIT + number, 1.0))
    assert put_off(admission, 1.0) == first


def test_old_joins_lose_weight() -> None:
    """After many quick joins, slow ones count within twice the number of remembered ones."""
    admission, joining = filled()
    put_off(admission, 0.0)
    now, number = 0.0, 0
    for seconds, count in ((0.001, 20 * REMEMBERED_JOINS), (0.5, 2 * REMEMBERED_JOINS)):
        for _ in range(count):
            now += seconds
            joining[number].synced = True
            joining.append(instance(LIMIT + number, now))
            admission.check(now)
            admission.admit(joining[-1])
            number += 1
    put_off(admission, now)
    first, second = put_off(admission, now), put_off(admission, now)
    assert second - first > 0.5 * 0.5 / TURNS_PER_JOIN
